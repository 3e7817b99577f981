"""Which devices take part in the collectives of a TPU program, also over several slices.

The module of such a program is that of one slice. It numbers the slice's devices in the program's
order, and every slice has the same groups. Data goes between slices by transfers of the hosts,
whose targets name slices or jax's device ids.
"""

import re
from collections.abc import Sequence

import jax

from spmd_core.sharding.xla_text import ints

Groups = tuple[tuple[int, ...], ...]

# Slices, counted from 1, times devices of a slice: "{1,2}x{0:3}".
_PRODUCT = re.compile(r'^"?\{(?P<slices>[\d,:]+)\}x\{(?P<members>[\d,:]+)\}"?$')
_GROUP = re.compile(r"\{(?P<ids>\d[\d,\s]*)\}")
_PAIR = re.compile(r"\{(?P<source>\d+)->(?P<target>\d+)\}")


class SliceNumbers:
    """How a compiled module numbers a program's devices.

    Args:
        devices: jax's, in the program's order.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._ids = [device.id for device in devices]
        slices: dict[int, list[int]] = {}
        for position, device in enumerate(devices):
            is_tpu = device.platform == "tpu"
            number = int(getattr(device, "slice_index", None) or 0) if is_tpu else 0
            slices.setdefault(number, []).append(position)
        self._slices = [slices[number] for number in sorted(slices)]

    @property
    def num_devices(self) -> int:
        """The number of devices that the module numbers: those of a slice."""
        return len(self._slices[0])

    def inside(self, groups: Groups) -> Groups | None:
        """The positions of groups inside of a slice, in all slices.

        Args:
            groups: of the module's numbers; for a permute (source, target) pairs.

        Returns:
            None if a number is not that of a device of the slice.
        """
        if any(number >= self.num_devices for group in groups for number in group):
            return None
        return tuple(
            tuple(positions[number] for number in group)
            for positions in self._slices
            for group in groups
        )

    def between(self, target: str) -> Groups | None:
        """The positions of the groups of a transfer between slices.

        Args:
            target: XLA's text. It lists groups of jax's ids (pairs for a permute), or slices: then
                there is a group for each device of a slice, with its counterparts in other slices.

        Returns:
            None if the text has an unknown form, or names other devices.
        """
        product = _PRODUCT.match(target)
        try:
            if product is not None:
                chosen = [self._by_id(number - 1) for number in _numbers(product["slices"])]
                members = _numbers(product["members"])
                return tuple(tuple(of[member] for of in chosen) for member in members)
            pairs = _PAIR.finditer(target)
            found = [ints(group["ids"]) for group in _GROUP.finditer(target)]
            found += [(int(pair["source"]), int(pair["target"])) for pair in pairs]
            groups = tuple(tuple(self._ids.index(i) for i in group) for group in found)
        except (IndexError, ValueError):
            return None
        return groups or None

    def _by_id(self, number: int) -> list[int]:
        """The positions of a slice's devices, by jax's id.

        Raises:
            IndexError: there is no such slice.
        """
        if number < 0:
            raise IndexError(number)
        return sorted(self._slices[number], key=lambda position: self._ids[position])


def _numbers(text: str) -> list[int]:
    """The numbers of a list with ranges, such as "0:3" or "0,2"."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        found += range(int(first), int(last) + 1) if colon else [int(first)]
    return found
