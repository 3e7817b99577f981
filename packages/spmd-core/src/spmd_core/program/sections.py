"""Kernels that reorder a dim of several sections between its original order and device order.

Each section of the dim, such as queries, is split evenly over a mesh axis. In the original order, a
device has a contiguous block of the dim. In device order, its block consists of its parts of all
sections.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core import dtypes
from spmd_core.graph.values import Spec
from spmd_core.program.ir import InsertedEntry, inserted
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh

# The most chunks into which a device slices its block.
_MOST_CHUNKS = 64


@dataclass(frozen=True)
class Exchange:
    """How devices send equal chunks of their blocks to each other.

    In each round, all devices send the same number of chunks, each to one device, maybe itself.

    Attributes:
        sent: for each device, its chunks in the order in which it sends them.
        rounds: for each round, the number of chunks that a device sends, and the receiver of each
            sender.
        placed: for each device and each place of its new block, the number of the chunk among those
            that it receives.
    """

    sent: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[int, tuple[int, ...]], ...]
    placed: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(counts: Sequence[int], num_devices: int) -> "Exchange":
        """The exchange from the original order to device order.

        Args:
            counts: for each section, the number of chunks that belong to one device.
            num_devices: the number of devices along the axis.
        """
        devices, num_own = range(num_devices), sum(counts)
        starts = accumulate((count * num_devices for count in counts), initial=0)
        wanted = [
            [start + device * count + i for start, count in bounds for i in range(count)]
            for bounds in [[*zip(starts, counts)]]
            for device in devices
        ]
        pending: list[list[list[int]]] = [[[] for _ in devices] for _ in devices]
        for receiver, chunks in enumerate(wanted):
            for chunk in chunks:
                pending[chunk // num_own][receiver].append(chunk)
        left = np.array([[len(chunks) for chunks in own] for own in pending])
        sent: list[list[int]] = [[] for _ in devices]
        received: list[list[int]] = [[] for _ in devices]
        rounds = []
        while left.any():
            stays = left.diagonal().all()
            receivers = tuple(devices) if stays else _receivers(left)
            num = min(int(left[pair]) for pair in enumerate(receivers))
            rounds.append((num, receivers))
            for sender, receiver in enumerate(receivers):
                chunks, pending[sender][receiver] = (
                    pending[sender][receiver][:num],
                    pending[sender][receiver][num:],
                )
                left[sender, receiver] -= num
                sent[sender] += [chunk % num_own for chunk in chunks]
                received[receiver] += chunks
        placed = [tuple(map(received[d].index, wanted[d])) for d in devices]
        return Exchange(tuple(map(tuple, sent)), tuple(rounds), tuple(placed))

    @cached_property
    def reversed(self) -> "Exchange":
        """The exchange from device order to the original order."""
        rounds = tuple((num, _inverse(receivers)) for num, receivers in self.rounds)
        return Exchange(tuple(map(_inverse, self.placed)), rounds, tuple(map(_inverse, self.sent)))

    def __call__(self, block: jax.Array, dim: int, axis: str, device: jax.Array) -> jax.Array:
        """Inside a manual region over an axis: the new block of the device at this position."""
        size = block.shape[dim] // len(self.sent[0])
        sending, received, start = _arranged(block, self.sent, device, dim), [], 0
        for num, receivers in self.rounds:
            chunks = lax.slice_in_dim(sending, start * size, (start + num) * size, axis=dim)
            stays = receivers == tuple(range(len(receivers)))
            received.append(
                chunks if stays else lax.ppermute(chunks, axis, [*enumerate(receivers)])
            )
            start += num
        return _arranged(jnp.concatenate(received, dim), self.placed, device, dim)


def _receivers(left: np.ndarray) -> tuple[int, ...]:
    """A different receiver for each sender, which still has chunks for it: a perfect matching.

    It exists because all devices still have the same number of chunks to send and to receive.
    """
    senders: dict[int, int] = {}

    def is_served(sender: int, tried: set[int]) -> bool:
        for receiver in map(int, np.flatnonzero(left[sender])):
            if receiver not in tried:
                tried.add(receiver)
                if receiver not in senders or is_served(senders[receiver], tried):
                    senders[receiver] = sender
                    return True
        return False

    assert all(is_served(sender, set()) for sender in range(len(left)))
    return _inverse([senders[receiver] for receiver in range(len(left))])


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(order))


def _arranged(
    block: jax.Array, orders: Sequence[Sequence[int]], device: jax.Array, dim: int
) -> jax.Array:
    """The chunks of a block, in this device's order."""
    size = block.shape[dim] // len(orders[0])
    if all(tuple(order) == tuple(range(len(order))) for order in orders):
        return block
    starts = jnp.asarray(np.asarray(orders, np.int32) * size)[device]
    chunks = [
        lax.dynamic_slice_in_dim(block, starts[i], size, axis=dim) for i in range(len(orders[0]))
    ]
    return jnp.concatenate(chunks, dim)


@dataclass(frozen=True)
class Sections:
    """Sections of a dim, each of which a mesh axis splits evenly.

    Attributes:
        mesh: the mesh.
        axis: the number of the axis.
        sizes: the global sizes of the sections.
    """

    mesh: Mesh
    axis: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh, axis: int, sizes: Sequence[int]) -> "Sections | None":
        """The sections; None if the axis splits one unevenly, or there are too many chunks."""
        found = Sections(mesh, axis, tuple(sizes))
        num = mesh.mesh_shape[axis]
        if len(sizes) < 2 or 0 in sizes or any(size % num for size in sizes):
            return None
        return found if sum(found._counts) <= _MOST_CHUNKS else None

    @cached_property
    def indices(self) -> tuple[range, ...]:
        """The indices of each section in the dim."""
        return tuple(range(*each) for each in pairwise(accumulate(self.sizes, initial=0)))

    @property
    def _counts(self) -> tuple[int, ...]:
        """For each section, the number of equal chunks that one device has."""
        unit = math.gcd(*self.sizes)
        return tuple(size // unit for size in self.sizes)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange from the original order to device order."""
        return Exchange.of(self._counts, self.mesh.mesh_shape[self.axis])

    def order(self, dim: int, spec: Spec) -> InsertedEntry:
        """The operation that puts a dim of a value into device order."""
        function = self._traced(_ordered, dim)
        return inserted("spmd::order_sections", lambda inputs: function(inputs[0]), spec.logical)

    def restore(self, dim: int, spec: Spec) -> InsertedEntry:
        """The operation that restores the original order."""
        function = self._traced(_restored, dim)
        return inserted("spmd::restore_sections", lambda inputs: function(inputs[0]), spec.logical)

    def cut(self, dim: int, spec: Spec) -> InsertedEntry:
        """The operation that slices a value in device order into its sections."""
        function = self._traced(_cut, dim)
        shapes = [(*spec.shape[:dim], size, *spec.shape[dim + 1 :]) for size in self.sizes]
        outs = tuple(Spec.contiguous(shape, spec.dtype) for shape in shapes)
        return InsertedEntry(
            "spmd::cut_sections", lambda context, inputs, numbers: function(inputs[0]), outs
        )

    def join(self, dim: int, spec: Spec) -> InsertedEntry:
        """The operation that concatenates sections to a value in device order."""
        function, dtype = self._traced(_joined, dim), dtypes.to_jax(spec.dtype)

        def joined(inputs: Sequence[jax.Array]) -> jax.Array:
            total: jax.Array = function(*(x.astype(dtype) for x in inputs))
            return total

        return inserted("spmd::join_sections", joined, spec.logical)

    def _traced(self, kernel: Callable[..., Any], dim: int) -> Callable[..., Any]:
        """A kernel in a manual region over the axis. jax traces it once for all layers."""
        known = self._functions.get((kernel, dim))
        if known is not None:
            return known
        name = jax_axis_names(self.mesh)[self.axis]
        split = PartitionSpec(*(None,) * dim, name)

        def on_device(positions: jax.Array, blocks: Sequence[jax.Array]) -> Any:
            return kernel(self, dim, name, positions[0], *blocks)

        mapped = jax.shard_map(
            on_device,
            mesh=jax_mesh(self.mesh),
            in_specs=(PartitionSpec(name), split),
            out_specs=split,
            axis_names={name},
            check_vma=False,
        )

        def function(*blocks: jax.Array) -> Any:
            # `lax.axis_index` would make a region of its own inside of this one, and XLA may refuse
            # what is left of it ("PartitionId instruction is not supported").
            return mapped(jnp.arange(self.mesh.mesh_shape[self.axis], dtype=np.int32), blocks)

        return self._functions.setdefault((kernel, dim), jax.jit(function))

    @cached_property
    def _functions(self) -> dict[tuple[Callable[..., Any], int], Callable[..., Any]]:
        return {}


# Inside a manual region over the axis `name`, on the device at a position along it.


def _ordered(
    sections: Sections, dim: int, name: str, device: jax.Array, block: jax.Array
) -> jax.Array:
    return sections.exchange(block, dim, name, device)


def _restored(
    sections: Sections, dim: int, name: str, device: jax.Array, block: jax.Array
) -> jax.Array:
    return sections.exchange.reversed(block, dim, name, device)


def _cut(
    sections: Sections, dim: int, name: str, device: jax.Array, block: jax.Array
) -> list[jax.Array]:
    num = sections.mesh.mesh_shape[sections.axis]
    bounds = pairwise(accumulate((size // num for size in sections.sizes), initial=0))
    return [lax.slice_in_dim(block, *each, axis=dim) for each in bounds]


def _joined(
    sections: Sections, dim: int, name: str, device: jax.Array, *blocks: jax.Array
) -> jax.Array:
    return jnp.concatenate(blocks, dim)
