"""Which line of the user's program is running: the nearest frame that belongs neither to torch, nor to jax, nor to this project.

`user_line` asks that once, for a warning or an error. With `config.record_source_lines`, every recorded operation keeps its `Origin`. An operation of
a backward pass runs in autograd's own thread, where the user has no frame: it has the line of the forward operation whose gradient it computes. torch
numbers the nodes of autograd's graph in the order in which the forward operations make them; `note_forward` keeps the line under that number.
"""

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import torch

# The folders whose frames are the machinery, not the program.
_MACHINERY: tuple[str, ...] = ()
_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENGINE = (_TORCH + os.path.join("autograd", "graph.py"), "_engine_run_backward")
_FUNCTION = (_TORCH + os.path.join("autograd", "function.py"), "apply")
_MODULE_CALL = (_TORCH + os.path.join("nn", "modules", "module.py"), "_call_impl")
_MAX_FORWARD = 500_000


def hide_package_of(file: str) -> None:
    """Frames of files in this file's folder and below are the machinery from now on: a package built on this one names itself with `__file__`."""
    global _MACHINERY
    _MACHINERY = (*_MACHINERY, str(Path(file).parent) + os.sep)


for _file in (torch.__file__, jax.__file__, __file__):
    hide_package_of(_file)


def user_frame() -> tuple[str, int, int]:
    """The file and line of the user's call, and its `stacklevel` for `warnings.warn` as the caller of this function would give it.

    In a backward pass, which autograd's own thread runs, that is the line of `backward()`.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame):
        level, frame = level + 1, frame.f_back
    if frame.f_back is None and _is_machinery(frame):
        frame = _backward_call_elsewhere() or frame
    return frame.f_code.co_filename, frame.f_lineno, level


def user_line() -> str:
    """`file:line` of the user's call."""
    filename, line, _ = user_frame()
    return f"{filename}:{line}"


def _is_machinery(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_MACHINERY) or frame.f_code.co_filename.startswith(
        "<"
    )


def _is(frame: FrameType, place: tuple[str, str]) -> bool:
    return frame.f_code.co_name == place[1] and frame.f_code.co_filename == place[0]


# With `config.record_source_lines`.


class Phase(StrEnum):
    """What the line of an origin is."""

    FORWARD = "forward"  # the line that called the operation
    BACKWARD = "backward of this line"  # the line that called the forward operation whose gradient this is part of
    IN_BACKWARD = "in the backward pass"  # the line that called it, in a hook, a user's own `backward` or a recomputation
    BACKWARD_CALL = (
        "in this call of backward()"  # torch does not say which forward operation it belongs to
    )


class Origin(NamedTuple):
    """Where a recorded operation comes from. `module` is the path of `nn.Module`s that were being called, such as `GPT.h.0.attn`; may be empty."""

    file: str
    line: int
    function: str
    module: str
    phase: Phase

    def __str__(self) -> str:
        note = "" if self.phase is Phase.FORWARD else f" ({self.phase})"
        return f"{self.file}:{self.line}{note}"


class _Stack(NamedTuple):
    """What the running frames say: the user's innermost, that of `backward()`'s call, the modules, whether an autograd.Function is being applied."""

    user: FrameType | None
    backward_call: FrameType | None
    modules: tuple[torch.nn.Module, ...]
    applies_function: bool


# By the number of an autograd node: the thread that made it, and the origin; None where two threads made a node of one number.
_forward: dict[int, tuple[threading.Thread, Origin] | None] = {}
_forward_lock = threading.Lock()
_used = False


def is_used() -> bool:
    """Whether an origin was ever asked for in this process, so that values may have one."""
    return _used


def origin() -> Origin | None:
    """Where the operation that is being recorded comes from; None where nothing says it."""
    global _used
    _used = True
    stack = _walk(sys._getframe(1))
    node: Any = (
        torch._C._current_autograd_node()
    )  # None outside of a backward pass, whatever its stub says
    if stack.user is not None:
        phase = Phase.FORWARD if node is None else Phase.IN_BACKWARD
        return _origin_of(stack.user, _path(stack.modules), phase)
    if node is None:
        return None
    known = _forward.get(node._sequence_nr())
    if known is not None:
        return known[1]._replace(phase=Phase.BACKWARD)
    call = stack.backward_call or _backward_call_elsewhere()
    return None if call is None else _origin_of(call, "", Phase.BACKWARD_CALL)


def note_forward(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Keeps the line of an operation that autograd has just made a node for, under the node's number."""
    if not any(_requires_grad(a) for a in (*args, *kwargs.values())):
        return
    # autograd makes the node directly before it calls the operation, so the newest number is its own. An `autograd.Function` makes its node
    # before its `forward`, which runs without gradients: there the first operation inside names the node.
    makes_node = torch.is_grad_enabled() or (
        torch._C._current_autograd_node() is None and _walk(sys._getframe(1)).applies_function
    )
    if not makes_node:
        return
    # The object and not its number, which Python gives to the next thread when this one has ended.
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
    """Reads the frames from the innermost outwards; what lies beyond a running backward pass is the call of `backward()`."""
    user = call = None
    modules: list[torch.nn.Module] = []
    applies = in_backward = False
    outermost: FrameType = innermost
    frame: FrameType | None = innermost
    while frame is not None:
        if _is(frame, _ENGINE):
            in_backward = True
        elif in_backward:
            if not _is_machinery(frame):
                call = frame
                break
        elif _is(frame, _MODULE_CALL):
            modules.append(frame.f_locals["self"])
        elif _is(frame, _FUNCTION):
            # A user's own `autograd.Function` shows a frame of the user's before this one, in its backward as well.
            applies = applies or user is None
        elif user is None and not _is_machinery(frame):
            user = frame
        outermost, frame = frame, frame.f_back
    if user is None and not in_backward and not outermost.f_code.co_filename.startswith(_MACHINERY):
        user = outermost  # a program without a file: `python -c`, an interactive session
    return _Stack(user, call, tuple(reversed(modules)), applies)


def _backward_call_elsewhere() -> FrameType | None:
    """The frame that called `backward()`, in the thread that waits for autograd's; None where several threads do."""
    found = []
    for frame in sys._current_frames().values():
        stack = _walk(frame)
        if stack.backward_call is not None:
            found.append(stack.backward_call)
    return found[0] if len(found) == 1 else None


def _origin_of(frame: FrameType, module: str, phase: Phase) -> Origin:
    return Origin(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, module, phase)


def _path(modules: Iterable[torch.nn.Module]) -> str:
    """`GPT.h.0.attn` for the modules that call each other, the outermost first; what is no part of its caller begins anew."""
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
    # Most calls are those of children; one of a ModuleList's parts skips a level, as the list itself is not called.
    parts = chain(caller.named_children(), caller.named_modules())
    return next((name for name, part in parts if part is module), None)
