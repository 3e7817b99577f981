"""The compiled step of a pipeline: collectives, reductions of gradients, memory, FLOPs."""

import gc
from collections import Counter

import jax
import pytest
import torch
from children import figures
from pipeline_models import Model, loss_of, made, to_device
from tiers import exhaustive

import spmd_core as spmd
from spmd_core.debugging import collectives

MEASURE = """
import json
import torch
import spmd_core as spmd
spmd.simulate(8)
spmd.use_spmd()
from pipeline_models import Model, loss_of, made, to_device

mesh = spmd.Mesh(range(8), (2, 4), ("pipe", "data"))
found = {}
for schedule, m in (("gpipe", 4), ("1f1b", 2), ("1f1b", 4)):
    ours = made(Model(2, width=32), mesh, num_microbatches=m, schedule=schedule)
    batch = torch.randint(0, 32, (2, 8 * m, 64)).unbind()
    spmd.pipeline_loss(loss_of, ours, *to_device(batch, mesh)).backward()
    spmd.sync()
    found[f"{schedule} {m}"] = spmd.metrics.programs()[-1].temp_bytes
    del ours
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_memory_of_1f1b_does_not_grow_with_the_microbatches(num_devices):
    """Microbatches have one size, so 4 of them are twice the batch."""
    if num_devices != 8:
        pytest.skip("eight devices are enough")
    found = figures(MEASURE)
    most = 1.15 if jax.__version_info__ > (0, 10, 0) else 1.16  # 1.151 by the XLA of jax 0.10.0
    assert found["1f1b 4"] < most * found["1f1b 2"]
    assert found["1f1b 4"] < 0.5 * found["gpipe 4"]


def step(mesh, schedule, m):
    """The collectives of a step."""
    ours = made(Model(2), mesh, num_microbatches=m, schedule=schedule)
    batch = torch.randint(0, 32, (2, 16, 4)).unbind()
    spmd.sync()  # stacks the parameters
    spmd.pipeline_loss(loss_of, ours, *to_device(batch, mesh)).backward()
    spmd.sync()
    return ours, collectives()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_pending")
@pytest.mark.parametrize("schedule", [exhaustive("gpipe"), "1f1b"])
def test_activations_are_permuted_and_gradients_reduced_once(num_devices, schedule):
    if num_devices != 8:
        pytest.skip("needs eight devices, for three axes of two")
    mesh = spmd.Mesh(range(8), (2, 2, 2), ("pipe", "fsdp", "tensor"))
    reductions = {}
    for m in (1, 2):
        ours, found = step(mesh, schedule, m)
        assert not found.where(axis="pipe", kind="all-gather")
        # All ticks but the first get what the one before sends, forwards and backwards.
        permutes = [c for c in found.where(kind="collective-permute") if c.axes == ("pipe",)]
        assert len(permutes) == 2 * (m + 2 - 2)
        over_fsdp = found.where(axis="fsdp")
        reductions[m] = Counter((c.kind, c.axes) for c in over_fsdp)
        # Each weight that fsdp splits is gathered once, and its gradient scattered once.
        weights = [p for p in ours.blocks[0].parameters() if p.dim() == 3]
        for kind, parts in (("all-gather", 4), ("reduce-scatter", 8)):
            sizes = Counter(c.result_bytes for c in over_fsdp.where(kind=kind))
            for size, count in Counter(4 * p.numel() // parts for p in weights).items():
                assert sizes[size] == count, (kind, sizes)
    assert reductions[1] == reductions[2]


@pytest.mark.slow
def test_the_flops_show_the_bubble(num_devices):
    """For m microbatches of one size, each device runs its block m + p - 1 times."""
    if num_devices != 8:
        pytest.skip("eight devices are enough")
    mesh = spmd.Mesh(range(8), (8,), ("pipe",))
    flops = {}
    for m in (1, 2, 5):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).to("xla")
        pipe = spmd.pipeline(model, mesh, num_microbatches=m)
        gc.collect()
        spmd.sync()
        with torch.no_grad():
            y = model(torch.ones(16 * m, 64, device="xla"))
        spmd.sync()
        del y
        flops[m] = spmd.metrics.programs()[-1].flops
        assert pipe.num_runs == m + 7
    per_run = (flops[5] - flops[2]) / 3
    assert flops[2] - flops[1] == pytest.approx(per_run, rel=0.1)
    for m, total in flops.items():
        assert total / per_run == pytest.approx(m + 7, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [exhaustive("gpipe"), "1f1b"])
def test_no_manual_region_is_inside_of_another(num_devices, schedule):
    """jaxlib 0.10 ends the process on programs that have many of these."""
    if num_devices != 8:
        pytest.skip("a mesh of 2 x 2 x 2")
    mesh = spmd.Mesh(range(8), (2, 2, 2), ("pipe", "fsdp", "tensor"))
    ours = made(Model(2), mesh, num_microbatches=2, schedule=schedule)
    loss = spmd.pipeline_loss(loss_of, ours, *to_device(torch.ones(2, 8, 4).long(), mesh))
    loss.backward()
    gradients = [p.grad for p in ours.parameters()]
    depths, open_at = [], []  # of the regions; and where the open ones stand
    for line in spmd.debugging.stablehlo(loss, *gradients).splitlines():
        indent = len(line) - len(line.lstrip())
        if open_at and indent == open_at[-1] and line.lstrip().startswith("}"):
            open_at.pop()
        if "sdy.manual_computation" in line:
            open_at.append(indent)
            depths.append(len(open_at))
    assert {*depths} == {1} and len(depths) > 100 and not open_at
