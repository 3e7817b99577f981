"""Inserts checks of the indices at which operations read and write (`config.check_indices`)."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import torch

from spmd_core.graph.values import Spec
from spmd_core.ops.registry import Context
from spmd_core.program.index_flag import Check, Flag
from spmd_core.program.index_layouts import IndexLayouts
from spmd_core.program.index_ranges import needed
from spmd_core.program.ir import Graph, InsertedEntry, Op, Ref, Rewriter
from spmd_core.program.repeated_entries import RepeatedEntry
from spmd_core.program.target import Replicated, Target


def index_checks(graph: Graph, target: Target) -> Graph:
    """The graph with a check of all indices that may be out of range, also in bodies."""
    checks = [*_needed(graph)] if graph.recorded.checks_indices else []
    if not checks:
        return graph
    layouts = IndexLayouts(target)
    is_split = target.replicated_part is Replicated.NOTHING and len(target.device_ids) > 1
    splits = [layouts.split(value) if is_split else () for _, _, value in checks]
    flag = Flag([check for check, _, _ in checks], splits, target.jax_mesh)
    numbers: dict[Op, list[int]] = {}
    for number, (_, op, _) in enumerate(checks):
        numbers.setdefault(op, []).append(number)
    indices = [value for _, _, value in checks]
    return replace(_checked(graph, flag, numbers, indices), flag=flag)


def _needed(
    graph: Graph, positions: Sequence[int] | None = None, around: int | None = None
) -> Iterator[tuple[Check, Op, Ref]]:
    """As `needed`, with those of bodies, whose checks are about the operation that runs them.

    A loop that a pass has made of recorded operations has checks that are about these.

    Args:
        graph: of the program, or of a body.
        positions: of a body that stands for recorded operations, their positions.
        around: the position of the recorded operation that runs the body; None for others.
    """

    def position(op: Op) -> int:
        own = op.source.position
        return own if positions is None else positions[own]

    for check, op, value in needed(graph):
        found = (position(op), "") if around is None else (around, op.entry.name)
        yield Check(found[0], check.accepted, found[1]), op, value
    for op in graph.ops:
        for body in op.bodies:
            if around is None and isinstance(op.entry, RepeatedEntry):
                yield from _needed(body, op.entry.positions)
            else:
                yield from _needed(body, None, position(op) if around is None else around)


def _checked(graph: Graph, flag: Flag, numbers: dict[Op, list[int]], indices: list[Ref]) -> Graph:
    """The graph with these checks.

    Args:
        graph: of the program, or of a body.
        flag: the program's.
        numbers: of the checks before each operation.
        indices: what each check looks at.
    """
    rewriter = Rewriter(graph)
    for op in graph.ops:
        for number in numbers.get(op, ()):
            spec = Spec.contiguous(flag.shape(number), torch.int32)
            kernel = functools.partial(_look, flag, number)
            entry = InsertedEntry("spmd::check_indices", kernel, (spec,))
            check = rewriter.add(entry, [rewriter.now(indices[number])], op.source, manuals=(None,))
            rewriter.checked += check.results
        bodies = tuple(_checked(body, flag, numbers, indices) for body in op.bodies)
        rewriter.keep(op, bodies=bodies or None)
    return rewriter.graph()


def _look(
    flag: Flag, number: int, context: Context, inputs: list[jax.Array], scalars: Any
) -> list[jax.Array]:
    return [flag.look(number, inputs[0])]
