"""Every object of a module that changes says what guards it, and `reset()` takes modes back."""

import sys
from pathlib import Path

import pytest
import torch
from state import reset

import spmd_core as spmd
from spmd_core.dispatch.eager import is_eager_mode
from spmd_core.program import cut_guard
from spmd_core.steps import closures

sys.path.append(str(Path(__file__).parents[4] / "scripts"))
import mutable_state  # a script of the repository, outside of any package


@pytest.mark.parametrize("source", mutable_state.PACKAGES, ids=lambda path: path.name)
def test_every_global_that_changes_is_listed(source):
    found = list(mutable_state.states(source))
    silent = [f"{state.file}: {state.name}" for state in found if state.guard is None]
    assert silent == [], "write above each: # Guarded by: .... Cleared by: ...."
    for state in found:
        lock, *_ = state.guard.split("`")[1:] or [None]
        text = (source.parent / state.file).read_text()
        is_lock = state.guard.startswith("`") and f"\n{lock} = threading." in text
        assert is_lock or state.guard.startswith(mutable_state.GUARDS), state
    num_comments = sum(path.read_text().count("# Guarded by: ") for path in source.rglob("*.py"))
    assert num_comments == len(found), "a comment stands at no object that it could describe"


def test_objects_that_change_are_found(tmp_path):
    (tmp_path / "module.py").write_text(
        "import threading\n"
        "class Named(NamedTuple):\n    pass\n"
        "class State:\n    known: ClassVar[dict[int, int]] = {}\n"
        "table = {1: 2}\nNAMED = Named()\n_lock = threading.Lock()\n"
        "# The state.\n# Guarded by: `_lock`.\n# Cleared by: never, a cache.\n_state = State()\n"
        "cache = {}\nlocal = threading.local()\n_flag = False\n"
        "def change():\n    global _flag\n    _flag = True\n"
    )
    found = {state.name: state[2:] for state in mutable_state.states(tmp_path)}
    assert found == {
        "known": ("", None, None),
        "_state": ("The state", "`_lock`", "never, a cache"),
        "cache": ("", None, None),
        "local": ("", None, None),
        "_flag": ("", None, None),
    }


def test_reset_takes_back_what_a_test_set():
    before = spmd.config.max_programs
    spmd.config.max_programs = 3
    spmd.config.compiler_options["xla_cpu_enable_fast_math"] = True
    spmd.set_global_mesh(spmd.Mesh([0], (1,)))
    spmd.eager_mode(True)
    spmd.add_step_closure(lambda: None)
    (torch.ones(2, device="xla") * 3).cpu()
    cut_guard.this_thread.cut_guard = object()
    reset()
    assert spmd.config.max_programs == before and spmd.config.compiler_options == {}
    assert spmd.get_global_mesh() is None and not is_eager_mode()
    assert not closures._waiting and cut_guard.this_thread.cut_guard is None
    assert spmd.metrics.counter("cuts") == 0
