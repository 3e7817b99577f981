"""The command line of the figures: options, the output folder, the runs, and the report."""

import argparse
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.published import report, runner
from benchmarks.published.figures import Figure
from benchmarks.published.rows import (
    Device,
    Measured,
    Scale,
    Settings,
    Store,
    VersionError,
    place,
)
from examples.training.knobs import KnobError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
RESULTS = Path("results")
_COUNT_GPUS = (
    "import jax; found = jax.devices('gpu'); print(len(found)); print(found[0].device_kind)"
)


def main(figures: Sequence[Figure], doc: str | None, argv: Sequence[str] | None = None) -> int:
    """Measures the figures and writes their report.

    Returns:
        0; 1 if a row failed; 2 for options that cannot work; 130 after Ctrl-C.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(figures, doc)
    options = parser.parse_args(given)
    try:
        chosen = _chosen(figures, options.only) if len(figures) > 1 else list(figures)
        settings, accelerator = _settings(options)
        store = Store(options.out or _folder(settings, accelerator), place(accelerator))
    except (KnobError, VersionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    rows = [row for figure in chosen for row in figure.rows(settings)]
    print(f"{len(rows)} rows, into {store.folder}", flush=True)
    interrupted = False
    try:
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            runner.run(rows, store)
    except KeyboardInterrupt:
        interrupted = True
    found = _report(figures, settings, store, is_alone=len(figures) == 1)
    if interrupted:
        words = [*given, *([] if options.out else ["--out", str(store.folder)])]
        print(f"interrupted; to go on: scripts/bench.sh {shlex.join(words)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    failed = [row for row in found if row.status == "failed"]
    if failed:
        names = "; ".join(f"{row.figure}, {row.name}" for row in failed)
        print(f"{len(failed)} rows failed, with reasons in the report: {names}", file=sys.stderr)
    return EXIT_FAILED if failed else 0


def alone(figure: Figure, doc: str | None) -> int:
    """The command line of one figure's file: prints its table, and writes rows and plots."""
    return main([figure], doc)


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Inside, the signals do what Ctrl-C does: no command goes on without its parent.

    A signal that is ignored stays so, as a hang-up does under nohup.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(
    figures: Sequence[Figure], settings: Settings, store: Store, *, is_alone: bool
) -> list[Measured]:
    """Shows what the folder has; returns its rows."""
    sections, found = [], []
    for figure in figures:
        known = [row for wanted in figure.rows(settings) if (row := store.known(wanted))]
        if not known:
            continue
        found += known
        sections.append(figure.section(settings, {row.name: row for row in known if row.runs}))
        sections[-1].table().show()
    if is_alone:
        report.draw(store.folder, sections)
    else:
        report.write(store.folder, sections, found, command=_command(settings))
        print(f"written: {store.folder}/report.html, report.md, results.json and the plots")
        print(f"TensorBoard: tensorboard --logdir {store.folder / 'tensorboard'}")
    return found


def _command(settings: Settings) -> str:
    words = ["scripts/bench.sh", f"--{settings.scale.value}"]
    words += ["--topology", settings.topology] if settings.topology else []
    words += ["--device", settings.device.value] if settings.device is not Device.EMULATED else []
    return " ".join(words)


def _chosen(figures: Sequence[Figure], only: str | None) -> list[Figure]:
    by_name = {figure.name: figure for figure in figures}
    names = [name.strip() for name in only.split(",")] if only else list(by_name)
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise KnobError(
            f"--only takes names of figures, with commas; got {', '.join(map(repr, unknown))}. "
            f"Choose among {', '.join(by_name)}."
        )
    return [by_name[name] for name in by_name if name in names]


def _settings(options: argparse.Namespace) -> tuple[Settings, str | None]:
    """What was chosen, and the name of the GPUs."""
    if options.topology:
        _check_topology(options.topology)
    device, num_devices, accelerator = Device(options.device), 0, None
    if device is Device.CUDA:
        num_devices, accelerator = _gpus()
    scale = Scale.FULL if options.full else Scale.QUICK
    return Settings(scale, device, num_devices, options.topology or ""), accelerator


def _check_topology(name: str) -> None:
    """Raises KnobError if programs cannot be compiled for the topology."""
    # Slow to import, and only --topology needs it.
    from spmd_core.errors import PlanError  # noqa: PLC0415
    from spmd_core.planner.topology_names import parse  # noqa: PLC0415

    try:
        parsed = parse(name)
    except PlanError as error:
        raise KnobError(f"--topology: {error}") from error
    if parsed.platform != "tpu":
        raise KnobError(
            f"--topology names the TPUs to compile for; got {name!r}, which are CPUs. Pass for "
            "instance v4-16; without it, programs are compiled for emulated CPU devices."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise KnobError(
            f"--topology {name} compiles with the TPU's compiler, the package libtpu; got none. "
            "Run: pip install 'spmd-core[tpu]'"
        )


def _gpus() -> tuple[int, str]:
    """The GPUs that jax has, from a process that ends: the runs need the devices themselves."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise KnobError(
            f"--device cuda needs a GPU that jax finds; got {last!r}. Install jax for it, as in "
            "pip install 'jax[cuda12]', or leave the option out: emulated CPU devices compute."
        )
    number, kind = done.stdout.splitlines()[-2:]
    return int(number), kind


def _folder(settings: Settings, accelerator: str | None) -> Path:
    """The default: results/<date>-<hardware>."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = accelerator or f"{platform.machine()}-{cores}-cores"
    words = "".join(c if c.isalnum() else "-" for c in hardware.lower()).split("-")
    name = "-".join([time.strftime("%Y-%m-%d"), *filter(None, words)])
    return RESULTS / (f"{name}-{settings.topology}" if settings.topology else name)


def _parser(figures: Sequence[Figure], doc: str | None) -> argparse.ArgumentParser:
    module = "benchmarks.published" + (f".{figures[0].name}" if len(figures) == 1 else "")
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument(
        "--quick", action="store_true", help="everything in small, about 10 minutes (the default)"
    )
    scale.add_argument("--full", action="store_true", help="larger models, more repeats: hours")
    if len(figures) > 1:
        names = ",".join(figure.name for figure in figures)
        parser.add_argument("--only", metavar="NAMES", help=f"some figures, of {names}")
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="hbm and resnet by compilation for TPUs that are not there, such as v4-16",
    )
    parser.add_argument(
        "--device",
        choices=[device.value for device in Device],
        default=Device.EMULATED.value,
        help="emulated: CPU devices; cuda: the GPUs of this machine (default: emulated)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write, and to go on after an interruption (default: "
        "results/<date>-<hardware>)",
    )
    return parser
