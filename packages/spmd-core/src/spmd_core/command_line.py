"""Which command this process is, known before anything heavy is imported."""

import os.path
import sys

SCRIPTS = {"spmd-plan": "spmd_core.plan", "spmd-checkpoint": "spmd_core.checkpoint"}
"""The console scripts that import this package, and the modules that they are."""


def is_any() -> bool:
    """Whether Python runs a module by `-m` and has not imported it yet, or one of `SCRIPTS`."""
    return sys.argv[:1] == ["-m"] or _script() in SCRIPTS


def is_command(module: str) -> bool:
    """Whether this process is `python -m module`, or the console script of that module.

    Call it while `is_any()`: `sys.argv[0]` is "-m" until Python has imported the module to run.
    """
    if _script() in SCRIPTS:
        return SCRIPTS[_script()] == module
    return sys.orig_argv[-len(sys.argv)].endswith(module)


def _script() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""
