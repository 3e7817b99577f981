"""Models on different meshes and in manual regions, pending at once: each keeps its values."""

import threading

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd

pytestmark = pytest.mark.slow


def meshes(num_devices):
    """A mesh over all devices, one of them in another order, and one over half of them."""
    ids = list(range(num_devices))
    half = ids[::-2] or ids
    return (
        spmd.Mesh(ids, (num_devices,), ("x",)),
        spmd.Mesh(ids[1:] + ids[:1], (num_devices,), ("x",)),
        spmd.Mesh(half, (len(half),), ("x",)),
    )


def step(x, w, mesh, *, in_region):
    if not in_region:
        return torch.tanh(x @ w) + x
    return spmd.shard_map(
        lambda block, whole: torch.tanh(block @ whole) + block,
        mesh,
        in_specs=(("x", None), ()),
        out_specs=("x", None),
    )(x, w)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 16, 16, generator=generator, dtype=torch.float64) / 4


def expected(seed, steps):
    x, w = values(seed)
    for _ in range(steps):
        x = torch.tanh(x @ w) + x
    return x


def on(mesh, seed):
    x, w = (t.to("xla") for t in values(seed))
    spmd.mark_sharding(x, mesh, ("x", None))
    spmd.mark_sharding(w, mesh, (None, "x"))
    return x, w


@pytest.mark.parametrize(
    "read_first", [0, exhaustive(1), exhaustive(2), 3, exhaustive(4), exhaustive(5)]
)
def test_what_is_pending_on_several_meshes(num_devices, read_first):
    pending = []
    for seed, mesh in enumerate(meshes(num_devices)):
        for in_region in (False, True):
            pending.append((seed, step(*on(mesh, seed), mesh, in_region=in_region)))
    for seed, x in pending[read_first:] + pending[:read_first]:
        torch.testing.assert_close(x.cpu(), expected(seed, 1))


def test_a_read_inside_a_region_of_another_mesh(num_devices):
    whole, other, _ = meshes(num_devices)
    x, w = on(whole, 0)
    mine = step(x, w, whole, in_region=False)

    def body(block):
        twice = block * 2
        torch.testing.assert_close(mine.cpu(), expected(0, 1))  # a cut while `twice` is pending
        return twice + 1

    y = torch.arange(16.0).to("xla")
    spmd.mark_sharding(y, other, ("x",))
    result = spmd.shard_map(body, other, in_specs=(("x",),), out_specs=("x",))(y)
    assert result.tolist() == [2.0 * i + 1 for i in range(16)]


def test_threads_with_models_of_their_own(num_devices):
    results = {}

    def train(seed, mesh, in_region):
        try:
            x, w = on(mesh, seed)
            for number in range(9):
                x = step(x, w, mesh, in_region=in_region)
                if number % 3 == seed % 3:
                    spmd.sync()
            results[seed] = x.cpu()
        except Exception as error:  # shown by the test
            results[seed] = error

    jobs = [(m, r) for m in meshes(num_devices) for r in (False, True)]
    threads = [
        threading.Thread(target=train, args=(seed, mesh, in_region))
        for seed, (mesh, in_region) in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(len(jobs)):
        assert isinstance(results[seed], torch.Tensor), results[seed]
        torch.testing.assert_close(results[seed], expected(seed, 9))
