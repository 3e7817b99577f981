"""The garbage collector rests inside of a block, and is as it was behind it."""

import gc

import pytest

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
