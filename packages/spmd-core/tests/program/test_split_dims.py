"""How the leaves, marks and results of a program split their dims."""

import jax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import two_axes

from spmd_core.graph.values import Spec
from spmd_core.program import split_dims


@pytest.mark.parametrize(
    ("shape", "marks", "joins"),
    [
        ((4, 2, 1), [(("x", "y"), "z")], False),
        ((4, 1, 2), [(("x", "y"), "z")], False),
        ((2, 2, 2), [("x", "y"), ("z", None)], False),
        ((2, 2, 2), [(("x", "y", "z"), None)], False),
        ((2, 2, 2), [(("x", "y"), None), (None, "z")], False),
        ((2, 2, 2), [("z", ("y", "x")), (None, "z")], True),
    ],
)
def test_whether_one_tensor_is_split_over_three_axes_on_two_dims(shape, marks, joins):
    two_axes()
    mesh = jax.make_mesh(shape, ("x", "y", "z"), (AxisType.Auto,) * 3)
    spec = Spec.contiguous((8, 8), torch.float32)
    found = [(spec, NamedSharding(mesh, PartitionSpec(*mark))) for mark in marks]
    splits = split_dims.splits(found, lambda x, num: x, 8, replicates_indices=False)
    assert splits.joins_axes == joins
