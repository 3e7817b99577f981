"""Counts and generation of the TPU on this host."""

import re

import spmd_core as spmd


def num_available_devices() -> int:
    """Number of TPU devices of this host; 0 on other platforms."""
    return spmd.addressable_runtime_device_count() if spmd.device_type() == "TPU" else 0


def num_available_chips() -> int:
    """Number of TPU chips; 0 on other platforms."""
    if spmd.device_type() != "TPU":
        return 0
    return len({tuple(d["coords"]) for d in spmd.device_attributes() if "coords" in d})


def version() -> int:
    """The TPU's generation, such as 4 for v4. RuntimeError on other platforms."""
    kind = str(spmd.device_attributes()[0]["kind"])
    found = re.search(r"TPU v(\d+)", kind)
    if found is None:
        raise RuntimeError(
            f"a TPU generation is asked of a TPU; the devices are {kind!r}. "
            "Ask xr.device_type() first."
        )
    return int(found[1])
