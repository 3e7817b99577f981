"""Compares the plans of a Llama run, each on the meshes that it takes.

    python -m examples.llama_tp.comparison --smoke --devices 8

It trains by every plan in turn, each in a process of its own, and writes a table and a plot of
losses, memory and collectives. The options are those of `examples.llama_tp.train`.
"""

from examples.llama_tp.config import config_from
from examples.training.knobs import KnobError, begin_command, check_ranges

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    begin_command(
        lambda: check_ranges(
            config_from(None, usage=__doc__, module="examples.llama_tp.comparison")
        )
    )

import sys
from pathlib import Path

from examples.llama_tp import shardings
from examples.llama_tp.resolve import sizes
from examples.training.command import exit_code
from examples.training.compare import CompareError, Variant, compare, num_real_devices

FOLDER = Path("results/llama_plans")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    given = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: compare_plans(given), failed=(CompareError,))


def compare_plans(argv: list[str]) -> None:
    """Runs every plan on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there are too few
            devices.
        CompareError: a run failed.
    """
    config = config_from(argv)
    chosen = {
        "mesh": config.mesh,
        "sequence-parallel": config.sequence_parallel,
        "loss-parallel": config.loss_parallel,
        "results": config.results,
        "log-dir": config.log_dir,
        "export": config.export,
        "adapters": config.adapters,
    }
    given = [f"--{name}" for name, value in chosen.items() if value]
    if given or config.device == "cpu":
        raise KnobError(
            "a comparison chooses --mesh, the plans, --results, --log-dir and --device itself, and "
            f"writes no model; got {', '.join(given) or '--device cpu'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    meshes = shardings.compared(num_devices, sizes(config).num_heads)
    if not meshes:
        raise KnobError(
            f"a comparison needs an even number of devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(name, options(num_devices, "--mesh", mesh, *flags)) for name, mesh, flags in meshes
    ]
    compare("examples.llama_tp.train", variants, common=argv, folder=FOLDER)


if __name__ == "__main__":
    sys.exit(main())
