"""The garbage collector rests inside of a block, and is as it was behind it."""

import gc

import pytest
import torch

from spmd_core.program import planning
from spmd_core.runtime import collection


def failing():
    with collection.paused():
        with collection.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError


def test_the_collector_is_as_it_was_behind_the_block():
    assert gc.isenabled()
    with pytest.raises(KeyError):
        failing()
    assert gc.isenabled()
    gc.disable()
    try:
        with collection.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_rests_while_a_program_is_planned(monkeypatch):
    """A plan of thousands of operations would make it look at all objects of the process."""
    found, collect = [], planning.collect

    def watched(*args):
        found.append(gc.isenabled())
        return collect(*args)

    monkeypatch.setattr(planning, "collect", watched)
    assert (torch.ones(3).to("xla") + 1).tolist() == [2.0] * 3
    assert found and not any(found) and gc.isenabled()
