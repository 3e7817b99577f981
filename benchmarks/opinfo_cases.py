"""Does one entry of torch's operator database give here what eager torch gives on the CPU? Its samples, its variants, and a verdict.

torch describes its operators in `torch.testing._internal.common_methods_invocations.op_db`: a callable, samples for each dtype, what it supports.
An entry is examined in up to six variants:

- `forward`: the call;
- `gradient`: reverse mode through it;
- `in_place`: the method with an underscore;
- `out`: the `out=` form, also into an empty tensor;
- `view_write`: a write through a result that is a view of the input, and the in-place form on an input that is a view: the whole base is compared;
- `errors`: the entry's error inputs must raise the type and the message that torch's tests ask for.

Shape and dtype must be equal; values must lie within the tolerances of `torch.testing.assert_close` for the dtype. Where they do not:

- a result that is not unique (factors of a matrix) is compared after the entry's own `output_process_fn_grad`;
- an operator that draws random numbers, which shows in two eager runs with different seeds, is compared in shape and dtype;
- an ill-conditioned result is compared with eager torch in float64: it passes when its error is within tolerance, or at most twice eager torch's own;
- what is left passes as *loose* within a relative 1e-3, as in torch's own test of accelerators against the CPU, and is listed with its size.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import spmd_core as spmd
from spmd_core import dispatch, recording
from spmd_core.graph import Entry

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
VARIANTS = ("forward", "gradient", "in_place", "out", "view_write", "errors")
LOOSE = 1e-3  # TestCommon.test_compare_cpu in torch's test suite

# Why an entry cannot be compared, by its full name or by its prefix up to the star.
EXCLUDED = {
    "sparse*": "sparse layout",
    "to_sparse": "sparse layout",
    "jiterator*": "compiles CUDA source",
    "torch_ops_aten__flash_attention_forward": "a CUDA kernel's own entry",
    "torch_ops_aten__efficient_attention_forward": "a CUDA kernel's own entry",
    "empty*": "returns uninitialised memory",
    "new_empty*": "returns uninitialised memory",
    "chalf": "complex32, which XLA does not have",
}


_CPU_INDICES = "torch asks for section indices on the CPU, on every device"
_OVERLAP = "elements share memory, so that eager torch's result depends on the order of its writes: refused here"
_GROWS = "eager torch's kernel resizes the tensor that it is to write, unlike its own broadcasting rule: refused here"
# What does not pass and why, by entry and variant: the status and the cause.
KNOWN: dict[tuple[str, str], tuple[str, str]] = {
    ("tensor_split", "forward"): ("error", _CPU_INDICES),
    ("tensor_split", "gradient"): ("error", _CPU_INDICES),
    ("as_strided", "view_write"): ("error", _OVERLAP),
    ("unfold", "view_write"): ("error", _OVERLAP),
    ("addbmm", "in_place"): ("error", _GROWS),
    ("addbmm", "view_write"): ("error", _GROWS),
}


class Status(StrEnum):
    """How an entry's variant did, from best to worst."""

    PASSED = "passed"
    EXCLUDED = "excluded"
    HOST = "host fallback"
    ERROR = "error"
    WRONG = "wrong"


_RANK = list(Status)


@dataclass
class Verdict:
    """What was found of one entry, variant and dtype: the worst of its samples."""

    entry: str
    variant: str
    dtype: str
    num_devices: int
    status: Status
    num_samples: int = 0
    detail: str = ""
    loose: float = 0.0  # the largest deviation beyond the same-device tolerance that was let pass
    random: bool = False
    lowered: list[str] = field(default_factory=list)  # the overloads whose lowerings took part

    def worsen(self, status: Status, detail: str) -> None:
        """Takes over the status if it is worse than what is known."""
        if _RANK.index(status) > _RANK.index(self.status):
            self.status, self.detail = status, detail


@dataclass(frozen=True)
class Sample:
    """One call of an entry: tensors on the CPU."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves((self.input, self.args, self.kwargs)) if isinstance(t, torch.Tensor)]


def entries() -> list[Any]:
    """torch's operator database."""
    return list(op_db)


def excluded(name: str) -> str | None:
    """Why an entry is left out, or None."""
    for pattern, reason in EXCLUDED.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return reason
    return None


def known(name: str, variant: str) -> str | None:
    """The status of a known failure, or None for what passes."""
    found = KNOWN.get((name, variant))
    return None if found is None else found[0]


def applies(op: Any, variant: str, dtype: torch.dtype) -> bool:
    """Whether torch says that the entry has this variant for this dtype on the CPU."""
    if variant == "errors":
        return op.error_inputs_func is not None and dtype is torch.float32
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if variant == "gradient":
        return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    if variant == "in_place":
        return op.inplace_variant is not None
    return variant != "out" or bool(op.supports_out)


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly spread over all of them; all of them for a limit of 0."""
    if limit <= 0 or len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(limit - 1, 1))] for i in range(limit)]


def _plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized and not t.is_nested and t.device.type == "cpu"


def _undefined(name: str, s: Sample) -> bool:
    """Whether eager torch's result means nothing, so that there is nothing to compare with."""
    if name == "nonzero_static":
        return s.input.numel() == 0  # the memory is not filled
    draws = s.kwargs.get("_random_samples")
    return draws is not None and bool(((draws < 0) | (draws >= 1)).any())  # windows outside of the input


def samples(op: Any, dtype: torch.dtype, *, requires_grad: bool, limit: int) -> list[Sample]:
    """The entry's own samples for a dtype, the same ones at every call."""
    torch.manual_seed(0)
    found = [Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad) for s in op.sample_inputs("cpu", dtype, requires_grad)]
    return _spread([s for s in found if all(_plain(t) for t in s.tensors()) and not _undefined(op.formatted_name, s)], limit)


def _is_cpu(x: Any) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu")


def moved(sample: Sample, device: str, *, dtype: torch.dtype | None = None, mesh: spmd.Mesh | None = None) -> Sample:
    """A copy of a sample on a device; floats in `dtype` where one is given; with a mesh, its first tensor is split along its longest dim."""
    marked = False

    def move(x: Any) -> Any:
        nonlocal marked
        if isinstance(x, torch.Tensor):
            y = x.detach().clone()
            if dtype is not None:
                y = y.to(dtype.to_complex() if y.is_complex() else dtype) if y.is_complex() or y.is_floating_point() else y
            y = y.to(device)
            if mesh is not None and not marked and y.dim():
                longest = max(range(y.dim()), key=lambda d: y.shape[d])
                spmd.mark_sharding(y, mesh, tuple(0 if d == longest else None for d in range(y.dim())))
                marked = True
            return y.requires_grad_(x.requires_grad)
        if device != "cpu" and _is_cpu(x):
            return device
        return x

    input_, args, kwargs = pytree.tree_map(move, (sample.input, sample.args, sample.kwargs))
    if dtype is not None and isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
        kwargs["dtype"] = dtype
    return Sample(input_, args, kwargs, sample.process)


# What each variant computes, on any device.


def _forward(op: Any, s: Sample) -> Any:
    return op(s.input, *s.args, **s.kwargs)


def _weights(t: torch.Tensor) -> torch.Tensor:
    """A cotangent without symmetry: a constant one hides errors that cancel."""
    ramp = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=torch.float64)[: t.numel()].reshape(t.shape)
    return ramp.to(t.dtype).to(t.device)


def _gradient(op: Any, s: Sample) -> Any:
    result = s.process(op(s.input, *s.args, **s.kwargs))
    outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in s.tensors() if t.requires_grad]
    if not outs or not wanted:
        return []
    return list(torch.autograd.grad(outs, wanted, [_weights(t) for t in outs], allow_unused=True))


def _in_place(op: Any, s: Sample) -> Any:
    target = s.input.detach().clone() if isinstance(s.input, torch.Tensor) else [t.detach().clone() for t in s.input]
    op.inplace_variant(target, *s.args, **s.kwargs)
    return target


def _out(op: Any, s: Sample) -> Any:
    with torch.no_grad():
        shapes = op(s.input, *s.args, **s.kwargs)
        same = pytree.tree_map(lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, shapes)
        empty = pytree.tree_map(lambda t: torch.empty(0, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) else t, shapes)
        returned = [op(s.input, *s.args, **s.kwargs, out=out) for out in (same, empty)]
    return [same, empty, *returned]


def _aliases(op: Any, s: Sample) -> bool:
    """Whether the entry's result is a view of its input."""
    with torch.no_grad():
        result = op(s.input, *s.args, **s.kwargs)
    return isinstance(result, torch.Tensor) and isinstance(s.input, torch.Tensor) and result.numel() > 0 and _same_memory(result, s.input)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _write_through(op: Any, s: Sample) -> Any:
    with torch.no_grad():
        x = s.input.detach()
        y = op(x, *s.args, **s.kwargs)
        if y.dtype is torch.bool:
            y.logical_not_()
        else:
            y.add_(1)
    return [x, y]


def _write_into_view(op: Any, s: Sample) -> Any:
    with torch.no_grad():
        base = torch.stack([s.input.detach(), s.input.detach()], -1)
        op.inplace_variant(base.select(-1, 1), *s.args, **s.kwargs)
    return base


_RUN: dict[str, Callable[[Any, Sample], Any]] = {"forward": _forward, "gradient": _gradient, "in_place": _in_place, "out": _out}


# Comparing.


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def _down(tree: Any) -> list[Any]:
    return [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in _leaves(tree)]


def _skeleton(got: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """How shapes, dtypes or kinds differ, or None."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for mine, right in zip(got, expected):
        if isinstance(right, torch.Tensor) != isinstance(mine, torch.Tensor):
            return f"{type(mine).__name__} instead of {type(right).__name__}"
        if isinstance(right, torch.Tensor) and (mine.shape != right.shape or mine.dtype != right.dtype):
            return f"{mine.dtype}{list(mine.shape)} instead of {right.dtype}{list(right.shape)}"
    return None


def _close(got: Sequence[Any], expected: Sequence[Any], **tolerance: Any) -> str | None:
    """How values differ, or None."""
    for mine, right in zip(got, expected):
        try:
            if isinstance(right, torch.Tensor):
                torch.testing.assert_close(mine.resolve_conj().resolve_neg(), right.resolve_conj().resolve_neg(), equal_nan=True, **tolerance)
            elif isinstance(right, (bool, int, float, complex)):
                torch.testing.assert_close(mine, right, equal_nan=True, **tolerance)
            elif mine != right and not isinstance(right, torch.device):
                return f"{mine!r} instead of {right!r}"
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join(lines[:4])
    return None


def _deviation(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference, absolute for numbers below 1 and relative above."""
    worst = 0.0
    for mine, right in zip(got, expected):
        if isinstance(right, torch.Tensor) and right.numel() and (right.is_floating_point() or right.is_complex()):
            wide = torch.complex128 if right.is_complex() else torch.float64
            a, b = mine.to(wide), right.to(wide)
            error = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(0.0, math.inf)
            error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, error)
            worst = max(worst, error.max().item())
    return worst


def _as_good_as_eager(run: Callable[[Sample], Any], sample: Sample, got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether each result is about as near to eager torch's in float64 as eager torch's own in this dtype is."""
    try:
        truth = _down(run(moved(sample, "cpu", dtype=torch.float64)))
    except Exception:  # no float64 form: then nothing is known, and the caller reports the difference
        return False
    if len(truth) != len(got) or any(isinstance(t, torch.Tensor) and t.shape != e.shape for t, e in zip(truth, expected)):
        return False
    for mine, right, true in zip(got, expected, truth):
        if not isinstance(right, torch.Tensor) or not (right.is_floating_point() or right.is_complex()):
            if _close([mine], [right]) is not None and (not isinstance(true, torch.Tensor) or not torch.equal(mine, true.to(mine.dtype))):
                return False
            continue
        rounded = true.to(right.dtype)
        if _close([mine], [rounded]) is None:
            continue
        if not torch.equal(mine.isfinite(), rounded.isfinite()) and not torch.equal(mine.isfinite(), right.isfinite()):
            return False
        if _deviation([mine], [rounded]) > 2 * _deviation([right], [rounded]):
            return False
    return True


@dataclass
class _Case:
    sample: Sample
    run: Callable[[Sample], Any]
    expected: list[Any]
    got: Any = None


def _is_random(case: _Case) -> bool:
    """Whether another seed gives eager torch another result; the entries of samplers set the seed themselves, which is left out here."""
    for seed in range(1, 6):  # several, as few elements may fall alike
        torch.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):
            if _close(_down(case.run(moved(case.sample, "cpu"))), case.expected) is not None:
                return True
    return False


def _other_choice_of_equals(sample: Sample, got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether the results are positions of the same values: among equal elements any may be named (`topk`, `mode`, a sort that is not stable)."""
    x = sample.input
    if not isinstance(x, torch.Tensor) or not got or not all(isinstance(t, torch.Tensor) for t in got) or got[-1].dtype is not torch.int64:
        return False
    x, mine, right = x.detach(), got[-1], expected[-1]
    if len(got) == 2 and _close(got[:1], expected[:1]) is not None:
        return False
    for dim in range(x.dim()):
        as_many = [t if t.dim() == x.dim() else t.unsqueeze(dim) for t in (mine, right)]
        fits = all(d == dim or n <= m for d, (n, m) in enumerate(zip(as_many[0].shape, x.shape))) and as_many[0].dim() == x.dim()
        if fits and all(t.numel() == 0 or (t.min() >= 0 and t.max() < x.shape[dim]) for t in as_many):
            chosen = [torch.gather(x, dim, t) for t in as_many]
            if _close(chosen[:1], chosen[1:]) is None:
                return True
    return False


def _judge(case: _Case, got: list[Any], verdict: Verdict) -> None:
    expected, sample = case.expected, case.sample
    difference = _skeleton(got, expected)
    if difference is not None:
        verdict.worsen(Status.WRONG, difference)
        return
    difference = _close(got, expected)
    if difference is None:
        return
    if _is_random(case):
        verdict.random = True
        return
    if _other_choice_of_equals(sample, got, expected):
        return
    try:
        if _close(_down(sample.process(case.got)), _down(sample.process(case.run(moved(sample, "cpu"))))) is None:
            return
    except Exception:  # the entry's function asks for results that this variant does not have
        pass
    if _as_good_as_eager(case.run, sample, got, expected):
        return
    floats = all(not isinstance(e, torch.Tensor) or e.is_floating_point() or e.is_complex() for e in expected)
    if floats and _close(got, expected, rtol=LOOSE, atol=1e-5) is None:
        verdict.loose = max(verdict.loose, _deviation(got, expected))
        return
    verdict.worsen(Status.WRONG, difference)


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _fell_back(before: Sequence[spmd.metrics.HostFallback]) -> list[str]:
    return sorted({f.op for f in set(spmd.metrics.host_fallbacks()) - set(before)})


def _cases(op: Any, variant: str, dtype: torch.dtype, limit: int) -> Iterator[_Case]:
    for sample in samples(op, dtype, requires_grad=variant == "gradient", limit=limit):
        runs: list[Callable[[Any, Sample], Any]] = []
        try:
            if variant == "view_write":
                runs += [_write_through] if _aliases(op, moved(sample, "cpu")) else []
                runs += [_write_into_view] if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor) else []
            else:
                runs.append(_RUN[variant])
        except Exception:  # eager torch refuses the sample: there is nothing to compare with
            continue
        for function in runs:
            run = lambda s, f=function: f(op, s)  # noqa: E731
            torch.manual_seed(0)
            try:
                expected = _down(run(moved(sample, "cpu")))
            except Exception:  # eager torch refuses the sample in this variant
                continue
            if expected:
                yield _Case(sample, run, expected)


def _run(cases: Iterable[_Case], verdict: Verdict, mesh: spmd.Mesh | None) -> list[_Case]:
    """Records every case; those that could be."""
    recorded = []
    for case in cases:
        verdict.num_samples += 1
        torch.manual_seed(0)
        try:
            case.got = case.run(moved(case.sample, "xla", mesh=mesh))
            recorded.append(case)
        except Exception as error:  # every kind of failure is a finding
            verdict.worsen(Status.ERROR, _describe(error))
    return recorded


def examine(op: Any, variant: str, dtype: torch.dtype, *, mesh: spmd.Mesh | None = None, limit: int = 8) -> Verdict | None:
    """The verdict on one entry, variant and dtype, or None where it does not apply.

    Waits for the device. All samples are recorded first and run as one program; only where that fails do they run one at a time.

    Args:
        op: An entry of `entries()`.
        variant: One of `VARIANTS`.
        dtype: One of `DTYPES`.
        mesh: Splits the first tensor of every sample over the mesh's first axis; None: everything on one device.
        limit: At most this many samples, evenly spread; 0: all.
    """
    if not applies(op, variant, dtype):
        return None
    verdict = Verdict(op.formatted_name, variant, str(dtype).removeprefix("torch."), 1 if mesh is None else mesh.size(), Status.PASSED)
    reason = excluded(op.formatted_name)
    if reason is not None:
        verdict.status, verdict.detail = Status.EXCLUDED, reason
        return verdict
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dispatch.forget()  # what is in recording.entries afterwards took part
        if variant == "errors":
            _examine_errors(op, verdict)
        else:
            _examine_values(op, variant, dtype, verdict, mesh, limit)
            # A view is kept as the link of its chain.
            met = [getattr(kept, "entry", kept) for kept in recording.entries.values()]
            verdict.lowered = sorted({entry.name for entry in met if isinstance(entry, Entry)})
    return verdict if verdict.num_samples or verdict.status is not Status.PASSED else None


def _examine_values(op: Any, variant: str, dtype: torch.dtype, verdict: Verdict, mesh: spmd.Mesh | None, limit: int) -> None:
    before = spmd.metrics.host_fallbacks()
    recorded = _run(_cases(op, variant, dtype, limit), verdict, mesh)
    try:
        spmd.sync()
        results = [_down(case.got) for case in recorded]
    except Exception:  # some program fails: find out which
        results = []
        for case in recorded:
            case.got = None
        spmd.sync()
        survivors = []
        for case in recorded:
            try:
                torch.manual_seed(0)
                case.got = case.run(moved(case.sample, "xla", mesh=mesh))
                results.append(_down(case.got))
                survivors.append(case)
            except Exception as error:
                verdict.worsen(Status.ERROR, _describe(error))
                case.got = None
        recorded = survivors
    for case, got in zip(recorded, results):
        _judge(case, got, verdict)
    fallen = _fell_back(before)
    if fallen:
        verdict.worsen(Status.HOST, ", ".join(fallen))


def _examine_errors(op: Any, verdict: Verdict) -> None:
    torch.manual_seed(0)
    for error_input in op.error_inputs("cpu"):
        s = error_input.sample_input
        sample = Sample(s.input, tuple(s.args), dict(s.kwargs), lambda x: x)
        if not all(_plain(t) for t in sample.tensors()):
            continue
        try:
            _forward(op, moved(sample, "cpu"))
            continue  # eager torch itself does not raise
        except Exception as error:
            right = error
        verdict.num_samples += 1
        try:
            _forward(op, moved(sample, "xla"))
            verdict.worsen(Status.ERROR, f"nothing raised instead of {_describe(right)}")
        except Exception as error:
            same = isinstance(error, type(right)) or type(error) is error_input.error_type
            if not same:
                verdict.worsen(Status.ERROR, f"{_describe(error)} instead of {_describe(right)}")
            elif not _names_the_same(str(error), str(right), error_input.error_regex):
                verdict.worsen(Status.ERROR, f"the message {_describe(error)} instead of {_describe(right)}")


def _names_the_same(message: str, right: str, regex: str) -> bool:
    """The message that torch's test asks for, or one with the same numbers in it."""
    if re.search(regex, message):
        return True
    return set(re.findall(r"\d+", right)) <= set(re.findall(r"\d+", message)) and bool(re.findall(r"\d+", right))
