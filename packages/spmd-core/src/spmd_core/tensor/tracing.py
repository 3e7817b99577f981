"""The refusal of compilers that trace a program with fake tensors, such as `torch.compile`."""

import functools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from spmd_core.errors import UnsupportedOpError


def refusal(shape: Sequence[Any]) -> UnsupportedOpError:
    """The exception for a tensor of the device, of this shape, that is about to be traced.

    It ends at the line that called the compiled function, without the compiler's own frames, which
    `TORCHDYNAMO_VERBOSE=1` shows.
    """
    text = (
        "operations on xla tensors are recorded and compiled by XLA as they run, so torch.compile "
        f"and torch.export have nothing to compile; got a tensor of shape {tuple(shape)}. "
        "Call the function itself. Where you cannot change the call, set TORCHDYNAMO_DISABLE=1 in "
        "the environment or call torch.compiler.set_stance('force_eager'): "
        "the compiled function then is the function itself. "
        "spmd.debugging.stablehlo(result) gives the program's text; "
        "torch.export takes module.cpu()."
    )
    dynamo = sys.modules.get("torch._dynamo.exc")
    return UnsupportedOpError(text) if dynamo is None else _class_for(dynamo)(text)


def shortened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that traces, or makes one that does; refusals leave it without frames of its own.

    Other exceptions stay as they are.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except UnsupportedOpError as error:
            raise error.with_traceback(None) from None
        return shortened(result) if isinstance(result, FunctionType) else result

    return call


@functools.cache
def _class_for(dynamo: ModuleType) -> type[UnsupportedOpError]:
    """The class, for which Dynamo removes its frames before it hands the exception on."""

    class Refusal(UnsupportedOpError, dynamo.ShortenTraceback):  # type: ignore[name-defined]
        def __init__(self, text: str) -> None:
            UnsupportedOpError.__init__(self, text)
            self._text, self.first_useful_frame = text, None

        def remove_dynamo_frames(self) -> "Refusal":
            return self if dynamo.config.verbose else self.with_traceback(None)

        def __str__(self) -> str:  # without what Dynamo adds to the arguments
            return self._text

    Refusal.__name__ = Refusal.__qualname__ = UnsupportedOpError.__name__
    Refusal.__module__ = UnsupportedOpError.__module__
    return Refusal
