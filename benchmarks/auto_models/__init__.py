"""The models that automatic sharding is measured against, with the shardings of an expert.

    import spmd_core as spmd
    from benchmarks.auto_models import MODELS, mesh_of

    spmd.simulate(8)
    spmd.use_spmd()
    model = MODELS["gpt2"]
    net, optimizer, step, inputs = model.build("small", "xla")
    model.manual["fsdp_tensor"](net, inputs, mesh_of("fsdp_tensor", 8))  # or other marks, or none
    spmd.sync()  # draws the weights and inputs, each device its own blocks
    for _ in range(3):
        loss = step(*inputs)
        spmd.sync()

`MODELS: dict[str, Model]` has an entry for each file of this package. A `Model` has:

- `sizes`: names, the smallest first. "tiny" is for tests, "small" for runs on emulated devices (a
  step takes about a second), the others are published sizes, to be compiled for absent devices.
- `build(size, device)` gives `(net, optimizer, step, inputs)`. On device xla, weights and inputs
  are pending: they are drawn when they are first needed, sharded as they are marked by then. So
  there is one copy of a weight, and no device holds more than its blocks. `torch.manual_seed`
  before it decides their values. The optimizer has no state before the first step. On "cpu" the
  same is eager torch, on "meta" it has shapes alone.
- `step(*inputs)` does forward, backward, `optimizer.step()` and `optimizer.zero_grad()`, and gives
  the detached loss, a float32 scalar. It reads nothing on the host and does not end a program: call
  `spmd.sync()` after it. Published sizes compute matrix products in bfloat16 by autocast; deep ones
  compute their blocks again in the backward.
- `manual`: by strategy, `shard(net, inputs, mesh)`, which marks parameters, inputs and, by forward
  hooks, activations, in place; once for a model. Every model has `data`, `fsdp` and `fsdp_tensor`
  (Megatron's split of heads, features and vocabulary). ResNet has `spatial` (rows and columns),
  GPT-2 has `fully_shard`. `mesh_of(strategy, num_devices, inner=2)` is a strategy's mesh; any other
  mesh with the same axes will do.

What is marked is told by names (`manual.by_rules`), or by the recipes in `examples/` where there is
one. Dropout is off everywhere, so that losses can be compared.
"""

from benchmarks.auto_models import gpt2, llama, mixer, mixtral, resnet, t5, two_tower, vit
from benchmarks.auto_models.manual import AXES, mesh_of
from benchmarks.auto_models.model import Model

FAMILIES = (gpt2, llama, resnet, vit, t5, mixtral, two_tower, mixer)
MODELS: dict[str, Model] = {x.MODEL.name: x.MODEL for x in FAMILIES}

__all__ = ["AXES", "MODELS", "Model", "mesh_of"]
