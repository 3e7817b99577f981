"""The random stream follows torch's seeds, generators and states, and is equal on every mesh."""

import torch

import spmd_core as spmd


def test_the_seed_rules(mesh_1d, num_devices):
    torch.manual_seed(5)
    a = torch.randn(8 * num_devices, device="xla")
    torch.manual_seed(5)
    b = spmd.mark_sharding(torch.randn(8 * num_devices, device="xla"), mesh_1d, ("x",))
    c = torch.randn(8 * num_devices, device="xla")
    assert a.tolist() == b.tolist() != c.tolist()


def test_values_are_the_same_on_any_mesh():
    # These values were drawn on one device; every mesh must give the same.
    expected = [
        0.2317574918,
        0.1862705051,
        -1.0107874870,
        -0.4260853827,
        0.8327275515,
        0.7099437714,
        0.0253878832,
    ]
    torch.manual_seed(0)
    x = torch.randn(4, device="xla")
    y = torch.rand(3, device="xla")
    torch.testing.assert_close(
        torch.cat([x, y]).cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-5
    )


def test_generators_and_states():
    g = torch.Generator().manual_seed(3)
    a = torch.empty(4, device="xla").normal_(generator=g)
    g.manual_seed(3)
    b = torch.empty(4, device="xla").normal_(generator=g)
    assert a.tolist() == b.tolist()
    state = torch.get_rng_state()
    a = torch.rand(4, device="xla")
    torch.set_rng_state(state)
    assert torch.rand(4, device="xla").tolist() == a.tolist()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        torch.rand(4, device="xla")
    torch.set_rng_state(state)
    assert torch.rand(4, device="xla").tolist() == a.tolist()


def test_moments_and_ranges():
    n = 20_000
    normal = torch.randn(n, device="xla").cpu()
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    uniform = torch.empty(n, device="xla").uniform_(-2, 3).cpu()
    assert -2 <= uniform.min() < -1.99 and 2.99 < uniform.max() < 3
    integers = torch.randint(3, 9, (n,), device="xla").cpu()
    assert integers.dtype == torch.int64 and sorted(integers.unique().tolist()) == [
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    exponential = torch.empty(n, device="xla").exponential_(2.0).cpu()
    assert exponential.min() > 0 and abs(exponential.mean() - 0.5) < 0.02
    assert sorted(torch.randperm(50, device="xla").tolist()) == list(range(50))
    assert abs(torch.nn.init.trunc_normal_(torch.empty(n, device="xla"), std=0.5).cpu()).max() < 2
    picks = torch.multinomial(
        torch.tensor([0.0, 1.0, 3.0], device="xla"), n, replacement=True
    ).cpu()
    assert set(picks.tolist()) == {1, 2} and abs((picks == 2).float().mean() - 0.75) < 0.02


def test_a_random_tensor_like_a_marked_one_is_marked(mesh_1d):
    x = spmd.mark_sharding(torch.zeros(16, device="xla"), mesh_1d, ("x",))
    assert torch.randn_like(x).sharding == x.sharding == torch.zeros_like(x).sharding
