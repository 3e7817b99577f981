"""How near is GPT-2's peak HBM on TPU v4 to its lower bound, and to a hand-written jax program's?

Compiles a train step for chips that are not there, by libtpu, and runs nothing: the recipe's
(`examples/gpt2/train.py` through `spmd_core.plan`) and the hand-written one
(`reference_jax_program.py`), with the same sizes, shardings, recomputation of each block, bfloat16
autocast and AdamW, one sequence of 1,024 tokens on each shard of the batch. The bound is that of
`memory_bound.py`. All figures are of one device and without the program's code.

libtpu aligns every buffer of a program at 16 KiB. Thousands are of some bytes, such as those of
asynchronous copies, so both programs are compiled with an alignment of 4 KiB (`ALIGNED`), and the
recipe's with libtpu's own as well.

A row takes minutes, and is not compiled again once it is in hbm.json of `--out`, unless `--again`.
A row that fails is reported with the reason, and the others go on.

Run: python -m benchmarks.hbm
     python -m benchmarks.hbm --only 2B --only fsdp=8
     python -m benchmarks.hbm --only "4B fsdp=8 batch 4"
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import memory_bound
from benchmarks.report import Table, argument_parser, publish, verdict
from examples.gpt2.presets import PRESETS

MAX_OF_BOUND, MAX_OF_REFERENCE, MIN_MFU_BOUND = 1.10, 1.03, 0.50
TIMEOUT_S = 3600
CAPACITY = 32 * 2**30  # of a v4 chip
# Of LIBTPU_INIT_ARGS. 4 KiB: a DMA of HBM is split at such boundaries in any case.
ALIGNED = "--xla_jf_program_hbm_alignment_in_kib=4"
# Chips by the number of devices that the mesh takes: a v4 slice has at least four.
TOPOLOGIES = {1: "v4-8", 4: "v4-8", 8: "v4-16", 16: "v4-32"}


@dataclass(frozen=True)
class Row:
    """What is compiled: a size, a mesh, the sequences on each shard of the batch, and `--remat`."""

    preset: str
    fsdp: int = 1
    tensor: int = 1
    batch: int = 1
    remat: str = "full"

    @property
    def mesh(self) -> str:
        """The mesh as the recipe's option; a mesh of one device for no sharding."""
        sizes = {"fsdp": self.fsdp, "tensor": self.tensor}
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "data=1"

    @property
    def name(self) -> str:
        """The key of the row in the results."""
        sharding = "unsharded" if self.mesh == "data=1" else self.mesh
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        kept = "" if self.remat == "full" else " without recomputation"
        return f"{self.preset} {sharding}{batch}{kept}"

    @property
    def topology(self) -> str:
        """The slice that has the mesh's devices."""
        return TOPOLOGIES[self.fsdp * self.tensor]

    @property
    def bound(self) -> memory_bound.Moment | None:
        """The least memory; None without recomputation, where XLA chooses what is kept."""
        if self.remat != "full":
            return None
        return memory_bound.bound(
            PRESETS[self.preset], fsdp=self.fsdp, tensor=self.tensor, batch=self.batch
        )


ROWS = [
    Row(preset, fsdp, tensor)
    for preset in ("0.5B", "1B", "2B", "4B")
    for fsdp, tensor in ((1, 1), (4, 1), (8, 1), (16, 1), (4, 2))
] + [Row("4B", fsdp=8, batch=4), Row("2B", remat="none")]


def with_arguments(arguments: str) -> dict[str, str]:
    """LIBTPU_INIT_ARGS with these behind those of this process."""
    return {"LIBTPU_INIT_ARGS": " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), arguments])}


def compiled(command: list[str], output: Path, *, arguments: str) -> Any:
    """Runs a module that writes JSON, with arguments of libtpu.

    Returns:
        What it wrote, or the end of its error.
    """
    output.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, **with_arguments(arguments)},
        )
    except subprocess.TimeoutExpired:
        return f"no result within {TIMEOUT_S} s"
    if output.exists():
        return json.loads(output.read_text())
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return next((x for x in lines if "error" in x.lower()), lines[-1] if lines else "no output")


def recipe(row: Row, folder: Path, *, arguments: str = ALIGNED) -> dict[str, Any]:
    """The recipe's step, planned."""
    output = folder / "plan.json"
    train = {
        "preset": row.preset,
        "mesh": row.mesh,
        "batch": row.batch * row.fsdp,
        "dtype": "bf16",
        "remat": row.remat,
        "init": "device",
        "eval-batches": 0,
    }
    options = [f"--{name}={value}" for name, value in train.items()]
    if row.mesh == "data=1":
        options.append("--mesh-devices=1")
    plan = compiled(
        [
            "spmd_core.plan",
            *("--topology", row.topology, "--steps", "1", "--json", str(output)),
            *("--", "python", "-m", "examples.gpt2.train", *options, "--no-progress"),
        ],
        output,
        arguments=arguments,
    )
    if isinstance(plan, str):
        return {"failed": plan}
    if plan["refusals"] or plan["step"] is None:
        return {"failed": " ".join(plan["refusals"]) or plan["ended_by"]}
    step = plan["step"]
    parts = step["parts"]
    apart = "other programs' arrays"
    return {
        "peak": sum(n for part, n in parts.items() if part != apart),
        "parts": parts,
        "fits": plan["fits"],
        "mfu_bound": step["costs"]["mfu_bound"],
        "compile_s": step["compile_s"],
    }


def by_default(row: Row, folder: Path) -> dict[str, Any]:
    """The recipe's step, as libtpu aligns its buffers by itself."""
    return recipe(row, folder, arguments="")


def reference(row: Row, folder: Path) -> dict[str, Any]:
    """The hand-written step."""
    output = folder / "reference.json"
    options = {
        "preset": row.preset,
        "mesh": "" if row.mesh == "data=1" else row.mesh,
        "batch": row.batch,
        "topology": row.topology,
        "remat": row.remat,
        "json": output,
    }
    found = compiled(
        [
            "benchmarks.reference_jax_gpt2",
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        output,
        arguments=ALIGNED,
    )
    if isinstance(found, str):
        return {"failed": found}
    peak = found["arguments"] + found["results"] + found["temporaries"]
    return {"peak": peak, **found}


# What is compiled for a row, by its key in the results.
MEASURED = {"recipe": recipe, "by default": by_default, "reference": reference}


def _ratio(peak: float | None, of: float | None) -> str:
    return "" if peak is None or of is None else f"{peak / of:.3f}"


def _brief(failure: str) -> str:
    """The part of a compiler's error that is about memory."""
    found = re.search(r"total memory required .* exceeds available HBM \([^)]*\)", failure)
    return found[0] if found else failure.splitlines()[0]


def _gb(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f}"


def table_of(results: Mapping[str, Any]) -> Table:
    """The rows that are there, in the order of `ROWS`."""
    rows = []
    for row in ROWS:
        found = results.get(row.name)
        if found is None or not set(MEASURED) <= set(found):
            continue
        ours, bound = found["recipe"], row.bound
        least = None if bound is None else bound.total
        peak, default, other = (found[who].get("peak") for who in MEASURED)
        reached = peak is not None and (other is None or peak <= MAX_OF_REFERENCE * other)
        if row.batch == 1:
            reached = reached and (least is None or peak <= MAX_OF_BOUND * least)
        else:
            reached = reached and ours["fits"] and ours["mfu_bound"] > MIN_MFU_BOUND
        failures = [f"{who}: {_brief(x['failed'])}" for who, x in found.items() if "failed" in x]
        fits = least is None or least <= CAPACITY
        said = verdict(bool(reached)) if fits else "no program fits"
        mfu = ours.get("mfu_bound")
        rows.append(
            [
                row.name,
                _gb(peak),
                _gb(least),
                _gb(other),
                _ratio(peak, least),
                _ratio(default, least),
                _ratio(peak, other),
                "" if mfu is None else f"{mfu:.1%}",
                "; ".join([said, *failures]),
            ]
        )
    return Table(
        "Peak HBM of GPT-2 on TPU v4, by compilation (GB a device)",
        (
            *("model, mesh", "recipe", "bound", "hand-written", "recipe / bound"),
            *("with libtpu's alignment", "recipe / hand-written", "MFU bound", "reached"),
        ),
        rows,
        notes=(
            "One sequence of 1,024 tokens on each shard of the batch where no batch is named, each "
            "block computed again in backward if nothing else is said, bfloat16 autocast, AdamW. "
            "Peaks without code. The announcement of PyTorch/XLA SPMD has 26 GB for 2B unsharded.",
            f"Compiled with LIBTPU_INIT_ARGS={ALIGNED}, except for the recipe's ratio to the "
            "bound with libtpu's own alignment, 16 KiB.",
            f"Reached: at most {MAX_OF_REFERENCE} times the hand-written program, and at most "
            f"{MAX_OF_BOUND} times the bound; with a larger batch, instead of the latter, that the "
            "step fits the chip and its roofline bound on MFU, modelled, is above "
            f"{MIN_MFU_BOUND:.0%}.",
            f"A chip has {CAPACITY / 2**30:.0f} GiB; of a step that takes more, its compiler says "
            "how much.",
        ),
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORDS",
        help="rows whose name has these words; given several times, all of them",
    )
    parser.add_argument("--again", action="store_true", help="compile finished rows too")
    args = parser.parse_args()
    chosen = [row for row in ROWS if all(words in row.name for words in args.only)]
    if not chosen:
        parser.error(f"--only must be part of a row's name, such as {ROWS[1].name!r}")
    path = args.out / "hbm.json"
    results = json.loads(path.read_text())["rows"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        for row in tqdm(chosen, disable=None):
            folder = Path(name)
            found = {} if args.again else results.get(row.name, {})
            for who, measure in MEASURED.items():
                if "peak" not in found.get(who, {}):
                    found[who] = measure(row, folder)
            results[row.name] = found
            publish("hbm", table_of(results), {"rows": results}, folder=args.out)


if __name__ == "__main__":
    main()
