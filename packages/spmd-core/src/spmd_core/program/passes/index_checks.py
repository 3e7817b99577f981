"""Inserts checks of the indices at which operations read and write (`config.check_indices`)."""

import functools
from dataclasses import replace
from typing import Any

import jax
import torch

from spmd_core.graph.values import Spec
from spmd_core.ops.registry import Context
from spmd_core.program.index_flag import Flag
from spmd_core.program.index_layouts import IndexLayouts
from spmd_core.program.index_ranges import needed
from spmd_core.program.ir import Graph, InsertedEntry, Op, Rewriter
from spmd_core.program.target import Replicated, Target


def index_checks(graph: Graph, target: Target) -> Graph:
    """The graph with a check before each operation whose indices may be out of range."""
    checks = needed(graph) if graph.recorded.checks_indices else []
    if not checks:
        return graph
    layouts = IndexLayouts(target)
    is_split = target.replicated_part is Replicated.NOTHING and len(target.device_ids) > 1
    splits = [layouts.split(value) if is_split else () for _, _, value in checks]
    flag = Flag([check for check, _, _ in checks], splits, target.jax_mesh)
    rewriter = Rewriter(graph)
    numbers: dict[Op, list[int]] = {}
    for number, (_, op, _) in enumerate(checks):
        numbers.setdefault(op, []).append(number)
    for op in graph.ops:
        for number in numbers.get(op, ()):
            spec = Spec.contiguous(flag.shape(number), torch.int32)
            kernel = functools.partial(_look, flag, number)
            entry = InsertedEntry("spmd::check_indices", kernel, (spec,))
            check = rewriter.add(
                entry, [rewriter.now(checks[number][2])], op.source, manuals=(None,)
            )
            rewriter.checked += check.results
        rewriter.keep(op)
    return replace(rewriter.graph(), flag=flag)


def _look(
    flag: Flag, number: int, context: Context, inputs: list[jax.Array], scalars: Any
) -> list[jax.Array]:
    return [flag.look(number, inputs[0])]
