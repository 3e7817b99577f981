"""torch_xla's loader: what it adds to `spmd_data`'s, whose own tests hold order, sharding and ends."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader


def test_public_attributes_are_the_wrapped_loaders():
    loader = MpDeviceLoader(DataLoader(torch.arange(4), batch_size=2), torch_xla.device())
    assert loader.batch_size == 2 and torch.equal(loader.dataset, torch.arange(4)) and not hasattr(loader, "state_dict")
    assert [batch.tolist() for batch in copy.copy(loader)] == [[0, 1], [2, 3]]
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'rows'"):
        _ = loader.rows
    with pytest.raises(AttributeError, match="'MpDeviceLoader' object has no attribute '_index_sampler'"):
        _ = loader._index_sampler  # a DataLoader has it: private names are not asked of it
