"""How many bytes move between devices with XLA's own form of an operation, and with ours?

Where XLA's partitioner errs (docs/explanation/xla_errors.md), other forms are used. Each case below
is compiled with the rules of `program/partitioner_rules.py` and without, in a process of its own,
as some programs end the process. The bytes are those of the results of all collectives on one
device; values are compared with eager torch. The cases marked as cheap are the usual layouts: there
our form may not move more.

Run: python -m benchmarks.rule_bytes
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.options import check_names
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--case", help="measure one case in this process, and print JSON")
    parser.add_argument("--without-rules", action="store_true", help="with --case: XLA's own form")
    args = parser.parse_args()

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import spmd_core as spmd
from spmd_core.program import fold

DEVICES = 8
Tensors = list[torch.Tensor]
# (what, *a mark for each input) -> the marks are partition specs over the case's mesh
Spec = Any


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        mesh: the sizes of the axes "x" and "y"; one size: "x" alone.
        shapes: of the inputs; one that begins with a number above 1,000,000 has indices below the
            rest, such as (1_000_016, 4, 8) for indices below 16 of shape (4, 8).
        specs: the mark of each input.
        compute: the results, from the inputs and a function that marks a tensor.
        is_cheap: whether our form may not move more than XLA's.
    """

    mesh: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[Spec, ...]
    compute: Callable[[Tensors, Callable[[torch.Tensor, Spec], torch.Tensor]], torch.Tensor]
    is_cheap: bool = False


INDICES = 1_000_000


def _write_row(tensors: Tensors, mark: Any) -> torch.Tensor:
    y = tensors[0][: tensors[0].shape[0] // 2].clone()
    y[tensors[1]] = 70.0
    return y


def _gradient(function: Callable[..., torch.Tensor], *, of: int, result: Spec = None) -> Any:
    """The gradient of a function's squared results for one input."""

    def compute(tensors: Tensors, mark: Any) -> torch.Tensor:
        inputs = list(tensors)
        inputs[of] = inputs[of].detach().requires_grad_()
        y = function(*inputs)
        if result is not None:
            y = mark(y, result)
        return torch.autograd.grad((y * y).sum(), inputs[of])[0]

    return compute


def _lookup(tensors: Tensors, mark: Any) -> torch.Tensor:
    return mark(F.embedding(tensors[1], tensors[0]), ("y", "x")) * 1


def _gradient_of_sum(tensors: Tensors, mark: Any) -> torch.Tensor:
    table = tensors[0].detach().requires_grad_()
    return torch.autograd.grad(F.embedding(tensors[1], table).sum(), table)[0]


def _plain(function: Callable[..., torch.Tensor]) -> Any:
    return lambda tensors, mark: function(*tensors)


CASES: dict[str, Case] = {
    "a row written into split rows": Case(
        (8,), ((4096, 256), (INDICES + 2048, 1)), (("x", None), None), _write_row
    ),
    "a position written into a cache of split heads": Case(
        (8,),
        ((8, 1024, 64), (INDICES + 1024, 1), (8, 1, 64)),
        (("x",), None, ("x",)),
        _plain(lambda cache, at, new: cache.index_copy(1, at, new)),
        is_cheap=True,
    ),
    "gradient of an embedding, even batch": Case(
        (8,),
        ((4096, 128), (INDICES + 4096, 16, 64)),
        (None, ("x",)),
        _gradient(lambda table, ids: F.embedding(ids, table), of=0),
        is_cheap=True,
    ),
    "gradient of an embedding, even batch over one of two axes": Case(
        (4, 2),
        ((4096, 128), (INDICES + 4096, 16, 64)),
        ((None, "y"), ("x",)),
        _gradient(lambda table, ids: F.embedding(ids, table), of=0),
        is_cheap=True,
    ),
    "gradient of an embedding's sum, 1,022 tokens over one of two axes": Case(
        (4, 2), ((4096, 128), (INDICES + 4096, 1022)), (None, ("x",)), _gradient_of_sum
    ),
    "scatter_add in batches, rows split": Case(
        (4, 2),
        ((64, 512), (INDICES + 512, 64, 256), (64, 256)),
        (("x",), ("x",), ("x",)),
        _plain(lambda x, at, new: x.scatter_add(1, at, new)),
        is_cheap=True,
    ),
    "scatter_add in batches, rows and columns split": Case(
        (4, 2),
        ((256, 256), (INDICES + 256, 256, 256), (256, 256)),
        ((None, "x"), None, ("x", "y")),
        _plain(lambda x, at, new: x.scatter_add(1, at, new)),
    ),
    "gradient of a linear weight, batch split": Case(
        (4, 2),
        ((16, 64, 128), (256, 128)),
        (("x",), ("y",)),
        _gradient(F.linear, of=1),
        is_cheap=True,
    ),
    "gradient of a linear weight, inputs of 4 dims, batch split": Case(
        (4, 2),
        ((16, 8, 8, 128), (256, 128)),
        (("x",), ("y",)),
        _gradient(F.linear, of=1),
        is_cheap=True,
    ),
    "gradient of a linear weight, inputs of 4 dims, split otherwise than the result": Case(
        (2, 4),
        ((16, 8, 8, 128), (256, 128)),
        (("y", None, "x"), None),
        _gradient(F.linear, of=1, result=("x", "y")),
    ),
    "attention's scores, batch and heads split": Case(
        (4, 2),
        ((8, 8, 256, 64), (8, 8, 256, 64)),
        (("x", "y"), ("x", "y")),
        _plain(lambda q, k: q @ k.mT),
        is_cheap=True,
    ),
    "attention's values, batch and keys split": Case(
        (4, 2),
        ((8, 8, 256, 256), (8, 8, 256, 64)),
        (("x", None, None, "y"), ("x", None, "y")),
        _plain(lambda p, v: p @ v),
    ),
    "attention's values, batch and keys split over axes of one size": Case(
        (2, 2),
        ((8, 8, 256, 256), (8, 8, 256, 64)),
        (("x", None, None, "y"), ("x", None, "y")),
        _plain(lambda p, v: p @ v),
        is_cheap=True,
    ),
    "attention's scores, heads and head dim split": Case(
        (4, 2),
        ((8, 8, 256, 64), (8, 8, 256, 64)),
        ((None, "x", None, "y"), (None, "x", None, "y")),
        lambda tensors, mark: mark(tensors[0] @ tensors[1].mT, (None, "y", "x")) * 1,
    ),
    "a step that keeps one row": Case((8,), ((5, 4096),), (("x",),), _plain(lambda x: x[4::5] * 2)),
    "rows shifted by one": Case(
        (8,),
        ((64, 4096),),
        (None,),
        lambda tensors, mark: mark(F.pad(tensors[0], (0, 0, 1, -1)), ("x",)),
    ),
    "gradient of the first four rows, split": Case(
        (8,), ((4096, 64),), (("x", None),), _gradient(lambda x: x[:4], of=0), is_cheap=True
    ),
    "gradient of four rows from the third on, split": Case(
        (8,), ((4096, 64),), (("x", None),), _gradient(lambda x: x[2:6], of=0), is_cheap=True
    ),
    "gradient of four rows, split by batch and rows": Case(
        (4, 2),
        ((64, 1024, 64),),
        (("x", "y"),),
        _gradient(lambda x: x[:, 512:516], of=0),
    ),
    "gradient of three columns, rows split": Case(
        (8,), ((1024, 64),), (("x", None),), _gradient(lambda x: x[:, 7:10], of=0), is_cheap=True
    ),
    "every second row": Case(
        (8,), ((64, 4096),), (("x",),), _plain(lambda x: x[::2] * 2), is_cheap=True
    ),
    "gradient of every third row, split": Case(
        (8,), ((3072, 64),), (("x", None),), _gradient(lambda x: x[::3], of=0), is_cheap=True
    ),
    "gradient of every third row, whole rows": Case(
        (8,),
        ((3072, 64),),
        (("x", None),),
        _gradient(lambda x: x[::3], of=0, result=(None, None)),
    ),
    "gradient of average pooling, rows of images split": Case(
        (8,),
        ((4, 16, 64, 64),),
        ((None, None, "x"),),
        _gradient(lambda x: F.avg_pool2d(x, 2), of=0),
        is_cheap=True,
    ),
    "gradient of overlapping average pooling, rows of images split": Case(
        (8,),
        ((4, 16, 64, 64),),
        ((None, None, "x"),),
        _gradient(lambda x: F.avg_pool2d(x, 3, 2, 1), of=0),
    ),
    "rows of a table, split by rows of the indices": Case(
        (8,),
        ((4096, 128), (INDICES + 4096, 1024)),
        (None, ("x",)),
        _plain(lambda table, ids: F.embedding(ids, table)),
        is_cheap=True,
    ),
    "rows of a table whose columns are split like the indices": Case(
        (2, 4), ((4096, 128), (INDICES + 4096, 4096)), (("y", "x"), ("x",)), _lookup
    ),
}


@contextmanager
def _without_rules() -> Iterator[None]:
    """Programs that are lowered inside keep XLA's own forms."""
    before = fold.in_safe_forms
    fold.in_safe_forms = lambda *_: None
    try:
        yield
    finally:
        fold.in_safe_forms = before


def _inputs(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, shape[0] - INDICES, shape[1:], generator=generator)
        if shape[0] >= INDICES
        else torch.randn(shape, generator=generator)
        for shape in case.shapes
    ]


def measure(case: Case) -> dict[str, Any]:
    """The bytes that the case's program moves, and whether its values are right."""
    axes = ("x", "y")[: len(case.mesh)]
    mesh = spmd.Mesh(np.arange(math.prod(case.mesh)), case.mesh, axes)
    eager = _inputs(case)
    tensors = [t.to("xla") for t in eager]
    for t, spec in zip(tensors, case.specs):
        if spec is not None:
            spmd.mark_sharding(t, mesh, spec)
    expected = case.compute(eager, lambda t, spec: t)
    result = case.compute(tensors, lambda t, spec: spmd.mark_sharding(t, mesh, spec))
    found = spmd.debugging.collectives(result)
    moved = sum(c.result_bytes * (c.executions or 1) for c in found)
    ours = result.cpu()
    is_right = torch.allclose(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return {"bytes": moved, "right": bool(is_right)}


def _in_process(name: str, *, rules: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.rule_bytes", "--case", name]
    if not rules:
        command.append("--without-rules")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"bytes": None, "right": False, "error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cell(found: dict[str, Any]) -> str:
    if found["bytes"] is None:
        return "no program"
    return f"{found['bytes'] / 1e3:,.1f} kB, {'right' if found['right'] else 'WRONG'}"


def main(args: argparse.Namespace) -> int:
    if args.case is not None:
        check_names("--case", [args.case], CASES)
        spmd.config.cache_dir = None
        spmd.simulate(DEVICES)
        spmd.use_spmd()
        if args.without_rules:
            with _without_rules():
                print(json.dumps(measure(CASES[args.case])))
        else:
            print(json.dumps(measure(CASES[args.case])))
        return 0
    measured = {
        name: {key: _in_process(name, rules=key == "ours") for key in ("xla", "ours")}
        for name in tqdm(CASES, disable=None)
    }
    holds = {
        name: found["ours"]["right"]
        and (not CASES[name].is_cheap or found["ours"]["bytes"] <= found["xla"]["bytes"])
        for name, found in measured.items()
    }
    rows = [
        [
            f"{name}{' (cheap)' if CASES[name].is_cheap else ''}",
            "x".join(map(str, CASES[name].mesh)),
            _cell(found["xla"]),
            _cell(found["ours"]),
            verdict(holds[name]),
        ]
        for name, found in measured.items()
    ]
    notes = [
        "Bytes of the results of all collectives on one device, in one run of the program, over at "
        f"most {DEVICES} emulated devices. WRONG: other values than eager torch's."
    ]
    columns = ["program", "mesh", "XLA's own form", "our form", "holds"]
    table = Table(
        "Bytes moved by the forms that XLA's partitioner gets right", columns, rows, notes
    )
    publish("rule_bytes", table, {"cases": measured}, folder=args.out)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
