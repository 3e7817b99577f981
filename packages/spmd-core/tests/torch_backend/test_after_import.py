"""A change of a module is made once: at once if it is imported, else after its import."""

import importlib
import inspect
import sys

from spmd_core import releases
from spmd_core.torch_backend.after_import import _waiting, after_import


def test_the_change_is_made_once_and_the_module_is_as_ever(tmp_path, monkeypatch):
    (tmp_path / "comes_later.py").write_text("value = 1\ndef f():\n    return value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []

    def change(module):
        seen.append((module.__name__, module.value))
        module.value += 1

    after_import("comes_later", change)
    assert not seen
    module = importlib.import_module("comes_later")
    try:
        assert seen == [("comes_later", 1)] and module.f() == 2
        assert module.__spec__.loader is module.__loader__
        assert inspect.getsource(module.f).startswith("def f()")
        after_import("comes_later", change)
        assert module.f() == 3, "an imported module is changed at once"
        assert importlib.reload(module).f() == 1 and len(seen) == 2
    finally:
        sys.modules.pop("comes_later", None)
    assert "comes_later" not in _waiting


def test_what_torch_lacks_is_listed_and_torch_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(releases, "_absent", dict(releases._absent))
    seen = []
    after_import("torch.distributed.no_such_module", seen.append)
    after_import("torch.distributed.fsdp.api", seen.append, "StateDictType", "StateDictType._gone")
    importlib.import_module("torch.distributed.fsdp.api")
    assert not seen and "torch.distributed.no_such_module" not in _waiting
    absent = releases.versions().absent
    assert "torch.distributed.fsdp.api.StateDictType" not in absent
    for name in ("no_such_module", "fsdp.api.StateDictType._gone"):
        assert "torch's own runs" in absent[f"torch.distributed.{name}"]
    after_import("torch.distributed.fsdp.api", seen.append, "StateDictType")
    assert len(seen) == 1
