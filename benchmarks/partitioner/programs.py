"""Small programs around one operation, under random layouts; the values are eager torch's or not.

A program calls one entry of torch's operator database on one of its samples. It is drawn from a
number, so that a failure can be run again. What is drawn:

- the mesh: of one, two or three axes, over all devices, some of them, or in another order;
- for each tensor, how each of its dims is split: by one axis, by two, or not at all;
- where each tensor comes from: the host, or an operation of the same program, such as a slice;
- what reads the result, and how the result is marked;
- whether the gradient is computed too, or the operation is done in place.

Many cases are recorded before one flush, so that XLA compiles them as one program.
"""

import copy
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

import spmd_core as spmd
from benchmarks.opinfo.compare import as_good_as_eager, close, down
from benchmarks.opinfo.samples import Sample, applies, excluded, samples

# Device ids, shape and names. Samples of the database have dims of 2, 3, 5 and 10 elements for the
# most part, so each size divides on some of these meshes and does not on others.
MESHES: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]], ...] = (
    (tuple(range(8)), (8,), ("x",)),
    (tuple(range(8)), (4, 2), ("x", "y")),
    ((3, 1, 0, 2, 7, 5, 6, 4), (2, 4), ("x", "y")),
    (tuple(range(5)), (5,), ("x",)),
    ((0, 1), (2,), ("x",)),
    (tuple(range(8)), (2, 2, 2), ("x", "y", "z")),
    ((0, 2, 4, 6), (2, 2), ("x", "y")),
    ((5, 1, 3), (3,), ("x",)),
)
SOURCES = ("host", "computed", "slice", "transposed copy", "written through a view", "cat", "roll")
READERS = ("nothing", "product", "row", "sum", "flipped")
VARIANTS = ("forward", "gradient", "in place")
LARGEST = 4096  # elements of a sample's tensors: larger ones only take longer

# Factors of a matrix are unique up to signs: only the samples' own functions may read them.
NOT_UNIQUE = frozenset(
    {"svd", "svd_lowrank", "pca_lowrank", "linalg_svd", "linalg_eig", "linalg_eigh"}
)
# Eager torch resizes the tensor that it is to write; refused here.
NOT_IN_PLACE = frozenset({"addbmm"})

Spec = tuple[Any, ...]


@dataclass(frozen=True)
class ProgramLayout:
    """How one program is laid out.

    Attributes:
        variant: one of `VARIANTS`.
        sample: the number of the entry's sample.
        specs: the partition spec of each tensor of the sample, or None for no mark.
        sources: where each tensor comes from, one of `SOURCES`.
        reader: what reads the result, one of `READERS`.
        out: the axes that mark the result's dims, as far as it has dims, or None.
    """

    variant: str
    sample: int
    specs: tuple[Spec | None, ...]
    sources: tuple[str, ...]
    reader: str = "nothing"
    out: Spec | None = None

    def __str__(self) -> str:
        tensors = [
            f"{'unmarked' if spec is None else spec} {source}"
            for spec, source in zip(self.specs, self.sources)
        ]
        return (
            f"sample {self.sample}, {self.variant}: {'; '.join(tensors)}; "
            f"result {self.out or 'unmarked'}, read by {self.reader}"
        )

    def simpler(self) -> Iterator["ProgramLayout"]:
        """The same with one thing less."""
        if self.reader != "nothing":
            yield replace(self, reader="nothing")
        if self.out is not None:
            yield replace(self, out=None)
        if self.variant != "forward":
            yield replace(self, variant="forward")
        for i, (spec, source) in enumerate(zip(self.specs, self.sources)):
            if source != "host":
                yield replace(self, sources=_with(self.sources, i, "host"))
            if spec is not None:
                yield replace(self, specs=_with(self.specs, i, None))
                for dim, axes in enumerate(spec):
                    if axes is not None and sum(a is not None for a in spec) > 1:
                        yield replace(self, specs=_with(self.specs, i, _with(spec, dim, None)))
                    if isinstance(axes, tuple):
                        for axis in axes:
                            less = _with(spec, dim, axis)
                            yield replace(self, specs=_with(self.specs, i, less))


def _with(items: tuple[Any, ...], position: int, item: Any) -> tuple[Any, ...]:
    return (*items[:position], item, *items[position + 1 :])


class Entry:
    """An entry of the database with its samples, and what eager torch makes of them."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name: str = op.formatted_name
        dtype = next(
            (d for d in (torch.float32, torch.int64, torch.bool) if applies(op, "forward", d)),
            torch.complex64,
        )
        self.has_gradient = applies(op, "gradient", dtype)
        self._in_place = applies(op, "in_place", dtype) and self.name not in NOT_IN_PLACE
        self.samples: list[Sample] = []
        if excluded(self.name, dtype) is None and dtype in op.supported_dtypes("cpu"):
            self.samples = [
                s
                for s in samples(op, dtype, requires_grad=self.has_gradient, limit=24)
                if s.tensors()
                and any(t.dim() for t in s.tensors())
                and all(t.numel() <= LARGEST for t in s.tensors())
            ]

    def draw(self, mesh: int, seed: int) -> ProgramLayout:
        """The layout with this number."""
        rng = random.Random(f"{self.name} {mesh} {seed}")
        number = rng.randrange(len(self.samples))
        tensors = self.samples[number].tensors()
        names = MESHES[mesh][2]
        variants = ["forward"]
        variants += ["gradient"] * self.has_gradient + ["in place"] * self._in_place
        specs = [
            _draw_spec(rng, t.dim(), names) if rng.random() < 0.7 or len(tensors) == 1 else None
            for t in tensors
        ]
        return ProgramLayout(
            rng.choice(variants),
            number,
            tuple(specs),
            tuple("host" if rng.random() < 0.4 else rng.choice(SOURCES) for _ in tensors),
            "nothing" if self.name in NOT_UNIQUE else rng.choice(READERS),
            _draw_spec(rng, 3, names) if rng.random() < 0.3 else None,
        )

    def run(self, layout: ProgramLayout, mesh: spmd.Mesh | None) -> list[Any]:
        """The program's results, recorded on the device; on the CPU without a mesh.

        Raises whatever the program raises, and Skip where it makes no sense.
        """
        sample = self.samples[layout.sample]
        torch.manual_seed(0)
        tensors = iter(zip(layout.specs, layout.sources))
        leaves: list[torch.Tensor] = []

        def place(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                spec, source = next(tensors)
                return _placed(x, spec, source, mesh, leaves)
            is_cpu = isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu")
            return "xla" if mesh is not None and is_cpu else x

        input_ = pytree.tree_map(place, sample.input)
        args, kwargs = (sample.args, dict(sample.kwargs))
        if sample.moves_args:
            args, kwargs = pytree.tree_map(place, (sample.args, sample.kwargs))
        if layout.variant == "in place":
            target = [t.detach() for t in pytree.tree_leaves(input_)]
            first = target[0] if isinstance(input_, torch.Tensor) else target
            with torch.no_grad():
                self.op.inplace_variant(first, *args, **kwargs)
            return _read(target, layout, mesh)
        result = self.op(input_, *args, **kwargs)
        outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if layout.variant == "forward":
            return _read([t.detach() for t in outs], layout, mesh)
        outs = [
            t
            for t in pytree.tree_leaves(sample.process(result))
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        wanted = [t for t in leaves if t.requires_grad]
        if not outs or not wanted:
            raise Skip
        read = _read(outs, layout, mesh)
        return list(
            torch.autograd.grad(read, wanted, [weights(t) for t in read], allow_unused=True)
        )

    def is_as_good(self, layout: ProgramLayout, got: list[Any], expected: list[Any]) -> bool:
        """Whether results that differ from eager torch's are right, too.

        They are where a function of them is the same, as for a matrix's factors, and where their
        error against float64 is at most twice eager torch's.
        """
        process = self.samples[layout.sample].process
        try:
            if close(down(process(got)), down(process(expected)), rtol=2e-4, atol=2e-5) is None:
                return True
        except Exception:  # the function takes the results, not values computed from them
            pass

        def run(sample: Sample) -> Any:
            changed = copy.copy(self)
            changed.samples = [*self.samples]
            changed.samples[layout.sample] = sample
            return changed.run(layout, None)

        return as_good_as_eager(run, self.samples[layout.sample], got, expected)


class Skip(Exception):
    """The program makes no sense."""


def _draw_spec(rng: random.Random, ndim: int, names: tuple[str, ...]) -> Spec:
    """A partition spec that splits at least one dim, if there is one."""
    axes: list[Any] = list(names)
    rng.shuffle(axes)
    spec: list[Any] = [None] * ndim
    dims = list(range(ndim))
    rng.shuffle(dims)
    if len(axes) > 1 and rng.random() < 0.3:
        axes = [tuple(axes[:2]), *axes[2:]]
    for dim, axis in list(zip(dims, axes))[: rng.choice((1, 1, 2, 3))]:
        spec[dim] = axis
    return tuple(spec)


def _mark(t: torch.Tensor, spec: Spec | None, mesh: spmd.Mesh | None) -> torch.Tensor:
    if mesh is not None and spec is not None and t.dim():
        spmd.mark_sharding(t, mesh, spec[: t.dim()])
    return t


def _placed(
    x: torch.Tensor,
    spec: Spec | None,
    source: str,
    mesh: spmd.Mesh | None,
    leaves: list[torch.Tensor],
) -> torch.Tensor:
    """A copy of a sample's tensor from `source`, marked. What it was made from joins `leaves`."""
    device = "cpu" if mesh is None else "xla"
    value = x.detach().clone()

    def leaf(t: torch.Tensor) -> torch.Tensor:
        t = _mark(t.to(device), spec, mesh)
        if x.requires_grad:
            t.requires_grad_()
            leaves.append(t)
        return t

    if source == "host" or not x.dim():
        return leaf(value)
    if source == "computed":
        return _mark(
            leaf(value).clone().mul_(1) if x.dtype != torch.bool else leaf(value) | False,
            spec,
            mesh,
        )
    if source == "slice":
        return leaf(torch.cat([value, value.roll(1, 0), value]))[: x.shape[0]].clone()
    if source == "transposed copy":
        return leaf(value.movedim(0, -1)).movedim(-1, 0).contiguous()
    if source == "written through a view":
        y = leaf(value).clone()
        _mark(y, spec, mesh)
        flat = y.view(-1)
        with torch.no_grad():
            _ = flat.logical_not_() if x.dtype == torch.bool else flat.neg_()
            _ = y.logical_not_() if x.dtype == torch.bool else y.neg_()
        return y
    if source == "cat":
        cut = x.shape[0] // 2
        return torch.cat([leaf(value[:cut].clone()), leaf(value[cut:].clone())])
    assert source == "roll"
    return leaf(value).roll(1, -1).roll(-1, -1)


def _read(results: list[torch.Tensor], layout: ProgramLayout, mesh: spmd.Mesh | None) -> list[Any]:
    """The results, marked and read as the layout says."""
    read = []
    for t in results:
        if not t.requires_grad or t.grad_fn is not None:
            _mark(t, layout.out, mesh)
        if layout.reader == "nothing" or not t.dim() or not t.numel():
            read.append(t)
        elif layout.reader == "product":
            read.append(t * t if t.dtype != torch.bool else t & t)
        elif layout.reader == "row":
            read.append(t[t.shape[0] - 1])
        elif layout.reader == "sum":
            read.append(t.sum(-1))
        else:
            read.append(t.flip(0))
    return [*read, *(t for t in results if layout.variant == "in place")]


def weights(t: torch.Tensor) -> torch.Tensor:
    """A cotangent that is not constant: a constant one would hide errors that cancel."""
    ramp = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=torch.float64)[: t.numel()]
    return ramp.reshape(t.shape).to(t.dtype).to(t.device)


def start() -> None:
    """Makes this process compile small programs for eight emulated devices, as fast as it can."""
    spmd.config.cache_dir = None
    # LLVM comes after the partitioner; its optimizations would take most of the time.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    )
    spmd.simulate(8)
    spmd.use_spmd()
    torch.set_num_threads(1)
