"""A spatially split ResNet: eager torch's results, halos that move, and nothing gathered."""

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import exhaustive
from torch import nn

import spmd_core as spmd
from examples.resnet_spatial import shardings
from examples.resnet_spatial.model import build_model

# Elements that cross one border for an image of 224 x 224 in ResNet-50's forward: of one row, each
# of 7 stages of one size, all of 7,168 elements but the first, and how often.
RESNET50_HALO = 5 * 224 * 3 + 7168 * (1 + 3 + 4 + 6 + 3)


def mesh_of(text: str, num_devices: int) -> spmd.Mesh:
    sizes = {name: int(size) for name, _, size in (p.partition("=") for p in text.split(","))}
    total = math.prod(sizes.values())
    if total > num_devices:
        pytest.skip(f"needs {total} devices")
    return spmd.Mesh(range(total), tuple(sizes.values()), tuple(sizes))


def step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    return loss


def split_step(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor, mesh: spmd.Mesh
) -> tuple[nn.Module, torch.Tensor, Any]:
    """The copy of the model after a step's backward, the loss, and the program's collectives."""
    ours = copy.deepcopy(model).to("xla")
    shardings.replicate([ours], mesh)
    spec = shardings.batch_sharding(mesh).partition_spec
    images = spmd.mark_sharding(x.to("xla"), mesh, spec)
    loss = step(ours, images, spmd.mark_sharding(labels.to("xla"), mesh, spec[:1]))
    # The first recording of some operations leaves cycles that hold tensors, which would be results
    # of the program: XLA keeps a result whole whose shards would be uneven.
    gc.collect()
    spmd.sync()
    moved = spmd.debugging.collectives(program=spmd.metrics.programs()[-1])
    return ours, loss, moved


def check_equal(ours: nn.Module, loss: torch.Tensor, model: nn.Module, right: torch.Tensor) -> None:
    """Loss, gradients and running statistics to 1e-5, relative to the largest of each tensor."""
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), model.parameters())]
    for got, expected in [*pairs, *zip(ours.buffers(), model.buffers())]:
        assert got is not None and expected is not None
        scale = max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(got.cpu() / scale, expected / scale, rtol=0, atol=1e-5)


# 112 pixels end in 7 rows of the small network's last stage, which two devices split 4 and 3.
@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        ("data=2,height=2,width=2", 112),
        ("width=4", 64),
        exhaustive("height=2", 112),
        exhaustive("data=2,height=4", 112),
        exhaustive("height=2,width=4", 112),
    ],
)
def test_a_split_step_equals_an_unsplit_one(mesh: str, size: int, num_devices: int) -> None:
    model = build_model("small", num_classes=8)
    x, labels = torch.randn(4, 3, size, size), torch.randint(8, (4,))
    ours, loss, moved = split_step(model, x, labels, mesh_of(mesh, num_devices))
    right = step(model, x, labels)
    check_equal(ours, loss, model, right)
    assert {c.kind for c in moved} == {"collective-permute", "all-reduce"}
    assert {axis for c in moved for axis in c.axes or ()} == {
        part.partition("=")[0] for part in mesh.split(",")
    }


def test_batch_statistics_are_of_all_devices(num_devices: int) -> None:
    """Images whose halves differ much: a device's own statistics would be far off."""
    mesh = mesh_of("height=2", num_devices)
    norm = nn.BatchNorm2d(3)
    x = torch.cat([torch.randn(2, 3, 4, 8), 50 + torch.randn(2, 3, 4, 8)], 2)
    ours = copy.deepcopy(norm).to("xla")
    shardings.replicate([ours], mesh)
    got = ours(spmd.mark_sharding(x.to("xla"), mesh, (None, None, "height")))
    torch.testing.assert_close(got.cpu(), norm(x), rtol=1e-4, atol=1e-4)
    assert ours.running_var is not None
    torch.testing.assert_close(ours.running_var.cpu(), norm.running_var)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["height=2", "height=4", "height=2,width=2"])
def test_bytes_of_resnet50_are_those_of_the_arithmetic(mesh: str, num_devices: int) -> None:
    model = build_model("resnet50", num_classes=1000)
    num = 2
    x, labels = torch.randn(num, 3, 224, 224), torch.randint(1000, (num,))
    grid = mesh_of(mesh, num_devices)
    ours, _, moved = split_step(model, x, labels, grid)
    assert {c.kind for c in moved} == {"collective-permute", "all-reduce"}
    sizes = list(grid.shape().values())
    borders = sum(n / math.prod(sizes) for n in sizes)
    halos = moved.where(kind="collective-permute").result_bytes
    assert halos <= 1.2 * 2 * borders * RESNET50_HALO * 4 * num  # forward and back
    with torch.no_grad():
        spec = shardings.batch_sharding(grid).partition_spec
        logits = ours(spmd.mark_sharding(x.to("xla"), grid, spec))
        forward = spmd.debugging.collectives(logits).where(kind="collective-permute")
    # Over four devices, 28 rows in blocks of 7 become 14 in blocks of 4, which do not lie together.
    assert forward.result_bytes <= 1.25 * borders * RESNET50_HALO * 4 * num
