"""Has softmaxes and losses over transposed logits compute in the order of memory, on CPUs.

`F.cross_entropy(logits.transpose(1, 2), labels)` is how torch takes the logits (batch, tokens,
vocabulary) of a language model. XLA's CPU backend lays out each value by its shape, so it would
transpose the logits, compute over a dim that is not the last one, and transpose their gradient
back. With this hint kernels transpose what they read and what they return, and XLA's simplifier
removes both with those of the program. On other platforms XLA chooses layouts after it has seen all
readers.
"""

import jax
import jax.numpy as jnp

from spmd_core.graph.values import Spec
from spmd_core.ops.kernels.traits import Elements
from spmd_core.ops.registry import ClassOrder
from spmd_core.program.ir import Graph, InsertedEntry, Ref, Rewriter, inserted
from spmd_core.program.target import Target

_DIM = 1  # of the classes, in torch's losses


def class_orders(graph: Graph, target: Target) -> Graph:
    """The graph with hints on these operations, and with the views between them in this order."""
    if target.platform != "cpu" or all(op.entry.traits.classes is None for op in graph.ops):
        return graph
    transposed: set[Ref] = set()  # values whose dim of classes lies last in memory
    rewriter = Rewriter(graph)
    for op in graph.ops:
        traits, spec = op.entry.traits, op.entry.spec
        source = op.source_of_elements(Elements.PERMUTED)
        view = op.source_of_elements(Elements.RESHAPED)
        hint = None
        if traits.classes is not None:
            classes = op.operands[traits.classes]
            if classes in transposed and (op.entry.arguments or {}).get("dim", _DIM) == _DIM:
                hint = ClassOrder(_DIM)
                transposed.update(x for x in op.results if x.spec.shape == classes.spec.shape)
        elif source in transposed and traits.elements is Elements.SAME:
            transposed.add(Ref(op))
        elif view in transposed and _is_view(spec, view.spec):
            transposed.add(Ref(op))
            made = rewriter.add(_view(op.entry.name, spec), [rewriter.now(view)], op.source)
            rewriter.replace(Ref(op), Ref(made))
            continue
        elif source is not None and _is_transposed(spec, source.spec):
            transposed.add(Ref(op))
        rewriter.keep(op, hint=hint)
    return rewriter.graph() if transposed else graph


def _is_transposed(spec: Spec, source: Spec) -> bool:
    """Whether the last dim of a packed source becomes the dim of classes, and others keep order."""
    num_dims = len(spec.shape)
    if num_dims < 3 or num_dims != len(source.shape) or source is not source.logical:
        return False
    others = (*spec.strides[:_DIM], *spec.strides[_DIM + 1 :])
    return spec.strides[_DIM] == source.strides[-1] and others == source.strides[:-1]


def _is_view(spec: Spec, source: Spec) -> bool:
    """Whether a view in row-major order differs by dims of one element behind the classes."""
    shapes = (spec.shape, source.shape)
    before, after = (
        {shape[: _DIM + 1] for shape in shapes},
        [shape[_DIM + 1 :] for shape in shapes],
    )
    is_same = len({tuple(n for n in rest if n > 1) for rest in after}) == 1
    return is_same and len(before) == 1 and spec.dtype == source.dtype


def _view(name: str, spec: Spec) -> InsertedEntry:
    shape = (*spec.shape[:_DIM], *spec.shape[_DIM + 1 :], spec.shape[_DIM])

    def viewed(inputs: list[jax.Array]) -> jax.Array:
        return jnp.moveaxis(jnp.moveaxis(inputs[0], _DIM, -1).reshape(shape), -1, _DIM)

    return inserted(name, viewed, spec.logical)
