"""How long does each operation take, forward and with its gradient, against eager CPU torch?

Every entry of torch's operator database, on samples that are enlarged to some hundred thousand
elements, and further calls at the sizes of real models. Eager torch and one program on one device
run in turns, with the same number of threads; the program is compiled before, and the time to start
and await an empty program is taken off. Calls that take both less than half a millisecond are
counted only.

Run: python -m benchmarks.op_speed                       all entries (about an hour)
     python -m benchmarks.op_speed --ops 'fft*' --show   some entries, and no files
"""

import argparse
import fnmatch
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.options import number, selected, whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.op_speed"
    parser.add_argument("--ops", default="*", help="patterns of entries, separated by commas")
    parser.add_argument("--rounds", type=whole(), default=5, help="of both, in turns (default 5)")
    parser.add_argument(
        "--timeout", type=number(0.1), default=120, help="for one entry, in seconds"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--show", action="store_true", help="print the table and write no files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import spmd_core as spmd
from benchmarks import workers
from benchmarks.opinfo import samples
from benchmarks.opinfo.samples import Sample, moved

# Of the largest tensor of a sample.
ELEMENTS = 250_000
MAX_RATIO = 3.0
MIN_S = 0.5e-3
# A call that takes longer is not repeated.
LONG_S = 2.0

# Entries whose tensors are matrices, in batches.
MATRICES = (
    *("linalg_*", "cholesky*", "svd*", "qr", "lu", "logdet", "det", "geqrf", "ormqr", "pinverse"),
    *(
        "matrix_exp",
        "triangular_solve",
        "inverse",
        "ldl_*",
        "lstsq",
        "eig*",
        "orgqr",
        "pca_lowrank",
    ),
)

_randn = torch.randn
_image = (8, 16, 64, 64)


def _index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _positive(*shape: int) -> tuple[torch.Tensor]:
    """Positive definite matrices with small condition numbers."""
    x = _randn(*shape, shape[-1])
    return (x @ x.mT / shape[-1] + torch.eye(shape[-1]),)


# Calls at the sizes of models, as a function and its arguments.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "conv1d": (F.conv1d, lambda: (_randn(8, 32, 512), _randn(64, 32, 5))),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda: (_randn(*_image), _randn(32, 16, 3, 3)),
    ),
    "conv2d strided": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        lambda: (_randn(*_image), _randn(32, 16, 3, 3)),
    ),
    "conv2d depthwise": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=16),
        lambda: (_randn(*_image), _randn(16, 1, 3, 3)),
    ),
    "conv2d dilated": (
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
        lambda: (_randn(*_image), _randn(16, 16, 3, 3)),
    ),
    "conv3d": (F.conv3d, lambda: (_randn(2, 8, 16, 24, 24), _randn(16, 8, 3, 3, 3))),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda: (_randn(4, 16, 32, 32), _randn(16, 16, 4, 4)),
    ),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: (_randn(*_image),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), lambda: (_randn(*_image),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), lambda: (_randn(*_image),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 7), lambda: (_randn(*_image),)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2.0, 2), lambda: (_randn(*_image),)),
    **{
        f"interpolate {mode} to {size}": (
            lambda x, mode=mode, size=size: F.interpolate(x, size=size, mode=mode),
            lambda: (_randn(4, 8, 28, 28),),
        )
        for mode in ("nearest", "bilinear", "bicubic")
        for size in (20, 56, 100)
    },
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        lambda: (_randn(4, 8, 64, 64), _randn(4, 64, 64, 2)),
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), lambda: (_randn(*_image),)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), lambda: (_randn(4, 8, 64, 64),)),
    "fold": (
        lambda x: F.fold(x, (64, 64), 3, padding=1),
        lambda: (_randn(4, 72, 4096),),
    ),
    **{
        f"pad {mode}": (
            lambda x, mode=mode: F.pad(x, (3, 3, 3, 3), mode=mode),
            lambda: (_randn(*_image),),
        )
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda: (_randn(*_image), _randn(16), _randn(16)),
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (512,), w, b),
        lambda: (_randn(1024, 512), _randn(512), _randn(512)),
    ),
    "group_norm": (lambda x: F.group_norm(x, 4), lambda: (_randn(*_image),)),
    "instance_norm": (F.instance_norm, lambda: (_randn(*_image),)),
    "local_response_norm": (
        lambda x: F.local_response_norm(x, 5),
        lambda: (_randn(*_image),),
    ),
    "embedding": (lambda i, w: F.embedding(i, w), lambda: (_index(8192, 4096), _randn(8192, 128))),
    "embedding_bag": (
        lambda i, w: F.embedding_bag(i, w),
        lambda: (_index(8192, 512, 8), _randn(8192, 128)),
    ),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x, t),
        lambda: (_randn(1024, 4096), _index(4096, 1024)),
    ),
    "nll_loss of images": (
        lambda x, t: F.nll_loss(x, t),
        lambda: (_randn(4, 21, 64, 64), _index(21, 4, 64, 64)),
    ),
    "ctc_loss": (
        lambda x, t: F.ctc_loss(
            x.log_softmax(-1), t, torch.full((16,), 100), torch.full((16,), 20)
        ),
        lambda: (_randn(100, 16, 64), _index(63, 16, 20) + 1),
    ),
    "attention": (
        F.scaled_dot_product_attention,
        lambda: tuple(_randn(2, 8, 256, 64) for _ in range(3)),
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: tuple(_randn(2, 8, 256, 64) for _ in range(3)),
    ),
    "gather": (
        lambda x, i: x.gather(1, i),
        lambda: (_randn(512, 1024), _index(1024, 512, 512)),
    ),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s),
        lambda: (_randn(512, 1024), torch.rand(512, 1024).argsort(1), _randn(512, 1024)),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        lambda: (_randn(512, 1024), _index(1024, 512, 512), _randn(512, 512)),
    ),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s),
        lambda: (_randn(4096, 128), _index(4096, 2048), _randn(2048, 128)),
    ),
    "index_select": (
        lambda x, i: x.index_select(0, i),
        lambda: (_randn(4096, 128), _index(4096, 4096)),
    ),
    "index": (lambda x, i: x[i], lambda: (_randn(4096, 128), _index(4096, 4096))),
    "index of two dims": (
        lambda x, i, j: x[i, j],
        lambda: (_randn(512, 512), _index(512, 100_000), _index(512, 100_000)),
    ),
    "index_put accumulating": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda: (_randn(4096, 128), _index(4096, 2048), _randn(2048, 128)),
    ),
    "sort": (lambda x: x.sort(-1)[0], lambda: (_randn(512, 512),)),
    "topk": (lambda x: x.topk(10)[0], lambda: (_randn(512, 1024),)),
    "median": (lambda x: x.median(-1)[0], lambda: (_randn(512, 512),)),
    "kthvalue": (lambda x: x.kthvalue(10, -1)[0], lambda: (_randn(512, 512),)),
    "cumsum": (lambda x: x.cumsum(-1), lambda: (_randn(512, 1024),)),
    "cumprod": (lambda x: x.cumprod(-1), lambda: (torch.rand(512, 512) + 0.5,)),
    "cummax": (lambda x: x.cummax(-1)[0], lambda: (_randn(512, 512),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), lambda: (_randn(512, 512),)),
    "unique": (lambda x: x.unique(), lambda: (_index(5000, 100_000),)),
    "nonzero": (lambda x: (x > 0).nonzero(), lambda: (_randn(512, 512),)),
    "masked_select": (lambda x: x[x > 0], lambda: (_randn(512, 512),)),
    "bincount": (lambda x: x.bincount(minlength=1000), lambda: (_index(1000, 200_000),)),
    "histc": (lambda x: x.histc(100), lambda: (_randn(200_000),)),
    "searchsorted": (
        lambda s, x: torch.searchsorted(s.sort()[0], x),
        lambda: (_randn(4096), _randn(100_000)),
    ),
    "cdist": (torch.cdist, lambda: (_randn(512, 64), _randn(512, 64))),
    **{
        f"{name} of {what}": (function, partial(_positive, *shape))
        for name, function in {
            "cholesky": torch.linalg.cholesky,
            "inverse": torch.linalg.inv,
            "determinant": lambda x: torch.linalg.slogdet(x)[1],
            "solve": lambda x: torch.linalg.solve(x, x),
            "triangular solve": lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False),
            "qr": lambda x: torch.linalg.qr(x)[1],
            "eigh": lambda x: torch.linalg.eigh(x)[0],
            "svd": torch.linalg.svdvals,
            "matrix_exp": torch.matrix_exp,
        }.items()
        for what, shape in {"a matrix": (256,), "many matrices": (500, 8)}.items()
    },
    "lstm": (
        lambda x, *w: torch.lstm(
            x, (x.new_zeros(1, 16, 128),) * 2, list(w), True, 1, 0.0, False, False, True
        )[0],
        lambda: (_randn(16, 64, 64), _randn(512, 64), _randn(512, 128), _randn(512), _randn(512)),
    ),
    "roll": (lambda x: x.roll((3, 5), (0, 1)), lambda: (_randn(1024, 512),)),
    "flip": (lambda x: x.flip(0, 1), lambda: (_randn(1024, 512),)),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous(), lambda: (_randn(64, 128, 64),)),
    "cat": (lambda *x: torch.cat(x, 1), lambda: tuple(_randn(512, 256) for _ in range(4))),
    "tril": (lambda x: x.tril(), lambda: (_randn(1024, 512),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(4, 0), lambda: (_randn(512, 256),)),
}

# Why entries take more than `MAX_RATIO` times eager torch's time.
REASONS: dict[str, tuple[str, ...]] = {
    "the fixed time of a program with many operations or results": (
        *("linalg_vander", "native_group_norm", "arange", "eye", "unbind_copy", "cartesian_prod"),
    ),
    "waits for the number of results": ("argwhere",),
    "all elements take as many terms as the slowest": (
        *("igamma*", "*polygamma*", "digamma", "*zeta", "special_*_polynomial_*"),
    ),
    "all elements take as many steps as the slowest": ("lcm", "gcd"),
    "sorts; torch selects": ("*median", "kthvalue", "quantile", "nanquantile"),
    "XLA's sort": ("mode", "argsort", "msort", "sort", "unique*"),
    "XLA reduces values with positions one by one": (
        *("*argm??", "m??_reduction_with_dim", "*max_pool*", "cummax", "cummin"),
    ),
    "XLA's running sums": ("*cumsum", "*cumprod", "*prod", "masked_scatter", "logcumsumexp"),
    "XLA calls or expands a scalar function": (
        *("exp2", "acos", "asin", "tan", "atan2", "fmod", "remainder", "__rmod__", "float_power"),
        *("floor_divide", "div_floor_rounding", "logaddexp*", "acosh", "asinh", "atanh"),
        "special_bessel*",
    ),
    "XLA's convolution with large or dilated kernels": ("nn_functional_conv*", "conv_transpose*"),
    "XLA sums the differences one by one": ("nn_functional_pdist", "cdist"),
    "gathers all rows before it sums them": ("nn_functional_embedding_bag",),
    "XLA gathers elements one by one": ("grid_sample", "bucketize"),
    "transposes the volume first": ("grid_sampler_3d",),
    "one column after the other": ("linalg_ldl_*", "linalg_householder_product", "ormqr"),
    "scipy's LAPACK, one matrix after the other; torch has MKL": (
        *("cholesky*", "linalg_cholesky*", "determinant*", "logdet", "linalg_eig*", "svd"),
        *("linalg_lstsq*", "linalg_inv*", "linalg_tensor*", "linalg_solve*", "norm_nuc"),
        *("linalg_svdvals", "svd_lowrank", "matrix_exp", "linalg_lu*", "lu"),
    ),
    "scatters one by one": (
        *("bincount", "histogram", "__getitem__", "*max_unpool*", "index_fill", "scatter"),
    ),
}


def _scaled(sample: Sample, name: str) -> Sample:
    """The sample with each dim of each tensor repeated alike, to about `ELEMENTS` elements.

    Of matrices only the batches are repeated: a matrix of equal blocks is singular.
    """
    kept = 2 if any(fnmatch.fnmatch(name, p) for p in MATRICES) else 0
    largest = max(sample.tensors(), key=lambda t: t.numel(), default=None)
    if largest is None or not 0 < largest.numel() < ELEMENTS or largest.dim() <= kept:
        return sample
    factor = max(1, int((ELEMENTS / largest.numel()) ** (1 / (largest.dim() - kept))))

    def repeat(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() <= kept:
            return x
        factors = (factor,) * (x.dim() - kept) + (1,) * kept
        return x.detach().repeat(factors).requires_grad_(x.requires_grad)

    args = pytree.tree_map(repeat, (sample.input, sample.args, sample.kwargs))
    return Sample(args[0], args[1], args[2], sample.process, sample.moves_args)


def _largest(op: Any, variant: str) -> Sample | None:
    """The entry's float32 sample with the most elements, scaled where eager torch takes it so."""
    supported = op.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in supported else torch.int64
    if dtype not in supported or samples.excluded(op.formatted_name, dtype):
        return None
    if variant == "gradient" and dtype == torch.int64:
        return None
    known = samples.samples(op, dtype, requires_grad=variant == "gradient", limit=0)
    if not known:
        return None
    largest = max(known, key=lambda s: sum(t.numel() for t in s.tensors()))
    try:
        scaled = _scaled(largest, op.formatted_name)
        _run(op, scaled, variant)
    except Exception:  # its other arguments, such as shapes, no longer fit
        return largest
    return scaled


def _call(name: str, variant: str) -> tuple[Callable[..., Any], Sample | None]:
    if name in CALLS:
        function, make = CALLS[name]
        torch.manual_seed(0)
        args = make()
        if variant == "gradient":
            for x in args:
                x.requires_grad_(x.is_floating_point())
        return function, Sample(args[0], tuple(args[1:]), {}, lambda x: x)
    op = next(op for op in samples.entries() if op.formatted_name == name)
    return op, _largest(op, variant)


def _run(function: Callable[..., Any], sample: Sample, variant: str) -> Any:
    result = function(sample.input, *sample.args, **sample.kwargs)
    if variant == "forward":
        return result
    outs = [
        t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    wanted = [t for t in sample.tensors() if t.requires_grad]
    return torch.autograd.grad(outs, wanted, [torch.ones_like(t) for t in outs], allow_unused=True)


def _seconds(function: Callable[..., Any], sample: Sample, variant: str) -> float:
    start = time.perf_counter()
    kept = _run(function, sample, variant)
    spmd.sync(wait=True)
    del kept
    return time.perf_counter() - start


def measure(name: str, variant: str, rounds: int) -> dict[str, Any]:
    """Times one entry in turns with eager torch.

    Returns:
        The least seconds of both, `eager` and `ours`, the latter without what an empty program
        takes; or `skipped` or `error`, and why.
    """
    facts: dict[str, Any] = {"name": name, "variant": variant}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, sample = _call(name, variant)
        if sample is None:
            return facts | {"skipped": "no sample"}
        try:
            eager = _seconds(function, sample, variant)
        except Exception as error:  # eager torch is the reference
            return facts | {"skipped": f"eager torch: {type(error).__name__}"}
        ours = moved(sample, "xla")
        try:
            for _ in range(2):  # the first compiles
                mine = _seconds(function, ours, variant)
        except Exception as error:  # a finding
            return facts | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        empty = torch.zeros((), device="xla")
        eagers, mines, empties = [eager], [mine], []
        for _ in range(rounds if max(eager, mine) < LONG_S else 1):
            eagers.append(_seconds(function, sample, variant))
            mines.append(_seconds(function, ours, variant))
            empties.append(_seconds(torch.neg, Sample(empty, (), {}, lambda x: x), "forward"))
        elements = sum(t.numel() for t in sample.tensors())
        taken = max(min(mines) - min(empties), 0.0)
        return facts | {"eager": min(eagers), "ours": taken, "elements": elements}


def known(name: str) -> str | None:
    """Why an entry takes long, or None."""
    return next(
        (why for why, ps in REASONS.items() if any(fnmatch.fnmatch(name, p) for p in ps)), None
    )


def _table(found: list[dict[str, Any]]) -> Table:
    timed = [f for f in found if "eager" in f and max(f["eager"], f["ours"]) >= MIN_S]
    ratio = lambda f: f["ours"] / max(f["eager"], MIN_S / 10)  # noqa: E731
    slow = sorted((f for f in timed if ratio(f) > MAX_RATIO), key=ratio, reverse=True)
    ratios = sorted(ratio(f) for f in timed)
    rows = [
        [
            f"{f['name']}, {f['variant']}",
            f"{f['elements']:,}",
            f"{f['eager'] * 1e3:.2f} ms",
            f"{f['ours'] * 1e3:.2f} ms",
            f"{ratio(f):.1f}",
            known(f["name"]) or "",
        ]
        for f in slow
    ]
    notes = [
        f"{len(timed)} calls timed: half of them take up to {ratios[len(ratios) // 2]:.2f} times "
        f"eager torch's time, nine tenths up to {ratios[len(ratios) * 9 // 10]:.2f}. The rows are "
        f"those above {MAX_RATIO:g}."
        if timed
        else "No call is long enough to be timed.",
        f"{sum('eager' in f for f in found) - len(timed)} calls take less than "
        f"{MIN_S * 1e3:g} ms, {sum('skipped' in f for f in found)} have no sample to time.",
    ]
    notes += [f"{f['name']}, {f['variant']}: {f['error']}" for f in found if "error" in f]
    columns = ["call", "elements", "eager torch", "here", "ratio", "reason"]
    return Table("Operations that take long", columns, rows, notes)


def _serve(rounds: int) -> None:
    spmd.simulate(1)
    workers.serve(lambda task: measure(task["entry"], task["variant"], rounds))


def main(args: argparse.Namespace) -> int:
    if args.worker:
        _serve(args.rounds)
        return 0
    named = [(op.formatted_name, bool(op.supports_autograd)) for op in samples.entries()]
    named += [(name, True) for name in CALLS]
    chosen = {*selected("--ops", args.ops, [name for name, _ in named])}
    tasks = [
        {"entry": name, "variant": variant}
        for name, has_gradient in named
        if name in chosen
        for variant in ("forward", "gradient")[: 1 + has_gradient]
    ]
    journal = args.out / "op_speed.journal"
    found = workers.run(
        tasks,
        [sys.executable, "-m", "benchmarks.op_speed", "--worker", "--rounds", str(args.rounds)],
        lost=lambda task, what: {"name": task["entry"], "variant": task["variant"], "error": what},
        jobs=1,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
        what="calls",
    )
    journal.unlink()
    table = _table(found)
    if args.show:
        table.show()
        return 0
    publish("op_speed", table, {"calls": found}, folder=args.out)
    unexplained = [row for row in table.rows if not row[-1]]
    return 1 if unexplained or any("error" in f for f in found) else 0


if __name__ == "__main__":
    sys.exit(main(args))
