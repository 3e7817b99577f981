"""Compares the strategies of a GPT-2 run, each on the meshes that it takes."""

from collections.abc import Sequence
from pathlib import Path

from examples.gpt2 import shardings
from examples.gpt2.config import COMPARED, TrainConfig
from examples.training.command import num_real_devices
from examples.training.compare import Variant, compare
from examples.training.knobs import KnobError


def compare_strategies(config: TrainConfig, argv: Sequence[str]) -> None:
    """Runs every strategy on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there is one device.
        CompareError: a run failed.
    """
    chosen = {"mesh": config.mesh, "results": config.results, "log-dir": config.log_dir}
    given = [f"--{name}" for name, value in chosen.items() if value]
    if given or config.strategy != "spmd" or config.device == "cpu":
        raise KnobError(
            "--compare chooses --mesh, --strategy, --results, --log-dir and --device itself; got "
            f"{', '.join(given) or 'another --strategy or --device'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    if num_devices < 2:
        raise KnobError(
            f"--compare needs at least two devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(f"{strategy} {mesh}", options(num_devices, "--strategy", strategy, "--mesh", mesh))
        for strategy, mesh in shardings.compared(num_devices)
    ]
    common = [argument for argument in argv if argument != "--compare"]
    compare("examples.gpt2.train", variants, common=common, folder=Path(COMPARED))
