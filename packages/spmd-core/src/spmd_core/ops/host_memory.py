"""Moves arrays between a device's memory and the memory of its host, inside a program.

Only values inside of one program can be in host memory: the results of a program are always in the
memory of devices.
"""

from typing import Any

import jax
import torch

from spmd_core.ops.registry import Context, lowering

# The operations, as recorded entries name them.
TO_HOST, FROM_HOST = "spmd::to_host_memory", "spmd::from_host_memory"

_library = torch.library.Library("spmd", "FRAGMENT")
for _name in ("to_host_memory", "from_host_memory"):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, torch.empty_like, "Meta")


@lowering("spmd.to_host_memory.default")
def _to_host_memory(ctx: Context, x: Any) -> jax.Array:
    # A CPU device's memory is the host's.
    return x if ctx.platform == "cpu" else jax.device_put(x, jax.memory.Space.Host)


@lowering("spmd.from_host_memory.default")
def _from_host_memory(ctx: Context, x: Any) -> jax.Array:
    # The values of an earlier program are on the device already.
    return in_device_memory(x)


def in_device_memory(x: jax.Array) -> jax.Array:
    """`x`, copied to the device if it is in the host's memory."""
    is_on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host else x
