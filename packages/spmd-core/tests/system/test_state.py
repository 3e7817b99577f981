"""Every global that changes is listed in ARCHITECTURE.md, and `reset()` takes modes back."""

import ast
from pathlib import Path

import torch
from state import reset

import spmd_core as spmd
from spmd_core.dispatch.eager import is_eager_mode
from spmd_core.program import execution
from spmd_core.steps import closures

SOURCE = Path(spmd.__file__).parent
PAGE = Path(__file__).parents[4] / "ARCHITECTURE.md"
# What makes an object that is changed in place.
MAKERS = {
    "dict",
    "list",
    "set",
    "deque",
    "OrderedDict",
    "Counter",
    "WeakValueDictionary",
    "WeakKeyDictionary",
    "RLock",
    "Lock",
    "ContextVar",
    "count",
    "local",
}


def changing_globals(path):
    """A module's names that `global` rebinds, or that hold an empty container or a lock."""
    tree = ast.parse(path.read_text())
    rebound = {name for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        for target in (t for t in targets if isinstance(t, ast.Name)):
            call = value.func if isinstance(value, ast.Call) else None
            maker = getattr(call, "attr", getattr(call, "id", None))
            empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("{}[]")
            # A container that is filled where it is written is a table.
            made = maker in MAKERS and not (value.args and maker in ("dict", "list", "set"))
            if target.id in rebound or empty or made:
                yield target.id


def test_every_global_that_changes_is_listed():
    listed = PAGE.read_text()
    missing = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name in changing_globals(path)
        if f"`{name}`" not in listed
    ]
    assert missing == []


def test_reset_takes_back_what_a_test_set():
    before = spmd.config.max_programs
    spmd.config.max_programs = 3
    spmd.config.compiler_options["xla_cpu_enable_fast_math"] = True
    spmd.set_global_mesh(spmd.Mesh([0], (1,)))
    spmd.eager_mode(True)
    spmd.add_step_closure(lambda: None)
    (torch.ones(2, device="xla") * 3).cpu()
    execution.this_thread.cut_guard = object()
    reset()
    assert spmd.config.max_programs == before and spmd.config.compiler_options == {}
    assert spmd.get_global_mesh() is None and not is_eager_mode()
    assert not closures._waiting and execution.this_thread.cut_guard is None
    assert spmd.metrics.counter("cuts") == 0
