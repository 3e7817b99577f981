"""Judges whether an entry of torch's operator database gives the values of eager CPU torch.

torch describes its operators in `torch.testing._internal.common_methods_invocations.op_db`: for
each operator a callable, samples for each dtype, and what the operator supports. An entry is
examined in up to six variants:

- `forward`: the call;
- `gradient`: the reverse-mode gradient of the call;
- `in_place`: the method whose name ends in an underscore;
- `out`: the `out=` form, also into an empty tensor;
- `view_write`: a write through a result that is a view of the input, and the in-place form on an
  input that is a view; the whole base is compared;
- `errors`: the entry's error inputs must raise the type and the message that torch's tests expect.

Shape and dtype must be equal, and values must lie within the tolerances of
`torch.testing.assert_close` for the dtype. Values outside of these tolerances pass in five cases:

- a result that is not unique, such as a matrix's factors, is compared after the entry's own
  `output_process_fn_grad`;
- an operator that draws random numbers is compared in shape and dtype only; two eager runs with
  different seeds show that it draws;
- the gradient of `mode` or `topk` may go to another of several equal elements, so its sums over
  equal elements are compared;
- an ill-conditioned result is compared with eager torch in float64; it passes if its error is
  within the tolerance, or at most twice the error of eager torch in the sample's dtype;
- any other result passes as *loose* within a relative 1e-3, as in torch's own test of accelerators
  against the CPU; the summary lists it with its deviation.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import spmd_core as spmd
from benchmarks.opinfo.compare import (
    as_good_as_eager,
    close,
    deviation,
    down,
    other_choice_of_equals,
    same_for_equals,
    skeleton,
)
from benchmarks.opinfo.samples import Sample, applies, excluded, is_plain, moved, samples
from spmd_core.dispatch import router
from spmd_core.graph.values import Entry
from spmd_core.recording import calls

_OVERLAP = (
    "elements share memory, so that eager torch's result depends on the order of its writes: "
    "refused here"
)
_GROWS = (
    "eager torch's kernel resizes the tensor that it is to write, unlike its own broadcasting "
    "rule: refused here"
)
_UNIT_VECTORS = (
    "bfloat16: a difference of two unit vectors, each rounded to 16 bits, so that single elements "
    "may be 0.004 apart, one unit in the last place of 1; over 40 random inputs the mean error is "
    "eager torch's own (0.0751 against 0.0761)"
)
# Known failures, by entry and variant: the status and the cause.
KNOWN: dict[tuple[str, str], tuple[str, str]] = {
    ("as_strided", "view_write"): ("error", _OVERLAP),
    ("unfold", "view_write"): ("error", _OVERLAP),
    ("addbmm", "in_place"): ("error", _GROWS),
    ("addbmm", "view_write"): ("error", _GROWS),
    ("masked_fill", "errors"): (
        "error",
        "the right type in the words of torch's own meta kernel, which has other ones for a "
        "complex value",
    ),
    ("nn_functional_triplet_margin_loss", "gradient"): ("wrong", _UNIT_VECTORS),
    ("nn_functional_triplet_margin_with_distance_loss", "gradient"): ("wrong", _UNIT_VECTORS),
    ("multinomial", "errors"): (
        "error",
        "a weight that is negative or not finite: a program cannot raise for its values",
    ),
}


class Status(StrEnum):
    """The outcome of examining an entry's variant, from best to worst."""

    PASSED = "passed"
    EXCLUDED = "excluded"
    HOST = "host fallback"
    ERROR = "error"
    WRONG = "wrong"


_RANK = list(Status)
CHOOSE_AMONG_EQUALS = {"mode", "topk"}  # their gradient may go to any of several equal elements
LOOSE = 1e-3  # the tolerance of TestCommon.test_compare_cpu in torch's test suite


@dataclass
class Verdict:
    """The outcome for one entry, variant and dtype: that of its worst sample."""

    entry: str
    variant: str
    dtype: str
    num_devices: int
    status: Status
    num_samples: int = 0
    detail: str = ""
    loose: float = 0.0  # the largest deviation of a loose pass
    random: bool = False
    lowered: list[str] = field(default_factory=list)  # the overloads whose lowerings were used

    def worsen(self, status: Status, detail: str) -> None:
        """Adopts the status and its detail if the status is worse than the current one."""
        if _RANK.index(status) > _RANK.index(self.status):
            self.status, self.detail = status, detail


def known(name: str, variant: str) -> str | None:
    """The status of a known failure in float32, or None for an entry that passes."""
    found = KNOWN.get((name, variant))
    return None if found is None or found[1].startswith("bfloat16") else found[0]


# The computation of each variant, on any device.


def _forward(op: Any, s: Sample) -> Any:
    return op(s.input, *s.args, **s.kwargs)


def _weights(t: torch.Tensor) -> torch.Tensor:
    """A cotangent that is not constant: a constant one would hide errors that cancel."""
    ramp = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=torch.float64)[: t.numel()].reshape(
        t.shape
    )
    return ramp.to(t.dtype).to(t.device)


def _gradient(op: Any, s: Sample) -> Any:
    result = s.process(op(s.input, *s.args, **s.kwargs))
    outs = [
        t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    wanted = [t for t in s.tensors() if t.requires_grad]
    if not outs or not wanted:
        return []
    return list(torch.autograd.grad(outs, wanted, [_weights(t) for t in outs], allow_unused=True))


def _in_place(op: Any, s: Sample) -> Any:
    target = (
        s.input.detach().clone()
        if isinstance(s.input, torch.Tensor)
        else [t.detach().clone() for t in s.input]
    )
    op.inplace_variant(target, *s.args, **s.kwargs)
    return target


def _out(op: Any, s: Sample) -> Any:
    with torch.no_grad():
        shapes = op(s.input, *s.args, **s.kwargs)
        same = pytree.tree_map(
            lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, shapes
        )
        empty = pytree.tree_map(
            lambda t: (
                torch.empty(0, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) else t
            ),
            shapes,
        )
        returned = [op(s.input, *s.args, **s.kwargs, out=out) for out in (same, empty)]
    return [same, empty, *returned]


def _aliases(op: Any, s: Sample) -> bool:
    """Whether the entry's result is a view of its input."""
    with torch.no_grad():
        result = op(s.input, *s.args, **s.kwargs)
    return (
        isinstance(result, torch.Tensor)
        and isinstance(s.input, torch.Tensor)
        and result.numel() > 0
        and _same_memory(result, s.input)
    )


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


RUN: dict[str, Callable[[Any, Sample], Any]] = {
    "forward": _forward,
    "gradient": _gradient,
    "in_place": _in_place,
    "out": _out,
}


@dataclass
class _Case:
    sample: Sample
    run: Callable[[Sample], Any]
    expected: list[Any]
    is_gradient: bool
    got: Any = None


def _is_random(case: _Case) -> bool:
    """Whether eager torch's result depends on the seed.

    Entries of samplers set the seed themselves; here these calls have no effect.
    """
    for seed in range(1, 6):  # several seeds, as a few elements may be equal by chance
        torch.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):
            if close(down(case.run(moved(case.sample, "cpu"))), case.expected) is not None:
                return True
    return False


def _judge(case: _Case, got: list[Any], verdict: Verdict) -> None:
    expected, sample = case.expected, case.sample
    difference = skeleton(got, expected)
    if difference is not None:
        verdict.worsen(Status.WRONG, difference)
        return
    difference = close(got, expected)
    if difference is None:
        return
    if _is_random(case):
        verdict.random = True
        return
    if other_choice_of_equals(sample, got, expected) or (
        verdict.entry in CHOOSE_AMONG_EQUALS
        and case.is_gradient
        and same_for_equals(sample, got, expected)
    ):
        return
    try:
        if (
            close(
                down(sample.process(case.got)), down(sample.process(case.run(moved(sample, "cpu"))))
            )
            is None
        ):
            return
    except Exception:  # the entry's function needs results that this variant does not have
        pass
    if as_good_as_eager(case.run, sample, got, expected):
        return
    floats = all(
        not isinstance(e, torch.Tensor) or e.is_floating_point() or e.is_complex() for e in expected
    )
    if floats and close(got, expected, rtol=LOOSE, atol=1e-5) is None:
        verdict.loose = max(verdict.loose, deviation(got, expected))
        return
    verdict.worsen(Status.WRONG, difference)


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def fell_back(before: Sequence[spmd.metrics.HostFallback]) -> list[str]:
    return sorted({f.op for f in set(spmd.metrics.host_fallbacks()) - set(before)})


def _cases(op: Any, variant: str, dtype: torch.dtype, limit: int) -> Iterator[_Case]:
    for sample in samples(op, dtype, requires_grad=variant == "gradient", limit=limit):
        runs: list[Callable[[Any, Sample], Any]] = []
        try:
            if variant == "view_write":
                runs += [_write_through] if _aliases(op, moved(sample, "cpu")) else []
                runs += (
                    [_write_into_view]
                    if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor)
                    else []
                )
            else:
                runs.append(RUN[variant])
        except Exception:  # eager torch refuses the sample: there is no reference
            continue
        for function in runs:
            run = lambda s, f=function: f(op, s)  # noqa: E731
            torch.manual_seed(0)
            try:
                expected = down(run(moved(sample, "cpu")))
            except Exception:  # eager torch refuses the sample in this variant
                continue
            if expected:
                yield _Case(sample, run, expected, variant == "gradient")


def _run(cases: Iterable[_Case], verdict: Verdict, mesh: spmd.Mesh | None) -> list[_Case]:
    """Records every case, and returns the cases whose recording raised nothing."""
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


def examine(
    op: Any, variant: str, dtype: torch.dtype, *, mesh: spmd.Mesh | None = None, limit: int = 8
) -> Verdict | None:
    """The verdict on one entry, variant and dtype, or None where it does not apply.

    Waits for the device. All samples run as one program; if that program fails, each sample runs
    as a program of its own.

    Args:
        op: an entry of `entries()`.
        variant: one of `VARIANTS`.
        dtype: one of `DTYPES`.
        mesh: splits the first tensor of every sample over the mesh's first axis; None: one device.
        limit: at most this many samples, evenly spread; 0: all.
    """
    if not applies(op, variant, dtype):
        return None
    verdict = Verdict(
        op.formatted_name,
        variant,
        str(dtype).removeprefix("torch."),
        1 if mesh is None else mesh.size(),
        Status.PASSED,
    )
    reason = excluded(op.formatted_name, dtype)
    if reason is not None:
        verdict.status, verdict.detail = Status.EXCLUDED, reason
        return verdict
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router.forget()  # afterwards calls.entries holds only the entries that this call uses
        if variant == "errors":
            _examine_errors(op, verdict)
        else:
            _examine_values(op, variant, dtype, verdict, mesh, limit)
            # The entry of a view is kept in the link of its chain of views.
            met = [getattr(kept, "entry", kept) for kept in calls.entries.values()]
            verdict.lowered = sorted({entry.name for entry in met if isinstance(entry, Entry)})
    return verdict if verdict.num_samples or verdict.status is not Status.PASSED else None


def _examine_values(
    op: Any, variant: str, dtype: torch.dtype, verdict: Verdict, mesh: spmd.Mesh | None, limit: int
) -> None:
    before = spmd.metrics.host_fallbacks()
    recorded = _run(_cases(op, variant, dtype, limit), verdict, mesh)
    try:
        spmd.sync()
        results = [down(case.got) for case in recorded]
    except Exception:  # a program failed: run the samples one by one to find out which
        results = []
        for case in recorded:
            case.got = None
        spmd.sync()
        survivors = []
        for case in recorded:
            try:
                torch.manual_seed(0)
                case.got = case.run(moved(case.sample, "xla", mesh=mesh))
                results.append(down(case.got))
                survivors.append(case)
            except Exception as error:
                verdict.worsen(Status.ERROR, _describe(error))
                case.got = None
        recorded = survivors
    for case, got in zip(recorded, results):
        _judge(case, got, verdict)
    fallen = fell_back(before)
    if fallen:
        verdict.worsen(Status.HOST, ", ".join(fallen))


def _examine_errors(op: Any, verdict: Verdict) -> None:
    torch.manual_seed(0)
    for error_input in op.error_inputs("cpu"):
        s = error_input.sample_input
        sample = Sample(s.input, tuple(s.args), dict(s.kwargs), lambda x: x)
        if not all(is_plain(t) for t in sample.tensors()):
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
                verdict.worsen(
                    Status.ERROR, f"the message {_describe(error)} instead of {_describe(right)}"
                )


def _names_the_same(message: str, right: str, regex: str) -> bool:
    """Whether the message is the one that torch's test expects, or contains the same numbers."""
    if re.search(regex, message):
        return True
    return set(re.findall(r"\d+", right)) <= set(re.findall(r"\d+", message)) and bool(
        re.findall(r"\d+", right)
    )
