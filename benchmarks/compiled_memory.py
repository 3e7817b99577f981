"""Reads from a compiled program what a device holds; and names devices to compile for.

Devices of a TPU that is not there come from libtpu's ahead-of-time compiler.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from examples.training.knobs import KnobError


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory, as XLA's `memory_analysis` gives them.

    Attributes:
        arguments: parameters, optimizer state and batch.
        results: results that do not take over an argument's memory.
        temporaries: gradients, activations, and what lies between buffers that were given away.
        live: the most bytes that are in use at one time, by the compiler's live ranges. Without
            what the layout of buffers wastes, so it is at most the sum of the other three.
    """

    arguments: int
    results: int
    temporaries: int
    live: int

    @property
    def peak(self) -> int:
        """What the program needs: arguments, own results and temporaries.

        The figure to compare: a device must have this many bytes, whereas `live` leaves out the
        gaps between the buffers.
        """
        return self.arguments + self.results + self.temporaries

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """The memory of a program that jax compiled."""
        found = compiled.memory_analysis()
        return cls(
            found.argument_size_in_bytes,
            found.output_size_in_bytes - found.alias_size_in_bytes,
            found.temp_size_in_bytes,
            found.peak_memory_in_bytes,
        )


def topology_devices(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology by libtpu's name, `v4:2x2x1` for four chips.

    Raises:
        KnobError: libtpu is not installed, or it does not know the name.
    """
    # libtpu reads them as it starts. The first saves a question to a server that is not there; the
    # second lets several processes compile, as none uses a TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # Not at the top: it needs libtpu, which only compilation for TPUs does.
    from jax.experimental import topologies  # noqa: PLC0415

    # One device of a v4 or v5p chip; without it, two.
    config = {"chip_config_name": "megacore"} if topology.startswith(("v4", "v5p")) else {}
    try:
        devices: Sequence[Any] = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **config
        ).devices
    except Exception as error:  # jax raises several classes here
        raise KnobError(
            f"--topology takes a name that libtpu knows, such as v4:2x2x1; got {topology!r}: "
            f"{str(error).splitlines()[0]} Correct it, or pip install libtpu if it is missing."
        ) from error
    return devices


def emulated_devices(number: int) -> Sequence[Any]:
    """Emulated devices of this host's CPU. Call it before the first use of a device.

    Raises:
        KnobError: jax has started with fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # jax has started: what it has may do
        jax.config.update("jax_num_cpu_devices", number)
    if jax.device_count() < number:
        raise KnobError(
            f"the mesh needs {number} devices; jax has started with {jax.device_count()}. Run this "
            "in a process of its own."
        )
    return jax.devices()
