"""Which line of the user's program is running: the nearest frame that belongs neither to torch, nor to jax, nor to this project."""

import os
import sys
from pathlib import Path

import jax
import torch

# The folders whose frames are the machinery, not the program.
_MACHINERY = tuple(str(Path(path).parent) + os.sep for path in (torch.__file__, jax.__file__, __file__))


def user_frame() -> tuple[str, int, int]:
    """The file and line of the user's call, and its `stacklevel` for `warnings.warn` as the caller of this function would give it.

    In a backward pass that is the line of `backward()`: torch keeps no record of the forward line.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_MACHINERY) or frame.f_code.co_filename.startswith("<")):
        level, frame = level + 1, frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, level


def user_line() -> str:
    """`file:line` of the user's call."""
    filename, line, _ = user_frame()
    return f"{filename}:{line}"
