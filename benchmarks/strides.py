"""Do results have the strides that eager torch gives them?

Calls every entry of torch's operator database on the CPU and on the device, with the samples'
tensors in several layouts, and compares the strides of the results, of `out` tensors that were
empty, and of the gradients. Nothing is computed on the device: strides are known when a call is
recorded.

Run: python -m benchmarks.strides                         all entries (some minutes)
     python -m benchmarks.strides --ops 'fft*' --show     some entries, and no files
"""

import argparse
import fnmatch
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.options import selected, whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.strides"
    parser.add_argument("--ops", default="*", help="patterns of entries, separated by commas")
    parser.add_argument("--samples", type=whole(), default=4, help="of each entry (default 4)")
    parser.add_argument("--show", action="store_true", help="print the table and write no files")
    args = parser.parse_args()

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

import spmd_core as spmd
from benchmarks.opinfo import samples
from benchmarks.opinfo.samples import Sample


def _expanded(t: torch.Tensor) -> torch.Tensor:
    return t if t.dim() == 0 or not t.numel() else t[:1].clone().expand(t.shape)


def _sliced(t: torch.Tensor) -> torch.Tensor:
    """Every second element of a tensor of twice the size in each dim."""
    wide = t
    for d in range(t.dim()):
        wide = wide.repeat_interleave(2, d)
    return wide[tuple(slice(None, None, 2) for _ in range(t.dim()))]


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.to(memory_format=formats[t.dim()]) if t.dim() in formats else t


def _transposed(t: torch.Tensor) -> torch.Tensor:
    """The same elements, with the dims in reverse order in memory."""
    dims = tuple(reversed(range(t.dim())))
    return t.permute(dims).contiguous().permute(dims)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": _transposed,
    "channels_last": _channels_last,
    "expanded": _expanded,
    "sliced": _sliced,
}
# Known differences, by entry (a pattern), with the reason.
_BRANCH = "torch's formula of the gradient has another branch for devices other than the CPU"
_OF_PARTS = "torch composes the gradient of operations whose strides it does not specify"
_ONE_OPERATION = "recorded as one operation here, whose gradients are contiguous"
KNOWN: dict[str, str] = {
    **dict.fromkeys(
        ("max_reduction_no_dim", "min_reduction_no_dim", "median", "nanmedian", "prod"), _BRANCH
    ),
    **dict.fromkeys(("masked_prod", "masked_select"), _BRANCH),
    **dict.fromkeys(("linalg_householder_product", "ormqr", "linalg_pinv_singular"), _OF_PARTS),
    **dict.fromkeys(
        (
            "nn_functional_linear*",
            "nn_functional_multi_head_attention_forward",
            "nn_functional_scaled_dot_product_attention",
        ),
        _ONE_OPERATION,
    ),
    "nn_functional_embedding": "max_norm writes rows that share memory, one after another",
    "linalg_lstsq*": "LAPACK's solution of a wide system is a part of a longer buffer",
    "nn_functional_embedding_bag": "the gradient is a sparse tensor, which the device has not",
}


@dataclass(frozen=True)
class Difference:
    """One difference: the entry, the layout and the variant, and what both sides have."""

    entry: str
    call: str
    detail: str


def known(entry: str) -> str | None:
    """Why an entry's strides differ, or None."""
    return next((KNOWN[p] for p in KNOWN if fnmatch.fnmatch(entry, p)), None)


def _strides(tree: Any) -> list[Any]:
    """The shapes and strides of tensors; None for a stride that no element depends on."""
    return [
        (
            tuple(t.shape),
            tuple(s if n > 1 and t.numel() else None for n, s in zip(t.shape, t.stride())),
        )
        if isinstance(t, torch.Tensor)
        else None
        for t in pytree.tree_leaves(tree)
    ]


def _laid_out(sample: Sample, layout: str, device: str, *, grad: bool = False) -> Sample:
    """The sample on a device, each tensor in the layout."""

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return device if device != "cpu" and x in ("cpu", torch.device("cpu")) else x
        made = LAYOUTS[layout](x.detach().to(device, copy=True))
        return made.requires_grad_(grad and (x.is_floating_point() or x.is_complex()))

    args, kwargs = sample.args, sample.kwargs
    if sample.moves_args:
        args, kwargs = pytree.tree_map(move, (args, kwargs))
    return Sample(pytree.tree_map(move, sample.input), args, kwargs, sample.process)


def _results(op: Any, sample: Sample, layout: str, device: str) -> list[tuple[str, list[Any]]]:
    """The strides of each variant's results; the last entry may be an error."""
    found = []
    s = _laid_out(sample, layout, device)
    torch.manual_seed(0)
    result = op(s.input, *s.args, **s.kwargs)
    found.append(("call", _strides(result)))
    if op.supports_out:
        s = _laid_out(sample, layout, device)
        outs = pytree.tree_map(lambda t: torch.empty(0, dtype=t.dtype, device=device), result)
        op(s.input, *s.args, **s.kwargs, out=outs)
        found.append(("out", _strides(outs)))
    if op.supports_autograd:
        s = _laid_out(sample, layout, device, grad=True)
        outs = [
            t
            for t in pytree.tree_leaves(op(s.input, *s.args, **s.kwargs))
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        wanted = [t for t in s.tensors() if t.requires_grad]
        if outs and wanted:
            cotangents = [torch.ones_like(t, memory_format=torch.contiguous_format) for t in outs]
            grads = torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
            found.append(("gradient", _strides(grads)))
    return found


def examine(op: Any, *, limit: int = 4) -> tuple[Counter[str], list[Difference]]:
    """Compares the strides of an entry's results on one device with eager torch's.

    Args:
        op: an entry of `samples.entries()`.
        limit: at most this many samples, evenly spread.

    Returns:
        The number of calls by variant, and the differences, known ones included.
    """
    counts: Counter[str] = Counter()
    found: list[Difference] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample, layout in _cases(op, limit):
            try:
                right = _results(op, sample, layout, "cpu")
            except Exception:  # eager torch refuses the layout: there is no reference
                continue
            try:
                mine = _results(op, sample, layout, "xla")
            except Exception as error:  # every kind of error is a finding
                text = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
                found.append(Difference(op.formatted_name, layout, text))
                continue
            for (variant, expected), (_, got) in zip(right, mine):
                counts[variant] += 1
                if expected != got:
                    detail = f"{got} instead of {expected}"
                    found.append(Difference(op.formatted_name, f"{variant}, {layout}", detail))
    return counts, found


def _cases(op: Any, limit: int) -> Iterator[tuple[Sample, str]]:
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in samples.DTYPES if d in supported), None)
    if dtype is None or samples.excluded(op.formatted_name, dtype) is not None:
        return
    for sample in samples.samples(op, dtype, requires_grad=False, limit=limit):
        for layout in LAYOUTS:
            yield sample, layout


def _table(counts: Counter[str], found: list[Difference]) -> Table:
    different = Counter(d.call.split(",")[0] for d in found)
    rows = [[name, str(n), str(different[name])] for name, n in counts.items()]
    notes = [f"torch {torch.__version__}; layouts: {', '.join(LAYOUTS)}."]
    first = {d.entry: d for d in reversed(found)}
    numbers = Counter(d.entry for d in found)
    for entry, d in sorted(first.items()):
        reason = known(entry)
        notes.append(
            f"{entry}, {numbers[entry]} times, such as {d.call}: {d.detail}"
            + (f" Known: {reason}" if reason else "")
        )
    return Table("Strides, compared with eager torch's", ["variant", "calls", "other"], rows, notes)


def main(args: argparse.Namespace) -> int:
    spmd.simulate(1)
    torch.set_num_threads(1)
    entries = {op.formatted_name: op for op in samples.entries()}
    chosen = [entries[name] for name in selected("--ops", args.ops, entries)]
    counts: Counter[str] = Counter()
    found: list[Difference] = []
    for op in tqdm(chosen, desc="entries", disable=None):
        some, differences = examine(op, limit=args.samples)
        counts += some
        found += differences
    table = _table(counts, found)
    if args.show:
        table.show()
    else:
        publish("strides", table, {"counts": dict(counts)}, folder=args.out)
    return 1 if any(known(d.entry) is None for d in found) else 0


if __name__ == "__main__":
    sys.exit(main(args))
