"""The picture of a mesh."""

import numpy as np
import pytest

import spmd_core as spmd
from examples.training.pictures import mesh_picture


@pytest.mark.parametrize("text", ["x=8", "x=4,y=2", "x=2,y=2,z=2", "w=1,x=2,y=2,z=2"])
def test_meshes_of_any_rank_are_drawn(text: str) -> None:
    picture = mesh_picture(spmd.parse_mesh(text, 8))
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 8  # a color for each device
