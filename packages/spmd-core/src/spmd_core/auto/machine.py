"""What devices do in a second, for the search's model: FLOPs, memory and collectives by axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from spmd_core.chips import chip_of

# For emulated devices, which share a host's cores and memory: what one of eight does on two cores
# of a server, within a factor of two. Only the ratios decide, and they differ little among hosts.
# Collectives were timed on 1 and 4 MB: a reduction that scatters takes 1.6 times as long as an
# all-gather of as many bytes.
_CPU_FLOPS, _CPU_MEMORY, _CPU_LINKS, _CPU_LATENCY_S = 1.2e10, 3e9, 1.4e9, 2e-4
_CPU_SCATTERS = 1.6
_LATENCY_S = 4e-6  # of a collective between neighbours
_GPU_NETWORK = 25e9  # bytes/s of a GPU's share of its host's network; makers state none


@dataclass(frozen=True)
class Machine:
    """The devices of a search; all figures are of one device.

    Attributes:
        name: of the device's kind.
        num_devices: how many there are.
        flops: FLOP/s.
        memory_bytes_per_s: bandwidth of its memory.
        links_bytes_per_s: bandwidth to the other devices of its slice, or host.
        network_bytes_per_s: bandwidth to other slices.
        latency_s: seconds that a collective takes at least.
        memory_bytes: its memory; None if the host's memory is shared.
        slices: the number of each device's slice, in the order of device ids.
        scatters: how much longer a reduce-scatter takes than an all-gather of the same bytes.
        tile: the size along a dim of a matrix below which a product does not become faster: that
            of a matrix unit, or of a register block.
    """

    name: str
    num_devices: int
    flops: float
    memory_bytes_per_s: float
    links_bytes_per_s: float
    network_bytes_per_s: float
    latency_s: float
    memory_bytes: int | None
    slices: tuple[int, ...]
    scatters: float = 1.0
    tile: int = 8

    @staticmethod
    def of(devices: tuple[jax.Device, ...]) -> "Machine":
        """The machine of these devices, by the data sheet of their chip (`chips`)."""
        kind = devices[0].device_kind
        slices = tuple(getattr(device, "slice_index", 0) for device in devices)
        chip = chip_of(kind)
        if chip is None:
            figures = (_CPU_FLOPS, _CPU_MEMORY, _CPU_LINKS, _CPU_LINKS, _CPU_LATENCY_S)
            return Machine(kind, len(devices), *figures, None, slices, _CPU_SCATTERS)
        share = chip.devices_per_chip
        links = chip.links_bytes_per_s / share
        network = (chip.dcn_bytes_per_s or _GPU_NETWORK) / share
        memory = (chip.usable_hbm_bytes or chip.hbm_bytes) // share
        return Machine(
            kind,
            len(devices),
            chip.peak_flops / share,
            chip.hbm_bytes_per_s / share,
            links,
            network,
            _LATENCY_S,
            memory,
            slices,
            1.0,
            128 if kind.startswith("TPU") else 64,
        )

    def counting_bytes(self) -> "Machine":
        """A machine on which modelled seconds are the bytes that a device sends."""
        return replace(
            self,
            flops=math.inf,
            memory_bytes_per_s=math.inf,
            links_bytes_per_s=1.0,
            network_bytes_per_s=1.0,
            scatters=1.0,
            latency_s=0.0,
        )

    def crossing(self, mesh_shape: Sequence[int], ids: Sequence[int]) -> tuple[bool, ...]:
        """For each axis of a mesh whether devices along it are of different slices.

        Args:
            mesh_shape: the sizes of the axes.
            ids: the mesh's devices, row by row.
        """
        grid = np.array([self.slices[i] for i in ids]).reshape(mesh_shape)
        return tuple(bool((grid != grid.take([0], axis)).any()) for axis in range(grid.ndim))

    def bandwidth(self, *, crosses: bool) -> float:
        """Bytes/s that a device sends along an axis, by whether that is between slices."""
        return self.network_bytes_per_s if crosses else self.links_bytes_per_s
