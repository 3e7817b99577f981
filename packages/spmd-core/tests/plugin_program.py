"""A train step over all devices of a PJRT plugin, and its losses in eager torch, as JSON.

usage: python plugin_program.py PLUGIN: the plugin's shared library, which has GetPjrtApi.
"""

import json
import sys

import jax
import torch
from jax._src import xla_bridge
from torch import nn

import spmd_core as spmd


def losses(model, put, end=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(4):
        x = put(torch.randn(32, 64, generator=generator))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end()
        found.append(loss.item())
    return found


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


if __name__ == "__main__":
    # What a package's entry point `jax_plugins` does.
    xla_bridge.register_plugin("elsewhere", library_path=sys.argv[1])
    jax.config.update("jax_platforms", "elsewhere")
    spmd.use_spmd()
    count = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(count), (count // 2, 2) if count > 1 else (1, 1), ("fsdp", "tensor"))
    model = build().to("xla")
    spmd.mark_sharding(model[0].weight, mesh, ("tensor", "fsdp"))
    spmd.mark_sharding(model[2].weight, mesh, ("fsdp", "tensor"))
    ours = losses(model, lambda x: spmd.mark_sharding(x.to("xla"), mesh, ("fsdp", None)), spmd.sync)
    step = max(spmd.metrics.programs(), key=lambda one: one.num_ops)
    client = jax.devices()[0].client
    answers = {
        "losses": ours,
        "expected": losses(build(), lambda x: x),
        "devices": count,
        "version": client.platform_version,
        "collectives": sorted({one.kind for one in spmd.debugging.collectives()}),
        "taken_over_bytes": step.alias_bytes,
        "peak_bytes": step.peak_bytes,
    }
    print(json.dumps(answers))
