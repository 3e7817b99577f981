"""Whether the layers that programs repeat become loops: `config.fold_layers`, and what "auto" does.

"auto" makes loops on the platforms where those that are found took neither more time nor more
memory than layers one by one, as benchmarks/folded_steps.py measures it, and elsewhere none. So
far no platform is known where loops are as good.
"""

from typing import NamedTuple

from spmd_core.config import config
from spmd_core.runtime import devices


class Choice(NamedTuple):
    """What "auto" does on a platform.

    Attributes:
        folds: whether layers become loops.
        reason: why, in words.
    """

    folds: bool
    reason: str


_BY_PLATFORM = {
    "cpu": Choice(False, "steps of loops took up to 1.4 of the time of layers one by one there"),
    "tpu": Choice(False, "the time of a step has not been measured there"),
}
_ELSEWHERE = Choice(False, "neither time nor memory has been measured there")


def choice(platform: str) -> Choice:
    """What "auto" does on a platform, such as "cpu"."""
    return _BY_PLATFORM.get(platform, _ELSEWHERE)


def folds_layers() -> bool:
    """Whether repeated layers become loops in the programs that are recorded now."""
    setting = config.fold_layers
    return choice(devices.platform()).folds if setting == "auto" else bool(setting)


def explained() -> str:
    """What "auto" has chosen on this platform, and why; empty for another setting."""
    if config.fold_layers != "auto":
        return ""
    platform = devices.platform()
    chosen = choice(platform)
    what = "makes loops of repeated layers" if chosen.folds else "leaves layers one by one"
    return f'spmd.config.fold_layers = "auto" {what} on {platform}: {chosen.reason}.'
