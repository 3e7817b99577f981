"""Names the operations of a lowered program after torch's operations and the user's lines."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from spmd_core import releases
from spmd_core.program.ir import Source

_source_info = releases.jax_module("jax.extend.source_info_util", "current", "user_context")


@contextmanager
def named(source: Source) -> Iterator[None]:
    """Names the operations that are traced inside after a recorded operation.

    If that has an origin, the name also has its module, its position and the user's line.
    """
    origin = source.origin
    if origin is None:
        with jax.named_scope(source.name):
            yield
        return
    line = f"{Path(origin.file).name}:{origin.line}"
    scope = f"{origin.module}/{source.name}#{source.position}/{line}".lstrip("/")
    with (
        _source_info.user_context(_traceback(origin.file, origin.line, origin.function)),
        jax.named_scope(scope),
    ):
        yield


@functools.lru_cache(maxsize=4096)
def _traceback(file: str, line: int, function: str) -> Any:
    """A jax traceback whose innermost frame is the user's line.

    It is taken inside of code that is compiled with that file, line and function name.
    """
    code = compile("\n" * (line - 1) + "current().traceback", file, "eval")
    return eval(
        code.replace(co_name=function, co_qualname=function), {"current": _source_info.current}
    )
