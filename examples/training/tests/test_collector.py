"""What lives as long as a loop is not examined in it, and is again afterwards."""

import atexit
import gc
import weakref

import pytest

from examples.training.collector import begin_imports, end_imports, exempt_new, long_lived


@pytest.fixture(autouse=True)
def nothing_exempt() -> None:
    """As in a program that has exempted nothing itself."""
    gc.unfreeze()


class Node:
    """Refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def is_examined(node: Node) -> bool:
    return any(o is node for o in gc.get_objects())


def test_what_is_alive_is_left_alone_and_new_cycles_are_collected() -> None:
    before, unused = Node(), weakref.ref(Node())
    with long_lived():
        assert not is_examined(before) and unused() is None
        later, garbage = Node(), weakref.ref(Node())
        assert is_examined(later)
        exempt_new()
        assert not is_examined(later) and garbage() is None
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0
    assert is_examined(before) and is_examined(later)


def test_outside_of_a_loop_nothing_is_exempt() -> None:
    exempt_new()
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), long_lived():
        1 / 0  # noqa: B018
    assert gc.get_freeze_count() == 0


def test_what_was_exempt_before_stays_so() -> None:
    before = Node()
    gc.freeze()
    with long_lived():
        pass
    assert not is_examined(before)


def test_imports_are_not_examined() -> None:
    begin_imports()
    try:
        assert not gc.isenabled()
        imported = Node()
        end_imports()
        assert gc.isenabled() and not is_examined(imported)
    finally:
        atexit.unregister(gc.freeze)
        gc.enable()
    gc.unfreeze()
    gc.disable()
    end_imports()  # of a program that began none, and wants no collector
    try:
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.enable()
