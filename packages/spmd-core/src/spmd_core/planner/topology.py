"""The devices of a topology that need not exist, and the data sheet of its chips."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
from jaxlib import xla_client

from spmd_core import releases
from spmd_core.chips import Chip, chip_of
from spmd_core.errors import PlanError
from spmd_core.planner.topology_names import TopologyName, parse
from spmd_core.runtime import devices

_topologies = releases.jax_module("jax.experimental.topologies", "get_topology_desc")


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
        name: as given, or in libtpu's form.
        devices: the jax devices, in the order of their ids.
        chip: the chip's data sheet; None for CPUs.
        request: the arguments of jax's `get_topology_desc` for it; None for CPUs.
    """

    name: str
    devices: tuple[jax.Device, ...]
    chip: Chip | None
    request: Mapping[str, object] | None = None

    @property
    def hbm_bytes(self) -> int | None:
        """The bytes of one device's memory for programs; None for CPUs, which share the host's."""
        if self.chip is None:
            return None
        usable = self.chip.usable_hbm_bytes or self.chip.hbm_bytes
        return usable // self.chip.devices_per_chip

    @property
    def peak_flops(self) -> float | None:
        """The peak FLOP/s of one device in bf16; None for CPUs."""
        return None if self.chip is None else self.chip.peak_flops / self.chip.devices_per_chip


def find_topology(name: str, *, num_slices: int = 1) -> Topology:
    """The topology of this name (see `topology_names.parse`).

    Starts a compiler, and no device; for CPUs, starts jax's emulated devices unless they run.

    Raises:
        PlanError: there is no such topology, or libtpu is not installed, or refuses it.
    """
    parsed = parse(name, num_slices=num_slices)
    request = None if parsed.platform == "cpu" else _request(parsed)
    found = _cpus(parsed) if request is None else _tpus(parsed, request)
    found = tuple(sorted(found, key=lambda device: device.id))
    return Topology(str(parsed), found, chip_of(found[0].device_kind), request)


def present() -> Topology:
    """The devices of this process's runtime; starts them."""
    found = devices.all_devices()
    kind = found[0].device_kind
    return Topology(f"{len(found)} x {kind}", found, chip_of(kind))


def libtpu_version() -> str | None:
    """The version of the installed libtpu; None if it is not installed."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return None


def _cpus(name: TopologyName) -> tuple[jax.Device, ...]:
    if not devices.is_started():
        devices.simulate(name.num_chips)
        devices.all_devices()
    found = tuple(jax.devices("cpu"))
    if len(found) < name.num_chips:
        raise PlanError(
            "a process starts its emulated devices once, so a plan can use that many or fewer; got "
            f"{name} after {len(found)} were started. Plan in a new process: "
            "python -m spmd_core.plan."
        )
    return found[: name.num_chips]


def _request(name: TopologyName) -> dict[str, object]:
    shape = "x".join(map(str, name.shape))
    request: dict[str, object] = {
        "platform": "tpu",
        "topology_name": f"{name.version}:{shape}",
    }
    if name.chip_config is not None:
        request["chip_config_name"] = name.chip_config
    if name.num_slices > 1:
        request["num_slices"] = name.num_slices
    return request


def _tpus(name: TopologyName, request: dict[str, object]) -> tuple[jax.Device, ...]:
    with devices.libtpu_without_tpus():
        try:
            _load_without_profiler()
            return tuple(_topologies.get_topology_desc(**request).devices)
        except Exception as error:  # jax raises exceptions of several types
            raise _explained(name, error) from error


def _load_without_profiler() -> None:
    """Loads libtpu on a host without a TPU.

    If jax loads it, a profile that is taken later aborts the process.
    """
    name = "tpu"
    if devices.expects_tpus() or xla_client.pjrt_plugin_loaded(name):
        return
    spec = importlib.util.find_spec("libtpu")
    if spec is None or spec.origin is None:
        return  # jax raises that error
    library = Path(spec.origin).with_name("libtpu.so")
    if library.exists():
        xla_client.load_pjrt_plugin_dynamically(name, str(library))


def _explained(name: TopologyName, error: Exception) -> PlanError:
    text = str(error)
    if "lockfile" in text or "already in use" in text:
        return PlanError(
            "libtpu can be loaded by one process at a time unless loading it twice is allowed; "
            f"another process has it: {text.splitlines()[0]} Wait for that process, or set "
            "ALLOW_MULTIPLE_LIBTPU_LOAD=true before this one starts."
        )
    if "not installed" in text:
        return PlanError(
            f"planning for {name} needs the TPU's compiler, libtpu; it is not installed. "
            "Run: pip install 'spmd-core[tpu]'."
        )
    return PlanError(
        f"libtpu must know the topology; it refused {name}: {text.splitlines()[0]} "
        "Name another shape, such as v4:2x2x2."
    )
