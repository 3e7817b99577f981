"""Runs drawn programs, compares their values with eager torch's, and reduces those that fail."""

import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import spmd_core as spmd
from benchmarks.opinfo.compare import close, down, skeleton
from benchmarks.partitioner.programs import MESHES


@dataclass
class Failure:
    """A program whose values are wrong, or that raised.

    Attributes:
        entry: the operation's name in the database, "chain", or "table_step".
        mesh: the number of the mesh in `MESHES`.
        seed: the number from which the program was drawn.
        kind: "wrong" or "error".
        layout: of the smallest program found that fails alike, as text.
        detail: how the values differ, or the error's first line.
    """

    entry: str
    mesh: int
    seed: int
    kind: str
    layout: str
    detail: str


@dataclass
class Answer:
    """The result of a task: how many programs ran, and which failed."""

    num_programs: int = 0
    failures: list[Failure] = field(default_factory=list)


def mesh_of(number: int) -> spmd.Mesh:
    """One of `MESHES`."""
    ids, shape, names = MESHES[number]
    return spmd.Mesh(ids, shape, names)


class Source(Protocol):
    """What draws programs, and runs them; see `Entry`. A layout has `simpler`, and a text."""

    @property
    def name(self) -> str: ...

    def draw(self, mesh: int, seed: int) -> Any: ...

    def run(self, layout: Any, mesh: spmd.Mesh | None) -> list[Any]: ...

    def is_as_good(self, layout: Any, got: list[Any], expected: list[Any]) -> bool: ...


@dataclass
class _Program:
    seed: int
    layout: Any
    expected: list[Any]
    got: list[Any] | None = None
    error: str = ""


def examine(source: Source, mesh_number: int, seeds: list[int]) -> Answer:
    """Runs the programs with these numbers as one, compares each, and reduces those that fail."""
    answer = Answer()
    mesh = mesh_of(mesh_number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = []
        for seed in seeds:
            layout = source.draw(mesh_number, seed)
            expected = _expected(source, layout)
            if expected is not None:
                programs.append(_Program(seed, layout, expected))
        answer.num_programs = len(programs)
        _run_together(source, programs, mesh)
        for program in programs:
            kind, detail = _verdict(source, program)
            if kind:
                layout, detail = _reduced(source, program.layout, mesh, kind, detail)
                answer.failures.append(
                    Failure(source.name, mesh_number, program.seed, kind, str(layout), detail)
                )
    return answer


def _expected(source: Source, layout: Any) -> list[Any] | None:
    """Eager torch's results; None where it refuses the program, or draws random numbers."""
    try:
        first = down(source.run(layout, None))
        if "rand" in source.name or "drop" in source.name or source.name in RANDOM:
            return None
        return first
    except Exception:  # no reference
        return None


RANDOM = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "normal_in_place",
    "normal_number_mean",
    "uniform",
    "nn_functional_rrelu",
    "nn_functional_fractional_max_pool2d",
    "nn_functional_fractional_max_pool3d",
    "nn_functional_multi_head_attention_forward",
    "nn_functional_scaled_dot_product_attention",
    "svd_lowrank",
    "pca_lowrank",
}


def _run_together(source: Source, programs: list[_Program], mesh: spmd.Mesh) -> None:
    """Fills in the results: of one program for all; if that fails, of one for each case."""
    recorded = []
    for program in programs:
        try:
            program.got = source.run(program.layout, mesh)
            recorded.append(program)
        except Exception as error:
            program.error = _first_line(error)
    try:
        before = num_replicated()
        spmd.sync()
        for program in recorded:
            program.got = down(program.got)
        if num_replicated() > before and len(recorded) > 1:
            raise RuntimeError("none of them was partitioned, because one could not be")
    except Exception:
        for program in recorded:
            program.got = None
        for program in recorded:
            _run_alone(source, program, mesh)


def num_replicated() -> float:
    """How many programs were compiled replicated, because XLA refused them otherwise."""
    return spmd.metrics.counter("programs_with_whole_everything")


def _run_alone(source: Source, program: _Program, mesh: spmd.Mesh) -> None:
    try:
        got = source.run(program.layout, mesh)
        spmd.sync()
        program.got = down(got)
    except Exception as error:
        program.error = _first_line(error)


def _verdict(source: Source, program: _Program) -> tuple[str, str]:
    """The kind of failure and how; an empty kind for the right values."""
    if program.got is None:
        return "error", program.error
    got, expected = program.got, program.expected
    difference = skeleton(got, expected)
    if difference is None:
        # Rounding depends on the largest terms of a sum; a misplaced element differs by far more.
        largest = max(1.0, *(_largest(t) for t in expected)) if expected else 1.0
        difference = (
            close(got, expected, rtol=2e-4, atol=2e-5 * largest)
            if _floats(expected)
            else close(got, expected)
        )
    if difference is None:
        return "", ""
    if source.is_as_good(program.layout, got, expected):
        return "", ""
    return "wrong", difference[:240]


def _floats(results: list[Any]) -> bool:
    return all(
        not isinstance(t, torch.Tensor) or t.is_floating_point() or t.is_complex() for t in results
    )


def _largest(t: Any) -> float:
    if not isinstance(t, torch.Tensor) or not t.numel() or not _floats([t]):
        return 0.0
    sizes = t.abs().to(torch.float64)
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _reduced(
    source: Source, layout: Any, mesh: spmd.Mesh, kind: str, detail: str
) -> tuple[Any, str]:
    """The smallest layout found that fails in the same way."""
    for _ in range(40):
        for simpler in layout.simpler():
            expected = _expected(source, simpler)
            if expected is None:
                continue
            program = _Program(0, simpler, expected)
            _run_alone(source, program, mesh)
            found, what = _verdict(source, program)
            if found == kind:
                layout, detail = simpler, what
                break
        else:
            break
    return layout, detail


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
