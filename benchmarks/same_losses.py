"""Are the recipes' losses those of another version of the sources, to the last bit?

Each recipe trains at its smoke size over several meshes: in another checkout, and here, where two
parts of `program/` change the order of sums or what XLA fuses, and can be left out: the pass
`fused_projections`, and state as an input of the first step's program (`initial_state`). Without
both, losses are to be the same floats; with one or both, the table says the first step whose loss
differs, and the largest relative difference. Nothing is loaded from a cache of compiled programs.

Run: git worktree add --detach ../before COMMIT
     python -m benchmarks.same_losses ../before
     python -m benchmarks.same_losses ../before --only "gpt2 fsdp=8"
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("checkout", type=Path, help="the root of another checkout's files")
    parser.add_argument("--only", default="", help="runs whose recipe and mesh have this text")
    parser.add_argument(
        "--without",
        choices=("fused_projections", "initial_state"),
        action="append",
        default=[],
        help="one run of --only in this process, without this part",
    )
    parser.add_argument("--results", type=Path, help="where that run's report is written")
    args = parser.parse_args()
    if not (args.checkout / "examples").is_dir():
        parser.error(
            "CHECKOUT is a folder with the repository's files, as `git worktree add` makes it; "
            f"got {args.checkout}, which has no examples/. Write ../before."
        )

from examples.gpt2 import train as gpt2
from examples.llama_tp import train as llama_tp
from examples.resnet_spatial import train as resnet_spatial
from spmd_core.program import initial_state, pipeline

# By recipe: meshes over eight devices.
RUNS = {
    "gpt2": ("data=8", "fsdp=8", "fsdp=4,tensor=2"),
    "llama_tp": ("fsdp=8", "tensor=8", "data=4,tensor=2", "fsdp=4,tensor=2"),
    "resnet_spatial": ("data=8", "data=2,height=2,width=2"),
}
CHANGES = ("fused_projections", "initial_state")
RECIPES = {"gpt2": gpt2, "llama_tp": llama_tp, "resnet_spatial": resnet_spatial}
ROOT = Path(__file__).parents[1]


def leave_out(parts: Collection[str]) -> None:
    """Replaces these of `CHANGES` in this process by what does nothing."""
    pipeline.PASSES = tuple(x for x in pipeline.PASSES if x.__name__ not in parts)
    if "initial_state" in parts:
        initial_state.find_state = lambda live, nodes, returned=(): initial_state.State()


def options(mesh: str, results: Path) -> list[str]:
    """A recipe's options."""
    run = ["--smoke", "--devices", "8", "--mesh", mesh]
    return [*run, "--eval-batches", "0", "--no-progress", "--results", str(results)]


def losses(name: str, root: Path, without: Sequence[str] = ()) -> list[float]:
    """The losses of a run, in a process of its own.

    Args:
        name: recipe and mesh.
        root: the checkout that has the recipe.
        without: parts of `CHANGES`, left out of this checkout.

    Raises:
        RuntimeError: the run failed; the message holds the end of its output.
    """
    recipe, mesh = name.split()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "report.json"
        if root == ROOT:
            left_out = [x for part in without for x in ("--without", part)]
            command = ["benchmarks.same_losses", str(root), "--only", name, *left_out]
            command += ["--results", str(results)]
        else:
            command = [f"examples.{recipe}.train", *options(mesh, results)]
        paths = [*map(str, sorted((root / "packages").glob("*/src"))), str(root)]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=root,
            env={**os.environ, "SPMD_CACHE_DIR": "", "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} in {root} ended with {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-3000:]}"
            )
        found: list[float] = json.loads(results.read_text())["losses"]
        return found


def difference(given: Sequence[float], before: Sequence[float]) -> str:
    """How losses differ: not at all, or from which step on, and by how much at most, relative.

    Raises:
        ValueError: the runs do not have the same number of steps.

    Example:
        >>> difference([2.0, 1.0], [2.0, 1.0]), difference([2.0, 1.5, 0.9], [2.0, 1.0, 1.0])
        ('same', 'from step 2: 5.0e-01')
    """
    if len(given) != len(before):
        raise ValueError(
            f"the runs must have the same number of steps; got {len(given)} and {len(before)}."
        )
    different = [i for i, (a, b) in enumerate(zip(given, before), 1) if a != b]
    if not different:
        return "same"
    largest = max(abs(a - b) / abs(b) for a, b in zip(given, before))
    return f"from step {different[0]}: {largest:.1e}"


def commit(root: Path) -> str:
    """The commit of a checkout, with a `+` if its files have changed since."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(described, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    if args.results:
        leave_out(args.without)
        recipe, mesh = args.only.split()
        return int(RECIPES[recipe].main(options(mesh, args.results)))
    names = [f"{recipe} {mesh}" for recipe, meshes in RUNS.items() for mesh in meshes]
    names = [name for name in names if args.only in name]
    if not names:
        sys.exit(f"--only is a text such as 'gpt2 fsdp=8'; got {args.only!r}, which no run has.")
    variants = [x for n in (2, 1, 0) for x in itertools.combinations(CHANGES, n)]
    found: dict[str, dict[str, Any]] = {}
    for name in tqdm(names, desc="runs", disable=None):
        before = losses(name, args.checkout.resolve())
        here = {" ".join(without): losses(name, ROOT, without) for without in variants}
        found[name] = {"before": before, "without": here}
    compared = {
        name: {without: difference(of, x["before"]) for without, of in x["without"].items()}
        for name, x in found.items()
    }
    holds = all(x[" ".join(CHANGES)] == "same" for x in compared.values())
    titles = [f"without {' and '.join(without)}" if without else "as it is" for without in variants]
    table = Table(
        "The recipes' losses, against those of another version",
        ["recipe, mesh", "steps", *titles],
        [[name, str(len(found[name]["before"])), *x.values()] for name, x in compared.items()],
        [
            f"Smoke sizes on 8 emulated devices; the other version is {commit(args.checkout)}. "
            "Same: the same floats at every step. Else the first step whose loss differs, and the "
            "largest relative difference of all steps.",
            f"{verdict(holds)}: without {' and '.join(CHANGES)}, all losses are the same.",
        ],
    )
    data = {"before": commit(args.checkout), "differences": compared, "losses": found}
    publish("same_losses", table, data, folder=args.out)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
