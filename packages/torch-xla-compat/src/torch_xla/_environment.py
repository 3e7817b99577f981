"""Applies PyTorch/XLA's environment variables, once, at the first import.

`docs/reference/torch_xla.md` lists them.
"""

import os
import warnings

import spmd_core as spmd
from spmd_core.auto import registration
from spmd_core.config import config
from spmd_core.dispatch import eager
from spmd_core.runtime import startup
from torch_xla import _saved_graphs

# Variables that ask for something that this package does not do, and what to use instead.
_WITHOUT_EFFECT = {
    "XLA_USE_BF16": "Use torch.autocast, or model.to(torch.bfloat16).",
    "XLA_DOWNCAST_BF16": "Use torch.autocast, or model.to(torch.bfloat16).",
    "XLA_METRICS_FILE": "Write torch_xla.debug.metrics.metrics_report() where you want it.",
    "XLA_SAVE_HLO_FILE": "Print spmd_core.debugging.hlo().",
    "XLA_DUMP_HLO_GRAPH": "Print spmd_core.debugging.hlo().",
    "XLA_DISABLE_FUNCTIONALIZATION": "Remove it: writes through views are always right.",
    "PT_XLA_DEBUG_FILE": "Redirect stderr.",
    "PJRT_DYNAMIC_PLUGINS": "Install the plugin as jax asks for it.",
    "XLA_COORDINATOR_PORT": "Call spmd_core.distributed.initialize(address), or set MASTER_PORT.",
}
_DEBUG_LEVELS = ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL")


def is_set(name: str) -> bool:
    """Whether a switch is on: 'true' or a positive number; off are '', 'false' and 0.

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "true", "false") and not value.isdecimal():
        raise ValueError(
            f"{name} is 1 or true (on), or 0 or false (off); got {value!r}. "
            f"Set {name}=1, or unset it."
        )
    return value == "true" or (value.isdecimal() and int(value) > 0)


def use_automatic_spmd() -> None:
    """Turns on SPMD mode and automatic sharding, over a mesh of the shape `XLA_AUTO_SPMD_MESH`.

    Without that variable, or with an empty one, the mesh is chosen too.

    Raises:
        ValueError: the variable is no shape of a mesh.
    """
    text = os.environ.get("XLA_AUTO_SPMD_MESH", "").strip()
    sizes = [part.strip() for part in text.split(",")] if text else []
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"XLA_AUTO_SPMD_MESH has the sizes of a mesh, with commas between them; got {text!r}. "
            "Write for instance XLA_AUTO_SPMD_MESH=4,2, or unset it."
        )
    registration.start(tuple(map(int, sizes)))


def apply() -> None:
    """Applies the variables, and warns of those that have no effect.

    Raises:
        ValueError: XLA_AUTO_SPMD_MESH is no shape of a mesh, CPU_NUM_DEVICES is not a positive
            number, or XLA_SAVE_TENSORS_FMT no known form.
    """
    num_devices = os.environ.get("CPU_NUM_DEVICES")
    if num_devices is not None and os.environ.get("PJRT_DEVICE", "CPU").upper() == "CPU":
        if not num_devices.isdigit() or int(num_devices) < 1:
            raise ValueError(
                "CPU_NUM_DEVICES is a positive number of emulated devices; "
                f"got {num_devices!r}. Write for instance CPU_NUM_DEVICES=8."
            )
        spmd.simulate(int(num_devices))
    if is_set("XLA_AUTO_SPMD"):
        use_automatic_spmd()
    elif is_set("XLA_USE_SPMD"):
        spmd.use_spmd()
    path = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
    if path:
        startup.initialize_cache(path, readonly=is_set("XLA_PERSISTENT_CACHE_READ_ONLY"))
    if is_set("XLA_IR_DEBUG") or is_set("XLA_HLO_DEBUG"):
        config.record_source_lines = True
    if any(is_set(name) for name in _DEBUG_LEVELS) and config.explain_recompiles_after is None:
        config.explain_recompiles_after = 0
    graphs = os.environ.get("XLA_SAVE_TENSORS_FILE")
    if graphs:
        _saved_graphs.save_to(graphs, os.environ.get("XLA_SAVE_TENSORS_FMT", "text"))
    if is_set("XLA_USE_EAGER_DEBUG_MODE"):
        eager.eager_mode(True)
    _warn_of_ignored()


def _warn_of_ignored() -> None:
    groups = os.environ.get("XLA_AUTO_USE_GROUP_SHARDING", "1").strip().lower()
    if groups in ("0", "false"):
        warnings.warn(
            f"XLA_AUTO_USE_GROUP_SHARDING={groups} has no effect in this torch_xla: automatic "
            "sharding gives equal parameters of repeated layers one sharding. Unset it, and mark "
            "those that should differ.",
            stacklevel=4,
        )
    for name, instead in _WITHOUT_EFFECT.items():
        if os.environ.get(name, "0").strip().lower() not in ("", "0", "false"):
            warnings.warn(
                f"{name} has no effect in this torch_xla, which runs on spmd_core; "
                f"got {os.environ[name]!r}. {instead}",
                stacklevel=4,
            )
