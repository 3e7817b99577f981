"""Where the data of a value lies: on which devices, under which mark."""

from typing import ClassVar

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
    """

    __slots__ = ("jax_sharding", "manual", "sharding")
    _known: ClassVar[
        dict[tuple[NamedSharding | None, Sharding | None, Manual | None], "Placement"]
    ] = {}

    def __init__(
        self, jax_sharding: NamedSharding | None, sharding: Sharding | None, manual: Manual | None
    ) -> None:
        self.jax_sharding, self.sharding, self.manual = jax_sharding, sharding, manual

    @staticmethod
    def of(
        jax_sharding: NamedSharding | None,
        sharding: Sharding | None,
        manual: Manual | None = None,
    ) -> "Placement":
        key = (jax_sharding, sharding, manual)
        found = Placement._known.get(key)
        if found is None:
            found = Placement._known.setdefault(key, Placement(jax_sharding, sharding, manual))
        return found

    @property
    def device_sharding(self) -> NamedSharding:
        """`jax_sharding`, for a placement that is known to be in device memory."""
        assert self.jax_sharding is not None
        return self.jax_sharding

    def __repr__(self) -> str:
        return f"Placement({self.jax_sharding}, marked={self.sharding is not None})"
