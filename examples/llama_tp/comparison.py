"""Compares the plans of a Llama run, each on the meshes that it takes."""

from collections.abc import Sequence
from pathlib import Path

from examples.llama_tp import shardings
from examples.llama_tp.config import COMPARED, TrainConfig
from examples.llama_tp.resolve import sizes
from examples.training.command import num_real_devices
from examples.training.compare import Variant, compare
from examples.training.knobs import KnobError


def compare_plans(config: TrainConfig, argv: Sequence[str]) -> None:
    """Runs every plan on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there are too few
            devices.
        CompareError: a run failed.
    """
    chosen = {"mesh": config.mesh, "results": config.results, "log-dir": config.log_dir}
    chosen |= {"export": config.export, "adapters": config.adapters}
    given = [f"--{name}" for name, value in chosen.items() if value]
    given += [name for name in ("--sequence-parallel", "--loss-parallel") if name in argv]
    if given or config.device == "cpu":
        raise KnobError(
            "--compare chooses --mesh, the plans, --results, --log-dir and --device itself, and "
            f"writes no model; got {', '.join(given) or '--device cpu'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    num_heads = sizes(config).num_heads
    meshes = shardings.compared(num_devices, num_heads)
    if not meshes:
        raise KnobError(
            f"--compare needs an even number of devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(name, options(num_devices, "--mesh", mesh, *flags)) for name, mesh, flags in meshes
    ]
    common = [argument for argument in argv if argument != "--compare"]
    compare("examples.llama_tp.train", variants, common=common, folder=Path(COMPARED))
