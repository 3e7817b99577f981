"""Whether the layers that programs repeat become loops: `config.fold_layers`, and what "auto" does.

"auto" makes loops where those that are found took neither more time nor more memory than layers
one by one, as benchmarks/folded_steps.py and compile_depth.py measure it, and elsewhere none.
"""

from typing import NamedTuple

from spmd_core.config import config
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import default_device_ids


class Choice(NamedTuple):
    """What "auto" does on a platform.

    Attributes:
        folds: whether layers become loops.
        reason: why, in words.
    """

    folds: bool
    reason: str


def choice(platform: str, num_devices: int) -> Choice:
    """What "auto" does on so many devices of a platform, such as "cpu"."""
    if platform == "cpu" and num_devices > 1:
        return Choice(
            True, "steps of loops took no more time and memory there than layers one by one"
        )
    if platform == "cpu":
        return Choice(False, "steps of loops took up to a quarter more time there")
    if platform == "tpu":
        return Choice(False, "the time of a step has not been measured there")
    return Choice(False, "neither time nor memory has been measured there")


def _chosen() -> Choice:
    return choice(devices.platform(), len(default_device_ids()))


def folds_layers() -> bool:
    """Whether repeated layers become loops in the programs that are recorded now."""
    setting = config.fold_layers
    return _chosen().folds if setting == "auto" else bool(setting)


def explained() -> str:
    """What "auto" has chosen on this platform, and why; empty for another setting."""
    if config.fold_layers != "auto":
        return ""
    chosen, several = _chosen(), len(default_device_ids()) > 1
    what = "makes loops of repeated layers" if chosen.folds else "leaves layers one by one"
    where = f"{'several devices' if several else 'one device'} of platform {devices.platform()}"
    return f'spmd.config.fold_layers = "auto" {what} on {where}: {chosen.reason}.'
