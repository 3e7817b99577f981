"""Installs what Dynamo needs, once a program imports it: `import spmd_core` does not."""

import functools
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_core.dynamo import backend, functions, tensors
from spmd_core.torch_backend.after_import import after_import

_PACKAGE = Path(__file__).parents[1]
# The folders that record, compile and run operations, and call no code of the program's author that
# is worth compiling.
_RECORDING = tuple(
    str(_PACKAGE / folder / "")
    for folder in (
        *("control_flow", "dispatch", "graph", "manual", "marks", "ops", "planner", "program"),
        *("recording", "runtime", "sharding", "tensor", "torch_backend"),
    )
)
# Dynamo may trace these files, as parts of a function that it compiles.
_TRACED = (
    *("control_flow.torch_functions", "dynamo.functions"),
    *("sharding.partition_spec", "torch_backend.subclasses"),
)


def _leave_out(module: ModuleType) -> None:
    """Makes Dynamo call this package's functions without tracing them."""
    mixed = {name.split(".")[0] for name in _TRACED}
    for found in pkgutil.iter_modules([str(_PACKAGE)]):
        inside = pkgutil.iter_modules([str(_PACKAGE / found.name)], f"{found.name}.")
        names = [f.name for f in inside] if found.name in mixed else [found.name]
        for name in names:
            if name not in _TRACED:
                module.add(f"spmd_core.{name}")


def _run_unseen(module: ModuleType) -> None:
    """Makes Dynamo ignore what records, with all that it calls, such as jax.

    Operations that Dynamo leaves out of its graphs are recorded while it watches every call.
    """
    types = sys.modules["torch._dynamo.types"]
    theirs = module.CatchErrorsWrapper.__call__
    skip = types.FrameAction.SKIP
    unseen = types.ConvertFrameReturn(frame_exec_strategy=types.FrameExecStrategy(skip, skip))

    @functools.wraps(theirs)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename.startswith(_RECORDING):
            return unseen
        return theirs(self, frame, *args, **kwargs)

    module.CatchErrorsWrapper.__call__ = call


def install() -> None:
    """Makes `torch.compile` work for programs of the device."""
    tensors.install()
    functions.install()
    backend.install()
    after_import("torch._dynamo.trace_rules", _leave_out)
    after_import("torch._dynamo.convert_frame", _run_unseen)
