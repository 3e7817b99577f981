"""Where the data of a value lies: on which devices, under which mark."""

from typing import Any, ClassVar

from jax.sharding import NamedSharding

from spmd_core.sharding.sharding import Manual, Sharding


class Placement:
    """Where the data of a leaf lies; interned, so equality is identity.

    Attributes:
        jax_sharding: jax's sharding; None for data in host memory, which is uploaded when the first
            program needs it.
        sharding: the user's mark; None if there is none.
        manual: for a tensor that is local to a manual region, the region's axes; else None. The
            array then has one value for each position along those axes, stacked along an additional
            first dim.
        room: the padded shape of an array with capacity for more elements than the tensor has (see
            `program.growing_sizes`); else None. The tensor is its first elements in each dim.
    """

    __slots__ = ("jax_sharding", "manual", "room", "sharding")
    # Interned placements.
    # Guarded by: the GIL (`setdefault`). Cleared by: never, a cache.
    _known: ClassVar[dict[tuple[Any, ...], "Placement"]] = {}

    def __init__(
        self,
        jax_sharding: NamedSharding | None,
        sharding: Sharding | None,
        manual: Manual | None,
        room: tuple[int, ...] | None,
    ) -> None:
        self.jax_sharding, self.sharding, self.manual = jax_sharding, sharding, manual
        self.room = room

    @staticmethod
    def of(
        jax_sharding: NamedSharding | None,
        sharding: Sharding | None,
        manual: Manual | None = None,
        room: tuple[int, ...] | None = None,
    ) -> "Placement":
        key = (jax_sharding, sharding, manual, room)
        found = Placement._known.get(key)
        if found is None:
            found = Placement._known.setdefault(key, Placement(*key))
        return found

    def with_room(self, room: tuple[int, ...] | None) -> "Placement":
        """The placement with another padded shape; None for an array without padded capacity."""
        if room == self.room:
            return self
        return Placement.of(self.jax_sharding, self.sharding, self.manual, room)

    @property
    def device_sharding(self) -> NamedSharding:
        """`jax_sharding`, for a placement that is known to be in device memory."""
        assert self.jax_sharding is not None
        return self.jax_sharding

    def __repr__(self) -> str:
        return f"Placement({self.jax_sharding}, marked={self.sharding is not None})"
