"""Does the device refuse what eager torch refuses, and accept what it accepts?

Calls every entry of torch's operator database on the CPU and on the device, with every pair of
dtypes: as a function, in place, and with an `out` tensor of every dtype. Both sides must raise, or
both must return results of the same shapes and dtypes. Nothing is computed on the device: what is
compared is known when a call is recorded. The database's own error inputs are compared, too, with
their messages.

Run: python -m benchmarks.refusals                         all entries (about a quarter of an hour)
     python -m benchmarks.refusals --ops 'index*' --show   some entries, and no files
"""

import argparse
import fnmatch
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.options import part, selected, whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.refusals"
    parser.add_argument("--ops", default="*", help="patterns of entries, separated by commas")
    parser.add_argument("--samples", type=whole(), default=1, help="of each entry (default 1)")
    parser.add_argument("--show", action="store_true", help="print the table and write no files")
    parser.add_argument(
        "--part", type=part, default="0/1", help="the part of the entries, such as 0/2"
    )
    args = parser.parse_args()

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

import spmd_core as spmd
from benchmarks.opinfo import cases, samples
from benchmarks.opinfo.samples import Sample

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
_NARROW = (torch.bfloat16, torch.float16)
# What torch raises for values; the device cannot know them when it records.
_OF_VALUES = re.compile(
    r"out of (range|bounds)|ZeroDivisionError|singular|converge|positive.definite|ill-conditioned"
    r"|negative|strictly increasing|monotonic|must be in|not a valid probability|between 0 and 1"
)


class Finding(StrEnum):
    """How the device and eager torch differ in a call."""

    ACCEPTED = "accepted here, refused by eager torch"
    REFUSED = "refused here, accepted by eager torch"
    TYPE = "another type of error"
    RESULT = "another shape or dtype"
    MESSAGE = "an error input's own words"


# Known differences, by entry (a pattern) and finding, with the reason.
_STATISTICS = (
    "eager torch's CPU kernel rounds the saved statistics to 16 bits; its meta kernels and other "
    "devices keep float32"
)
_LENGTHS = (
    "the CPU kernel wants lengths with a given sum, which no stand-in has, so it is not asked; the "
    "sums of integers are right here"
)
_CHUNKED = (
    "torch's own code accumulates in float32 on a CPU, and multiplies what it is given on a device "
    "it does not know"
)
KNOWN: dict[tuple[str, Finding], str] = {
    ("histc", Finding.ACCEPTED): "CUDA has it for integers, and routers of experts use it",
    ("native_batch_norm", Finding.RESULT): _STATISTICS,
    ("_native_batch_norm_legit", Finding.RESULT): _STATISTICS,
    ("_batch_norm_with_update", Finding.RESULT): _STATISTICS,
    ("native_layer_norm", Finding.RESULT): _STATISTICS,
    ("_segment_reduce_*", Finding.ACCEPTED): _LENGTHS,
    ("nn_functional_linear_cross_entropy_chunked*", Finding.REFUSED): _CHUNKED,
    ("_unsafe_masked_index", Finding.ACCEPTED): (
        "a fill value that does not fit its integers: numbers are inputs of a program, and are "
        "checked for the operations that users call"
    ),
}


@dataclass(frozen=True)
class Difference:
    """One difference: the entry, the call's variant and dtypes, and what both sides did."""

    entry: str
    finding: Finding
    call: str
    detail: str


@dataclass(frozen=True)
class _Call:
    """One call of an entry: a sample with converted tensors, and the dtypes of an `out`."""

    variant: str
    dtypes: tuple[torch.dtype, ...]
    sample: Sample
    out: torch.dtype | None = None

    def __str__(self) -> str:
        names = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
        into = "" if self.out is None else f", out={str(self.out).removeprefix('torch.')}"
        return f"{self.variant}({names}{into})"


def known(entry: str, finding: Finding) -> str | None:
    """Why a difference stays, or None."""
    for (pattern, kind), reason in KNOWN.items():
        if kind is finding and fnmatch.fnmatch(entry, pattern):
            return reason
    return None


def _converted(sample: Sample, dtypes: Sequence[torch.dtype]) -> Sample:
    """The sample with its tensors, in their order, in these dtypes."""
    order = iter(dtypes)

    def convert(x: Any) -> Any:
        return x.detach().to(next(order)) if isinstance(x, torch.Tensor) else x

    input_, args, kwargs = pytree.tree_map(convert, (sample.input, sample.args, sample.kwargs))
    return Sample(input_, args, kwargs, sample.process, sample.moves_args)


def _pairs(sample: Sample, base: torch.dtype) -> Iterator[tuple[torch.dtype, ...]]:
    """The dtypes of a sample's tensors: all the same, and each of the first three another.

    Indices and masks keep their dtype, unless it is their turn.
    """
    own = [t.dtype for t in sample.tensors()]
    follows = [d is base for d in own]
    for d in DTYPES:
        yield tuple(d if f else o for f, o in zip(follows, own))
    for i in range(min(len(own), 3) if len(own) > 1 else 0):
        for d, other in itertools.permutations(DTYPES, 2):
            yield tuple(
                other if j == i else (d if f else o) for j, (f, o) in enumerate(zip(follows, own))
            )


def _calls(op: Any, limit: int) -> Iterator[_Call]:
    supported = op.supported_dtypes("cpu")
    base = next((d for d in samples.DTYPES if d in supported), None)
    if base is None:
        return
    for sample in samples.samples(op, base, requires_grad=False, limit=limit):
        if not sample.tensors() or sum(t.numel() for t in sample.tensors()) > 20_000:
            continue
        for dtypes in dict.fromkeys(_pairs(sample, base)):
            converted = _converted(sample, dtypes)
            yield _Call("call", dtypes, converted)
            if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
                yield _Call("in place", dtypes, converted)
        if op.supports_out:
            follows = [t.dtype is base for t in sample.tensors()]
            for d, out in itertools.product(DTYPES, DTYPES):
                dtypes = tuple(d if f else t.dtype for f, t in zip(follows, sample.tensors()))
                yield _Call("out", dtypes, _converted(sample, dtypes), out)


def _facts(result: Any) -> list[Any]:
    return [
        (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x)
        for x in pytree.tree_leaves(result)
    ]


def _outcome(op: Any, call: _Call, device: str) -> Any:
    """The results' shapes and dtypes, or the error."""
    sample = samples.moved(call.sample, device)
    torch.manual_seed(0)
    try:
        if call.variant == "in place":
            return _facts(op.inplace_variant(sample.input, *sample.args, **sample.kwargs))
        if call.out is None:
            return _facts(op(sample.input, *sample.args, **sample.kwargs))
        # The number and shapes of the results are those without `out`, on the CPU.
        on_cpu = samples.moved(call.sample, "cpu")
        outs = pytree.tree_map(
            lambda t: torch.zeros(t.shape, dtype=call.out, device=device),
            op(on_cpu.input, *on_cpu.args, **on_cpu.kwargs),
        )
        return _facts(op(sample.input, *sample.args, **sample.kwargs, out=outs))
    except Exception as error:  # every kind of error is an outcome
        return error


def _described(outcome: Any) -> str:
    if isinstance(outcome, Exception):
        lines = str(outcome).strip().splitlines()
        return f"{type(outcome).__name__}: {lines[0][:120] if lines else ''}"
    return ", ".join(
        f"{str(x[0]).removeprefix('torch.')}{list(x[1])}" if isinstance(x, tuple) else x.__name__
        for x in outcome
    )


def _compare(op: Any, call: _Call) -> tuple[str, Finding | None, str]:
    """Compares both sides: a category for the summary, the finding, and its detail."""
    right = _outcome(op, call, "cpu")
    if isinstance(right, Exception) and (
        isinstance(right, torch.linalg.LinAlgError) or _OF_VALUES.search(str(right))
    ):
        return "of values", None, ""
    mine = _outcome(op, call, "xla")
    detail = f"{_described(mine)} instead of {_described(right)}"
    if isinstance(right, Exception):
        if isinstance(mine, Exception):
            same = isinstance(mine, type(right)) or isinstance(right, type(mine))
            return "both refuse", None if same else Finding.TYPE, detail
        narrow = any(d in _NARROW for d in (*call.dtypes, call.out))
        if isinstance(right, NotImplementedError) and narrow:
            return "only the CPU has no kernel", None, ""
        return "", Finding.ACCEPTED, detail
    if isinstance(mine, Exception):
        return "", Finding.REFUSED, detail
    return "both accept", None if mine == right else Finding.RESULT, detail


def examine(op: Any, *, limit: int = 1) -> tuple[Counter[str], list[Difference]]:
    """Compares an entry's calls on one device with eager torch's.

    Args:
        op: an entry of `samples.entries()`.
        limit: at most this many samples, evenly spread.

    Returns:
        The number of calls by outcome, and the differences, known ones included.
    """
    counts: Counter[str] = Counter()
    found: list[Difference] = []
    name = op.formatted_name
    if samples.excluded(name, torch.float32) is not None:
        return counts, found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in _calls(op, limit):
            word, finding, detail = _compare(op, call)
            counts[word if finding is None else str(finding)] += 1
            if finding is not None:
                found.append(Difference(name, finding, str(call), detail))
        verdict = cases.examine(op, "errors", torch.float32)
    if verdict is not None:
        counts["error inputs"] += verdict.num_samples
        if verdict.status is not cases.Status.PASSED and (name, "errors") not in cases.KNOWN:
            found.append(Difference(name, Finding.MESSAGE, "error inputs", verdict.detail))
    return counts, found


def _table(counts: Counter[str], found: list[Difference]) -> Table:
    rows = [[word, str(n)] for word, n in sorted(counts.items(), key=lambda item: -item[1])]
    notes = [
        f"torch {torch.__version__}; dtypes "
        + ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        + ". `only the CPU has no kernel`: a 16-bit float, accepted here as on other devices. "
        "`of values`: eager torch refuses the sample's values, which a recording does not know."
    ]
    first: dict[tuple[str, Finding], Difference] = {}
    numbers: Counter[tuple[str, Finding]] = Counter()
    for d in found:
        first.setdefault((d.entry, d.finding), d)
        numbers[d.entry, d.finding] += 1
    for key, d in first.items():
        reason = known(*key)
        text = f"{d.call}: {d.detail}".replace("|", "\\|")
        notes.append(
            f"**{d.finding}**: {d.entry}, {numbers[key]} calls, such as {text}"
            + (f" Known: {reason}" if reason else "")
        )
    return Table("Refusals, compared with eager torch", ["outcome", "calls"], rows, notes)


def main(args: argparse.Namespace) -> int:
    spmd.simulate(1)
    torch.set_num_threads(1)
    entries = {op.formatted_name: op for op in samples.entries()}
    names = {*selected("--ops", args.ops, entries)}
    number, count = args.part
    chosen = [op for op in samples.entries()[number::count] if op.formatted_name in names]
    counts: Counter[str] = Counter()
    found: list[Difference] = []
    for op in tqdm(chosen, desc="entries", disable=None):
        some, differences = examine(op, limit=args.samples)
        counts += some
        found += differences
    table = _table(counts, found)
    unknown = [d for d in found if known(d.entry, d.finding) is None]
    if args.show:
        table.show()
    else:
        publish("refusals", table, {"counts": dict(counts)}, folder=args.out)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(args))
