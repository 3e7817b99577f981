"""Runs a script in a process of its own, whose programs take the memory of users' programs."""

import json
import os
from pathlib import Path
from typing import Any

import fresh

import spmd_core as spmd

_FLAGS = "--xla_backend_optimization_level=0"


def figures(script: str, *, warns: bool = True) -> Any:
    """What the script prints, as JSON. It starts with a `spmd` that has no compile cache.

    XLA's passes are those of users, other than in the tests' own process. LLVM's are left out: they
    come when memory is known.

    Args:
        script: Python.
        warns: whether it may write to stderr.
    """
    here = Path(__file__).parent
    paths = [here, here / "modules", Path(spmd.__file__).parent.parent]
    done = fresh.run(
        ["-c", f"import spmd_core as spmd\nspmd.config.cache_dir = None\n{script}"],
        {**os.environ, "XLA_FLAGS": _FLAGS, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert done.returncode == 0 and (warns or not done.stderr), done.stderr
    return json.loads(done.stdout)
