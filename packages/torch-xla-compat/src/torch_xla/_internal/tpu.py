"""Counts and generation of the TPU on this host.

Libraries ask these questions in programs that use another device, so the answers start no device
unless jax has found a TPU.
"""

import os
import re

import spmd_core as spmd
from spmd_core.runtime import devices, processes


def _is_tpu() -> bool:
    if not devices.is_started() and not os.environ.get("PJRT_DEVICE"):
        return devices.expects_tpus() and spmd.distributed.device_type() == "TPU"
    return spmd.distributed.device_type() == "TPU"


def num_available_devices() -> int:
    """Number of TPU devices of this host; 0 on other platforms."""
    return processes.addressable_runtime_device_count() if _is_tpu() else 0


def num_available_chips() -> int:
    """Number of TPU chips; 0 on other platforms."""
    if not _is_tpu():
        return 0
    return len({tuple(d["coords"]) for d in spmd.distributed.device_attributes() if "coords" in d})


def version() -> int:
    """The TPU's generation, such as 4 for v4. OSError on other platforms, as upstream."""
    kind = str(spmd.distributed.device_attributes()[0]["kind"]) if _is_tpu() else "no TPU"
    found = re.search(r"TPU v(\d+)", kind)
    if found is None:
        raise OSError(
            f"a TPU generation is asked of a TPU; the device is {kind!r}. "
            "Ask xr.device_type() first."
        )
    return int(found[1])
