"""Finds the line of the user's program that is running: the nearest frame of the user's code.

A frame is the user's if its file belongs neither to torch, nor to jax, nor to this project.
`user_line` finds the line once, for a warning or an error. With `config.record_source_lines`, every
recorded operation keeps its `Origin`. In a backward pass, autograd's engine runs the operations and
usually no frame of the user's is below it: the origin of such an operation is the line of the
forward operation whose gradient it computes. torch numbers the nodes of autograd's graph in the
order in which the forward operations make them; `note_forward` stores the line under that number.

Code that was generated from the user's, such as the graphs of `torch.compile`, has the user's lines
once `note_generated` was told them.
"""

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import torch

# Frames of files in these folders are not the user's.
# Guarded by: imports. Cleared by: never.
_LIBRARY_FOLDERS: tuple[str, ...] = ()
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(threading.__file__).parent) + os.sep
# A file and a function's name.
_ENGINE = (_TORCH + os.path.join("autograd", "graph.py"), "_engine_run_backward")
_FUNCTION = (_TORCH + os.path.join("autograd", "function.py"), "apply")
_MODULE_CALL = (_TORCH + os.path.join("nn", "modules", "module.py"), "_call_impl")
_MAX_FORWARD = 500_000


def hide_package_of(file: str) -> None:
    """From now on, frames of files in the folder of `file` and below are not the user's.

    A package that is built on this one calls this with its `__file__`.
    """
    global _LIBRARY_FOLDERS
    _LIBRARY_FOLDERS = (*_LIBRARY_FOLDERS, str(Path(file).parent) + os.sep)


for _file in (torch.__file__, jax.__file__, __file__):
    hide_package_of(_file)


class Place(NamedTuple):
    """A line of the user's program, and the function that it is in."""

    file: str
    line: int
    function: str


# By generated code, the user's place of each of its lines.
# Guarded by: the GIL. Cleared by: never: freed with the code.
_generated: WeakKeyDictionary[CodeType, dict[int, Place]] = WeakKeyDictionary()


def note_generated(code: CodeType, places: dict[int, Place]) -> None:
    """Stores from where the lines of generated code come, by their numbers."""
    _generated[code] = places


def _generated_place(frame: FrameType) -> Place | None:
    """The place that a frame of generated code stands for; None for other frames."""
    if frame.f_code.co_filename[:1] != "<" or frame.f_code not in _generated:
        return None
    return _generated[frame.f_code].get(frame.f_lineno)


def user_frame() -> tuple[str, int, int]:
    """The file and line of the user's call, and its `stacklevel` for `warnings.warn`.

    The level counts from the caller of this function. In a backward pass that runs in a thread of
    autograd's, the line is that of the call of `backward()`.
    """
    level, frame, place = 1, sys._getframe(1), None
    while frame.f_back is not None and _is_library(frame):
        place = place or _generated_place(frame)
        level, frame = level + 1, frame.f_back
    if place is not None:
        return place.file, place.line, level
    if frame.f_back is None and _is_library(frame):
        frame = _backward_call_elsewhere() or frame
    return frame.f_code.co_filename, frame.f_lineno, level


def user_line() -> str:
    """`file:line` of the user's call."""
    filename, line, _ = user_frame()
    return f"{filename}:{line}"


def line_of_thread(ident: int) -> str:
    """`file:line` of the innermost user's frame in another thread, and the function it is in.

    What Python's own library runs there, such as the wait for a lock, is not the user's, either.
    """
    frame = sys._current_frames().get(ident)
    while (
        frame is not None
        and frame.f_back is not None
        and (_is_library(frame) or frame.f_code.co_filename.startswith(_PYTHON))
    ):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def is_library(file: str) -> bool:
    """Whether frames of a file are not the user's."""
    # Such as `<string>`: code that a library generated, or an interactive session.
    return file[:1] == "<" or file.startswith(_LIBRARY_FOLDERS)


def _is_library(frame: FrameType) -> bool:
    return is_library(frame.f_code.co_filename)


def _runs(frame: FrameType, function: tuple[str, str]) -> bool:
    return frame.f_code.co_name == function[1] and frame.f_code.co_filename == function[0]


# The rest of this module serves `config.record_source_lines`.


class Phase(StrEnum):
    """How the line of an origin is related to the operation."""

    # The line called the operation.
    FORWARD = "forward"
    # The line called the forward operation whose gradient the operation computes.
    BACKWARD = "backward of this line"
    # The line called the operation, in a hook or a user's own `backward`.
    IN_BACKWARD = "in the backward pass"
    # The line called the operation, and a checkpoint computes it again.
    RECOMPUTATION = "computed again in the backward pass"
    # The line called `backward()`: torch does not tell which forward operation this belongs to.
    BACKWARD_CALL = "in this call of backward()"


class Origin(NamedTuple):
    """Where a recorded operation comes from.

    `module` is the path of the `nn.Module`s whose calls were running, such as `GPT.h.0.attn`, or
    empty.
    """

    file: str
    line: int
    function: str
    module: str
    phase: Phase

    def __str__(self) -> str:
        note = "" if self.phase is Phase.FORWARD else f" ({self.phase})"
        return f"{self.file}:{self.line}{note}"


class _Stack(NamedTuple):
    """What `_walk` finds in the running frames.

    Attributes:
        user: the innermost frame of the user's.
        backward_call: the frame that called `backward()`.
        modules: the modules whose calls are running, the outermost first.
        applies_function: whether an `autograd.Function` is being applied.
        generated: the line from which generated code comes that the user's frame calls.
    """

    user: FrameType | None
    backward_call: FrameType | None
    modules: tuple[torch.nn.Module, ...]
    applies_function: bool
    generated: Place | None


# By the number of an autograd node: the thread that made it, and the origin. None if two threads
# made nodes of the same number. At most `_MAX_FORWARD`.
# Guarded by: `_forward_lock`. Cleared by: nobody but the tests.
_forward: dict[int, tuple[threading.Thread, Origin] | None] = {}
_forward_lock = threading.Lock()
# Whether any origin was asked for.
# Guarded by: the GIL. Cleared by: never: values with an origin may exist.
_used = False


def is_used() -> bool:
    """Whether `origin` was called in this process, so that values may have an origin."""
    return _used


def origin() -> Origin | None:
    """Where the operation that is being recorded comes from; None if that is unknown."""
    global _used
    _used = True
    stack = _walk(sys._getframe(1))
    # `Any`: None outside of a backward pass, although torch's stub excludes None.
    node: Any = torch._C._current_autograd_node()
    if stack.user is not None:
        phase = Phase.FORWARD if node is None else Phase.IN_BACKWARD
        place = stack.generated or _place_of(stack.user)
        return Origin(*place, _path(stack.modules), phase)
    if node is None:
        return None
    known = _forward.get(node._sequence_nr())
    if known is not None:
        return known[1]._replace(phase=Phase.BACKWARD)
    call = stack.backward_call or _backward_call_elsewhere()
    return None if call is None else Origin(*_place_of(call), "", Phase.BACKWARD_CALL)


def note_forward(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Stores the origin of an operation under the number of the autograd node just made for it."""
    if not any(_requires_grad(a) for a in (*args, *kwargs.values())):
        return
    # Autograd makes the node directly before it calls the operation, so the newest number is the
    # operation's. An `autograd.Function` makes its node before its `forward`, which runs without
    # gradients: there, the first operation inside determines the node's origin.
    makes_node = torch.is_grad_enabled() or (
        torch._C._current_autograd_node() is None and _walk(sys._getframe(1)).applies_function
    )
    if not makes_node:
        return
    # The thread object, as a later thread may get the number of one that has ended.
    number, thread = torch._C._autograd._get_sequence_nr() - 1, threading.current_thread()
    with _forward_lock:
        if number in _forward:
            known = _forward[number]
            if known is not None and known[0] is not thread:
                _forward[number] = None
            return
        here = origin()
        if here is None:
            return
        if len(_forward) >= _MAX_FORWARD:
            for old in list(islice(_forward, _MAX_FORWARD // 4)):
                del _forward[old]
        _forward[number] = (thread, here)


def _requires_grad(a: Any) -> bool:
    return (
        a.requires_grad
        if isinstance(a, torch.Tensor)
        else isinstance(a, (list, tuple)) and any(_requires_grad(x) for x in a)
    )


def _walk(innermost: FrameType) -> _Stack:
    """Reads the frames from the innermost outwards.

    The first user's frame outside of a running backward pass is the call of `backward()`.
    """
    user = call = generated = None
    modules: list[torch.nn.Module] = []
    applies = in_backward = False
    outermost: FrameType = innermost
    frame: FrameType | None = innermost
    while frame is not None:
        if _runs(frame, _ENGINE):
            in_backward = True
        elif in_backward:
            if not _is_library(frame):
                call = frame
                break
        elif _runs(frame, _MODULE_CALL):
            modules.append(frame.f_locals["self"])
        elif _runs(frame, _FUNCTION):
            # With a user's own `autograd.Function`, a user's frame comes before this one, also in
            # its backward.
            applies = applies or user is None
        elif user is None and not _is_library(frame):
            user = frame
        elif user is None and generated is None:
            generated = _generated_place(frame)
        outermost, frame = frame, frame.f_back
    if (
        user is None
        and not in_backward
        and not outermost.f_code.co_filename.startswith(_LIBRARY_FOLDERS)
    ):
        user = outermost  # a program without a file: `python -c` or an interactive session
    return _Stack(user, call, tuple(reversed(modules)), applies, generated)


def _backward_call_elsewhere() -> FrameType | None:
    """The frame that called `backward()`, in another thread; None if several threads called it."""
    found = []
    for frame in sys._current_frames().values():
        stack = _walk(frame)
        if stack.backward_call is not None:
            found.append(stack.backward_call)
    return found[0] if len(found) == 1 else None


def _place_of(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _path(modules: Iterable[torch.nn.Module]) -> str:
    """The path, such as `GPT.h.0.attn`, of modules that call each other, the outermost first.

    A module that is not part of its caller begins a new path.
    """
    path = ""
    caller: torch.nn.Module | None = None
    for module in modules:
        if module is caller:
            continue
        name = None if caller is None else _name_in(caller, module)
        path = type(module).__name__ if name is None else f"{path}.{name}"
        caller = module
    return path


def _name_in(caller: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """The name of a module in the one that calls it, the shortest; None if it is no part of it.

    Most calls are of children, and those of a ModuleList's parts skip a level. So one level after
    the other is looked at, not all parts of all layers before the one that is called.
    """
    level, seen = [("", caller)], {caller}
    while level:
        below = []
        for prefix, part in level:
            for name, child in part.named_children():
                if child is module:
                    return prefix + name
                if child not in seen:
                    seen.add(child)
                    below.append((f"{prefix}{name}.", child))
        level = below
    return None
