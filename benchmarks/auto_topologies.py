"""Are shardings that are found for TPUs that are not there as good as an expert's, by the compiler?

Published sizes of the models of `benchmarks.auto_models` are compiled for a topology with each of
the manual shardings and with those that `spmd.plan(..., auto=True)` finds. Compared are the
modelled time of a step (the roofline of FLOPs and memory by the data sheet, and then the
collectives, as if nothing overlapped them) and the peak memory of a device. Nothing runs.

    python -m benchmarks.auto_topologies --topology v4-16 gpt2:124M llama:1B

Each plan runs in a process of its own. Finished plans are kept in `--cache`. Seconds are those of
the wall, and in brackets of all CPU cores, for machines that do other work meanwhile.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    MODELS_BY_DEFAULT = ("gpt2:124M", "llama:1B", "resnet:224", "vit:B/16", "two_tower:5B")
    parser.add_argument("models", nargs="*", default=MODELS_BY_DEFAULT, metavar="MODEL:SIZE")
    parser.add_argument("--topology", default="v4-16", help="default: v4-16")
    parser.add_argument("--cache", type=Path, default=Path("build/auto_topologies"))
    parser.add_argument("--only", help="plan MODEL:SIZE:STRATEGY into the cache, and no more")
    parser.add_argument("--json", type=Path, help="where --only writes figures; for its process")
    args = parser.parse_args()

import resource
import sysconfig
import time

from tqdm import tqdm

import spmd_core as spmd
from benchmarks.auto_models import MODELS, mesh_of
from benchmarks.environment import commit
from spmd_core.auto.machine import Machine
from spmd_core.auto.tried import program_seconds
from spmd_core.planner.topology import find_topology

STRATEGIES = ("data", "fsdp", "fsdp_tensor")
AUTO = "auto"
LEAST_RATIO = 0.96


class _Searching(logging.Handler):
    """Takes the time from the first search to its first compilation, by what the search says.

    Attributes:
        seconds: by the wall; None without a search.
        cpu_s: of this process, which others on the machine lengthen less.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: float | None = None
        self.cpu_s: float | None = None
        self._start: tuple[float, float] | None = None
        log = logging.getLogger("spmd_core.auto")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith("searching shardings") and self._start is None:
            self._start = time.perf_counter(), time.process_time()
        elif said.startswith("compiling candidate 1") and self.seconds is None:
            assert self._start is not None
            self.seconds = time.perf_counter() - self._start[0]
            self.cpu_s = time.process_time() - self._start[1]


def planned(name: str, size: str, strategy: str, topology: str) -> dict[str, Any]:
    """The figures of one plan."""
    found = find_topology(topology)
    count = len(found.devices)

    def train() -> None:
        spmd.use_spmd()
        net, _, step, inputs = MODELS[name].build(size, "xla")
        if strategy != AUTO:
            MODELS[name].manual[strategy](net, inputs, mesh_of(strategy, count))
        spmd.sync()
        for _ in range(8):
            step(*inputs)
            spmd.sync()

    searching = _Searching()
    start, cpu_start_s = time.perf_counter(), _cpu_s()
    made = spmd.plan(train, topology=found, auto=strategy == AUTO)
    figures: dict[str, Any] = {
        "seconds": None,
        "peak_bytes": made.peak_bytes,
        "fits": made.fits is not False,
        "refusals": [_without_folders(text) for text in made.refusals],
        "plan_s": time.perf_counter() - start,
        "plan_cpu_s": _cpu_s() - cpu_start_s,
        "search_s": searching.seconds,
        "search_cpu_s": searching.cpu_s,
        "commit": commit(),
        "load": os.getloadavg(),
        "shardings": [found.text for found in made.shardings],
    }
    if made.step is not None:
        figures["seconds"] = program_seconds(made.step, Machine.of(found.devices))
        figures["sent"] = made.step.costs.ici_bytes + made.step.costs.dcn_bytes
        figures["mfu_bound"] = made.step.costs.mfu_bound
    return figures


def _cpu_s() -> float:
    """The CPU seconds of this process so far, and of those that it has begun and that ended."""
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def _without_folders(text: str) -> str:
    """A text that names files of this repository, and of packages, without where these lie."""
    for folder in (sysconfig.get_path("purelib"), str(Path.cwd())):
        text = text.replace(f"{folder}/", "")
    return text


def _run(name: str, size: str, strategy: str) -> dict[str, Any]:
    file = f"{name}-{size}-{strategy}.json".replace("/", "")
    path: Path = args.cache / args.topology / file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "figures.json"
            words = [sys.executable, "-m", "benchmarks.auto_topologies", "--json", str(made)]
            words += ["--only", f"{name}:{size}:{strategy}", "--topology", args.topology]
            said, peak = _watched(words)
            if made.exists():
                figures = json.loads(made.read_text())
            else:
                lines = [x for x in said.splitlines() if x.strip()] or ["no message"]
                figures = {"seconds": None, "fits": False, "refusals": lines[-1:]}
            path.write_text(json.dumps({**figures, "host_bytes": peak}))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _watched(words: list[str]) -> tuple[str, int]:
    """Runs a command.

    Returns:
        What it wrote to stderr; and the most bytes of memory that it and its children, such as
        compilers, had together, looked at twice a second.
    """
    peak = 0
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            while process.poll() is None:
                peak = max(peak, _tree_bytes(process.pid))
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        return stderr.read(), peak


def _tree_bytes(pid: int) -> int:
    """The bytes in memory of a process and of all below it; 0 if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        children = [
            int(x)
            for task in (folder / "task").iterdir()
            for x in (task / "children").read_text().split()
        ]
    except OSError:
        return 0
    return pages * resource.getpagesize() + sum(map(_tree_bytes, children))


def _row(name: str, of: dict[str, dict[str, Any]]) -> list[str]:
    fitting = {s: of[s] for s in STRATEGIES if of[s]["seconds"] is not None and of[s]["fits"]}
    best = min(fitting, key=lambda s: fitting[s]["seconds"], default=None)
    auto = of[AUTO]
    cells = [name]
    if best is None or auto["seconds"] is None:
        return [*cells, *("-" if x is None else "fits" for x in (auto["seconds"], best)), *"------"]
    return [
        *cells,
        f"{auto['seconds'] * 1e3:,.1f} ms",
        f"{best}: {fitting[best]['seconds'] * 1e3:,.1f} ms",
        f"{fitting[best]['seconds'] / auto['seconds']:.2f}",
        f"{auto['peak_bytes'] / 1e9:,.2f} GB",
        f"{fitting[best]['peak_bytes'] / 1e9:,.2f} GB",
        _times(auto, "search"),
        _times(auto, "plan"),
        "-" if auto.get("host_bytes") is None else f"{auto['host_bytes'] / 1e9:,.1f} GB",
    ]


def _times(of: dict[str, Any], what: str) -> str:
    """The seconds by the wall, and of the CPU where they were noted."""
    wall, cpu = of.get(f"{what}_s"), of.get(f"{what}_cpu_s")
    if wall is None:
        return "-"
    return f"{wall:,.0f} s" if cpu is None else f"{wall:,.0f} s ({cpu:,.0f})"


def main() -> None:
    if args.only:
        name, size, strategy = args.only.split(":")
        if args.json:
            args.json.write_text(json.dumps(planned(name, size, strategy, args.topology)))
        else:
            _run(name, size, strategy)
        return
    pairs = [model.split(":") for model in args.models]
    turns = [(name, size, s) for name, size in pairs for s in (*STRATEGIES, AUTO)]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, size, strategy in tqdm(turns, desc="plans", disable=None):
        found.setdefault(f"{name} {size}", {})[strategy] = _run(name, size, strategy)
    ratios, lost = [], []
    for name, of in found.items():
        manual = [of[s] for s in STRATEGIES if of[s]["seconds"] is not None and of[s]["fits"]]
        if manual and (of[AUTO]["seconds"] is None or not of[AUTO]["fits"]):
            lost.append(name)
        elif manual:
            ratios.append(min(x["seconds"] for x in manual) / of[AUTO]["seconds"])
    notes = [
        f"{verdict(bool(ratios) and min(ratios) >= LEAST_RATIO)}: the least rate of automatic "
        f"shardings over the best manual ones is {min(ratios, default=0):.2f}, at least "
        f"{LEAST_RATIO} asked; {sum(x > 1.0 for x in ratios)} of {len(ratios)} are better.",
        f"{verdict(not lost)}: what fits by hand fits automatically, too"
        + (f"; not {', '.join(lost)}." if lost else "."),
    ]
    columns = (
        "model", "step, modelled", "best manual", "rate", "peak", "its peak", "search (CPU)",
        "whole plan (CPU)", "host memory",
    )  # fmt: skip
    known = [x for of in found.values() for x in of.values() if "commit" in x]
    if known:
        notes.append(
            f"{len(known)} of {len(turns)} plans were made at commits "
            f"{', '.join(sorted({x['commit'] for x in known}))}, with up to "
            f"{max(x['load'][0] for x in known):.0f} processes that wanted to run on "
            f"{os.cpu_count()} cores; of the others none was noted."
        )
    rows = [_row(name, of) for name, of in found.items()]
    title = f"Automatic shardings compiled for {args.topology}; times are modelled"
    publish(
        f"auto_topologies_{args.topology}",
        Table(title, columns, rows, notes),
        {"models": found},
        folder=args.out,
    )


if __name__ == "__main__":
    main()
