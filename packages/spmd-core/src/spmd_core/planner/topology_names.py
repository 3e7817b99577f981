"""The names of topologies: Google Cloud's (v4-16), libtpu's (v4:2x2x2), and cpu-64.

The sizes are from the page of each TPU version in Google Cloud's documentation. The number in a
name counts TensorCores for v3, v4 and v5p, with two to a chip, and chips for v5e and v6e.
"""

import difflib
import math
import re
from dataclasses import dataclass

from spmd_core.chips import MAX_EMULATED_DEVICES
from spmd_core.errors import PlanError


@dataclass(frozen=True)
class _Version:
    """How the topologies of one TPU version are named and shaped.

    Attributes:
        name: libtpu's name of the version.
        cores_per_chip: how many units of the number in Google Cloud's name are one chip.
        num_dims: the number of dims of the torus.
        max_chips: the most chips of one slice.
        chip_config: libtpu's name for one device per chip; None if that is its default.
    """

    name: str
    cores_per_chip: int
    num_dims: int
    max_chips: int
    chip_config: str | None = None


_VERSIONS = {
    "v3": _Version("v3", 2, 2, 1024),
    "v4": _Version("v4", 2, 3, 4096, "megacore"),
    "v5e": _Version("v5e", 1, 2, 256),
    "v5p": _Version("v5p", 2, 3, 6144),
    "v6e": _Version("v6e", 1, 2, 256),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e"}
_PEOPLE = re.compile(r"(?P<version>[a-z0-9]+)-(?P<number>\d+)")
_LIBTPU = re.compile(r"(?P<version>[a-z0-9]+):(?P<shape>\d+(?:x\d+)*)")
_MAX_CHIPS = 2**16


@dataclass(frozen=True)
class TopologyName:
    """What a topology's name says.

    Attributes:
        platform: `"tpu"` or `"cpu"`.
        shape: the chips in each dim of a slice's torus; for CPUs, their number.
        version: libtpu's name of the TPU version; empty for CPUs.
        chip_config: libtpu's name for one device per chip; None for its default.
        num_slices: the number of slices, joined by the data center's network.
    """

    platform: str
    shape: tuple[int, ...]
    version: str = ""
    chip_config: str | None = None
    num_slices: int = 1

    @property
    def num_chips(self) -> int:
        """The number of chips of all slices."""
        return math.prod(self.shape) * self.num_slices

    def __str__(self) -> str:
        if self.platform == "cpu":
            return f"cpu-{self.num_chips}"
        name = f"{self.version}:{'x'.join(map(str, self.shape))}"
        return name if self.num_slices == 1 else f"{self.num_slices} slices of {name}"


def parse(text: str, *, num_slices: int = 1) -> TopologyName:
    """The topology of a name.

    Args:
        text: `"v4-16"`, `"v5e-8"`, `"v4:2x2x2"`, `"cpu-64"`.
        num_slices: the number of slices.

    Raises:
        PlanError: there is no such topology; the message lists similar names.

    Example:
        >>> str(parse("v4-16")), parse("v5p-512").num_chips, parse("v6e-256").shape
        ('v4:2x2x2', 256, (16, 16))
    """
    if num_slices < 1:
        raise PlanError(
            f"a topology has at least one slice; got {num_slices}. Pass --slices 1 or more."
        )
    wanted = text.strip().lower().removeprefix("tpu-")
    by_people, by_libtpu = _PEOPLE.fullmatch(wanted), _LIBTPU.fullmatch(wanted)
    if by_people is not None and by_people["version"] == "cpu":
        return _cpus(text, int(by_people["number"]), num_slices)
    match = by_people or by_libtpu
    name = match["version"] if match else ""
    version = _VERSIONS.get(_ALIASES.get(name, name))
    shape = None
    if version is not None and by_people is not None:
        chips, rest = divmod(int(by_people["number"]), version.cores_per_chip)
        shape = None if rest else _shapes(version).get(chips)
    elif version is not None and by_libtpu is not None:
        dims = tuple(int(n) for n in by_libtpu["shape"].split("x"))
        if len(dims) == version.num_dims and 0 < math.prod(dims) <= version.max_chips:
            shape = dims
    if version is None or shape is None:
        raise PlanError(
            "a topology has a name such as v4-16 (TensorCores up to v5p, chips from v5e on), "
            f"libtpu's v4:2x2x2, or cpu-64; got {text!r}. Similar names: "
            f"{', '.join(_near(wanted, version))}."
        )
    if math.prod(shape) * num_slices > _MAX_CHIPS:
        raise PlanError(
            f"a topology has at most {_MAX_CHIPS} chips; got {num_slices} slices of "
            f"{math.prod(shape)}. Pass --slices {_MAX_CHIPS // math.prod(shape)} or fewer."
        )
    return TopologyName("tpu", shape, version.name, version.chip_config, num_slices)


def _cpus(text: str, number: int, num_slices: int) -> TopologyName:
    if not 0 < number <= MAX_EMULATED_DEVICES or num_slices > 1:
        raise PlanError(
            f"emulated devices are one slice of 1 to {MAX_EMULATED_DEVICES}; got {text!r} in "
            f"{num_slices} slice(s). Write for instance cpu-64, without "
            "--slices."
        )
    return TopologyName("cpu", (number,))


def _shapes(version: _Version) -> dict[int, tuple[int, ...]]:
    """The usual torus for each number of chips: powers of two, as close to a cube as possible.

    Example:
        >>> [_shapes(_VERSIONS["v4"])[n] for n in (4, 8, 64, 256)]
        [(2, 2, 1), (2, 2, 2), (4, 4, 4), (4, 8, 8)]
    """
    shapes = {}
    chips = 1
    while chips <= version.max_chips:
        exponent, dims = chips.bit_length() - 1, []
        for left in range(version.num_dims, 0, -1):
            dims.append(2 ** (exponent // left))
            exponent -= exponent // left
        # A host has 2 x 2 chips, so libtpu expects a dim of size 1 last.
        shapes[chips] = tuple(dims) if 1 not in dims else tuple(sorted(dims, reverse=True))
        chips *= 2
    if version.num_dims == 3:
        shapes = {n: shape for n, shape in shapes.items() if n == 1 or n >= 4}
    else:
        shapes = {n: shape for n, shape in shapes.items() if n != 2}
    return shapes


def _near(wanted: str, version: _Version | None) -> list[str]:
    """Existing names, the nearest first; of this version, if it is known."""
    names = [
        f"{key}-{chips * v.cores_per_chip}"
        for key, v in _VERSIONS.items()
        if version in (None, v)
        for chips in _shapes(v)
    ]
    number = re.search(r"-(\d+)$", wanted)
    if version is not None and number is not None:
        size = max(int(number[1]), 1)
        return sorted(names, key=lambda name: abs(math.log(int(name.split("-")[1]) / size)))[:4]
    return difflib.get_close_matches(wanted, names, 4, 0.0)
