"""The backend "openxla" of `torch.compile`: a graph that Dynamo traced is recorded when it runs.

Its operations go through autograd and the router like those of the function that was traced. So
values, marks, writes, random numbers and gradients are those of the function itself, and its
programs are the same: a compiled function finds those that the function left in the compile cache.
What `torch.compile` saves is the Python code between the operations.
"""

import ast
import functools
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spmd_core import source_lines
from spmd_core.torch_backend.after_import import after_import

# An entry of a stack trace, as Python writes it.
_ENTRY = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def openxla(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The compiled form of a graph: a function that records the graph's operations.

    Args:
        graph_module: the graph, of torch's functions as the program calls them.
        example_inputs: fake tensors of the sizes and dtypes of the graph's inputs; not used.
    """
    text = graph_module.code  # which makes a lazy module compile its function
    compiled: Any = graph_module.forward
    code = compiled.__func__.__code__
    source_lines.note_generated(code, _places(graph_module.graph, text, code.co_firstlineno))
    function: Callable[..., Any] = compiled
    return _without_overrides(function) if _has_overrides(graph_module.graph) else function


def _has_overrides(graph: torch.fx.Graph) -> bool:
    """Whether an input has a class of the user's, whose `__torch_function__` Dynamo traced."""
    classes = (node.type for node in graph.nodes if node.op == "placeholder")
    return any(hasattr(cls, "_user_class") for cls in classes)


def _without_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call


def _places(graph: torch.fx.Graph, text: str, first_line: int) -> dict[int, source_lines.Place]:
    """The user's place of each line of a graph's code, which assigns each node to its name.

    Args:
        graph: the graph.
        text: its code, a function.
        first_line: the line of the function's head, as the compiled code counts.
    """
    (function,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef))
    offset = first_line - function.lineno
    nodes = {node.name: node for node in graph.nodes}
    places: dict[int, source_lines.Place] = {}
    for line in function.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            node = nodes.get(line.targets[0].id)
            found = _ENTRY.findall((node is not None and node.stack_trace) or "")
            if found:
                file, number, name = found[-1]
                # A line ends with statements that free what it was the last to read.
                places.setdefault(line.lineno + offset, source_lines.Place(file, int(number), name))
    return places


def _is_for_device(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph has tensors of the device among its inputs and intermediate results."""
    values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return any(
        isinstance(t, torch.Tensor) and t.device.type == "xla" for t in pytree.tree_leaves(values)
    )


def _innermost(compiler: Any) -> Any:
    """The backend inside of what Dynamo wraps around it."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler


def _is_inductor(compiler: Any) -> bool:
    name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
    return name == "inductor"


def _replace_inductor(module: ModuleType) -> None:
    """Sends graphs of the device to `openxla` where torch's default, "inductor", would get them.

    Inductor generates code for CPUs and GPUs, and has no entry for a device that generates none.
    """
    theirs = module.OutputGraph.call_user_compiler

    @functools.wraps(theirs)
    def call(self: Any, graph_module: Any, *args: Any, **kwargs: Any) -> Any:
        given = _innermost(self.compiler_fn)
        if not _is_inductor(given) or not _is_for_device(graph_module):
            return theirs(self, graph_module, *args, **kwargs)
        if options := getattr(given, "config", None):
            warnings.warn(
                "mode= and options= of torch.compile configure inductor, which compiles nothing "
                f"for device 'xla', so they have no effect there; got {options}. "
                "Leave them out, or set spmd.config.compiler_options for XLA's.",
                stacklevel=2,
            )
        before, self.compiler_fn = self.compiler_fn, openxla
        try:
            return theirs(self, graph_module, *args, **kwargs)
        finally:
            self.compiler_fn = before

    module.OutputGraph.call_user_compiler = call


def _register(module: Any) -> None:
    """Puts `openxla` in the place of torch's own, which needs PyTorch/XLA."""
    registry = sys.modules["torch._dynamo.backends.registry"]
    registry._COMPILER_FNS[openxla.__name__] = openxla
    openxla._tags = ()  # type: ignore[attr-defined]
    module.openxla = openxla


def install() -> None:
    """Registers the backend once Dynamo is imported."""
    after_import("torch._dynamo.output_graph", _replace_inductor)
    after_import("torch._dynamo.backends.torchxla", _register)
