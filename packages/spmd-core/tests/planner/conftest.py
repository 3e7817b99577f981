"""Plans look for the names of tensors among a test's objects, not among a long run's millions."""

import gc

import pytest

from spmd_core.program import tensor_names


@pytest.fixture(autouse=True)
def objects_of_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what was frozen before this module (`old_objects_frozen`).

    Each program of a plan looks, which takes a quarter of a second with all.
    """
    monkeypatch.setattr(tensor_names, "_objects", gc.get_objects)
