"""Compares the strategies of a GPT-2 run, each on the meshes that it takes.

    python -m examples.gpt2.comparison --smoke --devices 8

It trains by every strategy in turn, each in a process of its own, and writes a table and a plot of
losses, memory and collectives. The options are those of `examples.gpt2.train`.
"""

from examples.gpt2.config import config_from
from examples.training.knobs import KnobError, begin_command, check_ranges

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    begin_command(
        lambda: check_ranges(config_from(None, usage=__doc__, module="examples.gpt2.comparison"))
    )

import sys
from pathlib import Path

from examples.gpt2 import shardings
from examples.training.command import exit_code
from examples.training.compare import CompareError, Variant, compare, num_real_devices

FOLDER = Path("results/gpt2_strategies")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    given = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: compare_strategies(given), failed=(CompareError,))


def compare_strategies(argv: list[str]) -> None:
    """Runs every strategy on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there is one device.
        CompareError: a run failed.
    """
    config = config_from(argv)
    chosen = {"mesh": config.mesh, "results": config.results, "log-dir": config.log_dir}
    given = [f"--{name}" for name, value in chosen.items() if value]
    if given or config.strategy != "spmd" or config.device == "cpu":
        raise KnobError(
            "a comparison chooses --mesh, --strategy, --results, --log-dir and --device itself; "
            f"got {', '.join(given) or 'another --strategy or --device'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    if num_devices < 2:
        raise KnobError(
            f"a comparison needs at least two devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(f"{strategy} {mesh}", options(num_devices, "--strategy", strategy, "--mesh", mesh))
        for strategy, mesh in shardings.compared(num_devices)
    ]
    compare("examples.gpt2.train", variants, common=argv, folder=FOLDER)


if __name__ == "__main__":
    sys.exit(main())
