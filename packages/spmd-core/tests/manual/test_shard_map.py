"""Manual regions and their collectives against plain torch on the whole tensors."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.manual import collectives
from spmd_core.manual.region import region_of
from spmd_core.manual.shard_map import disable_manual_sharding, enable_manual_sharding
from spmd_core.program import compile_cache

X = torch.randn(16, 24)


def on_device(t, *, grad=True):
    return t.detach().clone().to("xla").requires_grad_(grad)


def assert_same(mine, right, **tolerance):
    torch.testing.assert_close(mine.detach().cpu(), right.detach(), **tolerance)


def test_inside_a_tensor_has_its_blocks_shape(mesh_2d):
    a, b = mesh_2d.mesh_shape
    shapes = []

    def function(x, y, flag):
        shapes.append((tuple(x.shape), tuple(y.shape), flag))
        return x * 2, y + 1

    mapped = spmd.shard_map(
        function, mesh_2d, [("a", "b"), (None, ("b", "a")), ...], [("a", "b"), (None, ("b", "a"))]
    )
    x, y = mapped(X.to("xla"), X.to("xla"), "as it is")
    assert shapes == [((16 // a, 24 // b), (16, 24 // (a * b)), "as it is")]
    assert_same(x, X * 2)
    assert_same(y, X + 1)


def test_what_is_closed_over_and_numbers_are_the_same_on_each(mesh_1d, num_devices):
    weight = torch.randn(24)
    mapped = spmd.shard_map(
        lambda x: (x * weight.to("xla") + 0.5).softmax(-1).sum(0), mesh_1d, [("x",)], ("x",)
    )
    expected = torch.cat(
        [(part * weight + 0.5).softmax(-1).sum(0) for part in X.chunk(num_devices)]
    )
    assert_same(mapped(X.to("xla")), expected)


def test_a_megatron_mlp_and_its_gradients(mesh_1d):
    up, down = torch.randn(24, 32) / 5, torch.randn(32, 24) / 5

    def block(x, up, down):
        return spmd.manual.all_reduce(torch.tanh(x @ up) @ down, "x")

    mapped = spmd.shard_map(block, mesh_1d, [(), (None, "x"), ("x", None)], ())
    results = []
    for device, function in (
        ("cpu", lambda x, up, down: torch.tanh(x @ up) @ down),
        ("xla", mapped),
    ):
        given = [t.clone().to(device).requires_grad_() for t in (X, up, down)]
        out = function(*given)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(first[1].square().sum(), given)
        results.append([out, *first, *second])
    for mine, right in zip(results[1], results[0]):
        assert_same(mine, right, rtol=1e-3, atol=1e-3)


def rows(x, n):
    return list(x.chunk(n))


# name: (the collective, the same on the list of all devices' blocks)
COLLECTIVES = {
    "sum": (lambda x: spmd.manual.all_reduce(x, "x"), lambda xs, n: [sum(xs)] * n),
    "mean": (lambda x: spmd.manual.all_reduce(x, "x", "mean"), lambda xs, n: [sum(xs) / n] * n),
    "all_gather": (
        lambda x: spmd.manual.all_gather(x, "x", 1),
        lambda xs, n: [torch.cat(xs, 1)] * n,
    ),
    "reduce_scatter": (
        lambda x: spmd.manual.reduce_scatter(x, "x", -1),
        lambda xs, n: list(sum(xs).chunk(n, 1)),
    ),
    "all_to_all": (
        lambda x: spmd.manual.all_to_all(x, "x", 1, 0),
        lambda xs, n: [torch.cat([x.chunk(n, 1)[d] for x in xs], 0) for d in range(n)],
    ),
    "rotate": (
        lambda x: spmd.manual.collective_permute(x, "x", [(i, (i + 1) % N) for i in range(N)]),
        lambda xs, n: xs[-1:] + xs[:-1],
    ),
    "shift": (
        lambda x: spmd.manual.collective_permute(x, "x", [(i, i + 1) for i in range(N - 1)]),
        lambda xs, n: [xs[0] * 0, *xs[:-1]],
    ),
}
N = 1


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_and_its_gradient(name, mesh_1d, num_devices, monkeypatch):
    monkeypatch.setitem(globals(), "N", num_devices)
    collective, model = COLLECTIVES[name]
    mapped = spmd.shard_map(lambda x: collective(x * x), mesh_1d, [("x",)], ("x",))
    x, right = on_device(X), X.clone().requires_grad_()
    out = mapped(x)
    expected = torch.cat(model(rows(right * right, num_devices), num_devices))
    assert_same(out, expected, rtol=1e-4, atol=1e-4)
    ramp = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    assert_same(
        torch.autograd.grad(out, x, ramp.to("xla"))[0],
        torch.autograd.grad(expected, right, ramp)[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_dropout_inside_of_attention_differs_between_devices(mesh_1d, num_devices):
    """As other random operations do; one seed gives the same masks again, in backward too."""
    ones = torch.ones(num_devices, 8, 4, device="xla")
    values = torch.ones(num_devices, 8, 4, device="xla").requires_grad_()

    def attention(value):
        query = torch.ones_like(value)
        return torch.nn.functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)

    mapped = spmd.shard_map(attention, mesh_1d, [("x",)], ("x",))
    torch.manual_seed(0)
    first = mapped(ones)
    torch.manual_seed(0)
    again = mapped(values)
    assert torch.equal(first.cpu(), again.detach().cpu())
    assert len({tuple(rows.flatten().tolist()) for rows in first.cpu()}) == num_devices
    again.sum().backward()
    # The result is linear in the values, so that the masks are those of the forward.
    assert_same(values.grad.sum((1, 2)), again.cpu().sum((1, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema(op, mesh_1d, num_devices):
    mapped = spmd.shard_map(lambda x: spmd.manual.all_reduce(x, "x", op), mesh_1d, [("x",)], ())
    assert_same(mapped(X.to("xla")), getattr(torch.stack(rows(X, num_devices)), f"a{op}")(0))


def test_several_axes_and_the_index_along_them(mesh_2d, num_devices):
    def function(x):
        return x * 0 + spmd.manual.axis_index(("b", "a")), spmd.manual.all_reduce(x, ("a", "b"))

    index, total = spmd.shard_map(function, mesh_2d, [(("b", "a"),)], [(("b", "a"),), ()])(
        torch.ones(num_devices, device="xla")
    )
    assert index.tolist() == list(range(num_devices)) and total.tolist() == [num_devices]


def test_marks_over_other_axes_go_on_working_inside(mesh_2d):
    a = mesh_2d.mesh_shape[0]

    def function(x):
        y = torch.tanh(x)
        spmd.mark_sharding(y, mesh_2d, (None, "b"))
        return spmd.manual.all_reduce(y.sum(0), "a")

    mapped = spmd.shard_map(function, mesh_2d, [("a", None)], (None,), axis_names=["a"])
    x = X.to("xla")
    spmd.mark_sharding(x, mesh_2d, ("a", "b"))
    assert 16 % a == 0
    assert_same(mapped(x), torch.tanh(X).sum(0), rtol=1e-4, atol=1e-4)


def test_local_tensors_outlive_a_step(mesh_1d):
    """The backward, in another program, uses local tensors that the forward saved."""
    x, right = on_device(X), X.clone().requires_grad_()
    loss = spmd.shard_map(
        lambda x: spmd.manual.all_reduce(torch.sin(x).exp().sum(), "x"), mesh_1d, [("x",)], ()
    )(x)
    expected = torch.sin(right).exp().sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    expected.backward()
    assert_same(x.grad, right.grad, rtol=1e-4, atol=1e-4)


def test_views_and_writes_inside(mesh_1d, num_devices):
    def function(x):
        y = x.clone()
        y[:, 0] += 1
        y.view(-1)[1].zero_()
        return y.t()

    expected = torch.cat([part.clone() for part in X.chunk(num_devices)])
    for part in expected.chunk(num_devices):
        part[:, 0] += 1
        part.view(-1)[1].zero_()
    assert_same(spmd.shard_map(function, mesh_1d, [("x",)], (None, "x"))(X.to("xla")), expected.t())


def test_random_numbers_differ_between_devices_where_the_tensor_is_local(mesh_1d, num_devices):
    def function(x):
        return torch.rand_like(x), x * 0 + torch.rand(3, device="xla")

    own, same = (
        t.cpu()
        for t in spmd.shard_map(function, mesh_1d, [("x",)], [("x",), ("x",)])(
            torch.zeros(num_devices, 3, device="xla")
        )
    )
    assert len(torch.unique(own)) == 3 * num_devices and len(torch.unique(same)) == 3


def test_collectives_of_the_program_are_those_that_were_written(mesh_1d, num_devices):
    mapped = spmd.shard_map(
        lambda x, w: spmd.manual.all_reduce(torch.relu(x @ w), "x").sum(),
        mesh_1d,
        [(None, "x"), ("x", None)],
        (),
    )
    x, w = (torch.randn(8, 24).to("xla"), torch.randn(24, 8).to("xla"))
    spmd.mark_sharding(x, mesh_1d, (None, "x"))
    spmd.mark_sharding(w, mesh_1d, ("x", None))
    out = mapped(x, w)
    spmd.sync()
    program = list(compile_cache._programs.values())[-1]
    text = program.compiled.as_text()
    assert text.count(" all-reduce(") == (num_devices > 1) and " all-gather(" not in text
    del out


def test_the_way_in_and_out_without_a_function(mesh_1d, num_devices):
    x = on_device(X)
    local = enable_manual_sharding(x, ("x", None), mesh=mesh_1d)
    assert tuple(local.shape) == (16 // num_devices, 24)
    whole = disable_manual_sharding(local * 3, ("x", None), (16, 24), mesh=mesh_1d)
    assert_same(whole, X * 3)
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"make a tensor of shape \(16, 24\); got full_shape \(24, 16\)",
    ):
        disable_manual_sharding(local, ("x", None), (24, 16), mesh=mesh_1d)


def test_one_partition_spec_stands_for_all(mesh_2d):
    a, b = mesh_2d.mesh_shape
    spec = spmd.PartitionSpec("a", "b")
    shapes = []

    def function(x, y):
        shapes.extend([tuple(x.shape), tuple(y.shape)])
        return x * 2, x + y

    x, y = spmd.shard_map(function, mesh_2d, spec, spec)(X.to("xla"), X.to("xla"))
    assert shapes == [(16 // a, 24 // b)] * 2
    assert_same(x, X * 2)
    assert_same(y, X + X)
    assert_same(spmd.shard_map(lambda x: -x, mesh_2d, spec, spec)(X.to("xla")), -X)


def refused(
    mesh, function=lambda x: x, *, in_specs=(("x",),), out_specs=("x",), argument=None, **options
):
    argument = X.to("xla") if argument is None else argument
    return spmd.shard_map(function, mesh, list(in_specs), out_specs, **options)(argument)


def test_bad_input(mesh_1d, mesh_2d, num_devices):
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"one partition spec for each argument; got 2 specs and 1 arguments",
    ):
        refused(mesh_1d, in_specs=[("x",), ("x",)])
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"in_specs has one partition spec for each argument; got 'x'",
    ):
        spmd.shard_map(lambda x: x, mesh_1d, "x", ())
    with pytest.raises(
        spmd.errors.PartitionSpecError, match=r"out_specs has one partition spec for each result"
    ):
        refused(mesh_1d, lambda x: (x, x, x))
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"name its own axes; got 'b' .* over \['a'\].*mark_sharding",
    ):
        refused(mesh_2d, in_specs=[("b",)], out_specs=(), axis_names=["a"])
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"a manual region needs a tensor on device 'xla'; got a tensor on cpu",
    ):
        refused(mesh_1d, argument=X)
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"needs a tensor on device 'xla'; got int. Return tensors only",
    ):
        refused(mesh_1d, lambda x: 3)
    with pytest.raises(
        spmd.errors.SpmdError, match=r"all_reduce is a collective of a manual region.*shard_map"
    ):
        spmd.manual.all_reduce(X.to("xla"), "x")
    with pytest.raises(ValueError, match=r"'sum', 'mean', 'max' or 'min'; got 'product'"):
        refused(mesh_1d, lambda x: spmd.manual.all_reduce(x, "x", "product"))
    with pytest.raises(ValueError, match=r"all_reduce with 'max' has no gradient.*detach"):
        refused(mesh_1d, lambda x: spmd.manual.all_reduce(x, "x", "max"), argument=on_device(X))
    with pytest.raises(IndexError, match=r"range of \[-2, 1\], but got 2"):
        refused(mesh_1d, lambda x: spmd.manual.all_gather(x, "x", 2))
    with pytest.raises(ValueError, match=r"at most once.*got \[\(0, 99\)\]"):
        refused(mesh_1d, lambda x: spmd.manual.collective_permute(x, "x", [(0, 99)]))
    with pytest.raises(
        spmd.errors.PartitionSpecError, match=r"goes along manual axes; all_reduce got 'b'"
    ):
        refused(
            mesh_2d,
            lambda x: spmd.manual.all_reduce(x, "b"),
            in_specs=[("a",)],
            out_specs=(),
            axis_names=["a"],
        )
    with pytest.raises(spmd.errors.SpmdError, match=r"do not nest"):
        refused(mesh_1d, lambda x: refused(mesh_1d, argument=x))
    with pytest.raises(
        spmd.errors.SpmdError, match=r"another value on each device.*Return it from the region"
    ):
        refused(mesh_1d, lambda x: x.sum().item() * x)
    if num_devices > 1:
        with pytest.raises(
            spmd.errors.PartitionSpecError,
            match=r"blocks? of one shape; got 3 elements in dim 0.*Pad",
        ):
            refused(mesh_1d, argument=torch.ones(3, device="xla"))
        with pytest.raises(
            ValueError,
            match=r"reduce_scatter gives each of \d devices an equal part; got 1 elements.*Pad",
        ):
            refused(mesh_1d, lambda x: spmd.manual.reduce_scatter(x[:1], "x"))


def test_a_region_over_some_of_the_devices(mesh_1d, num_devices):
    if num_devices == 1:
        pytest.skip("needs two devices")
    half = spmd.Mesh(range(num_devices // 2), (num_devices // 2,), ("h",))
    total = spmd.shard_map(lambda x: spmd.manual.all_reduce(x, "h"), half, [("h",)], ())
    assert_same(total(X.to("xla")), sum(rows(X, num_devices // 2)), rtol=1e-4, atol=1e-4)
    other = spmd.mark_sharding(torch.ones(16, 24, device="xla"), mesh_1d, ("x",))
    mixed = total(other)
    with pytest.raises(
        spmd.errors.ProgramError,
        match=r"have all devices of its program; got devices \(0,.*sync\(\) between",
    ):
        spmd.sync()
    del mixed


def test_tensors_of_two_regions_do_not_mix(mesh_1d, mesh_2d):
    a = enable_manual_sharding(torch.ones(8, 8, device="xla"), (), mesh=mesh_1d)
    b = enable_manual_sharding(torch.ones(8, 8, device="xla"), (), mesh=mesh_2d)
    mixed = a + b
    with pytest.raises(
        spmd.errors.ProgramError,
        match=r"inputs must be of one manual region; .*local to \(a, b\) and .*local to \(x\)",
    ):
        spmd.sync()
    del mixed
    leaving = disable_manual_sharding(torch.ones(8, device="xla"), (), (8,), mesh=mesh_1d)
    with pytest.raises(
        spmd.errors.ProgramError, match=r"only a tensor that is local .* leave it; .* got a global"
    ):
        spmd.sync()
    del leaving


def test_the_global_mesh_stands_in(mesh_1d):
    x = torch.arange(16.0).reshape(8, 2)
    with pytest.raises(
        spmd.errors.MeshError, match=r"a manual region needs a mesh; got None, .*Pass mesh="
    ):
        enable_manual_sharding(x.to("xla"), ("x", None))
    spmd.set_global_mesh(mesh_1d)
    try:
        local = enable_manual_sharding(x.to("xla"), ("x", None))
        assert torch.equal(disable_manual_sharding(local + 1, ("x", None), (8, 2)).cpu(), x + 1)
    finally:
        spmd.set_global_mesh(None)


def test_a_collective_of_the_region_that_a_tensor_is_in(mesh_1d, num_devices):
    x = torch.ones(4, 2, device="xla")
    assert region_of(x) is None
    block = enable_manual_sharding(x, (None, None), mesh=mesh_1d)
    region = region_of(block + 1)
    assert region is not None and region.mesh == mesh_1d and region.axes == (0,)
    total = collectives.in_region(region, collectives.all_reduce, block, (0,), "sum")
    assert (
        disable_manual_sharding(total, (None, None), (4, 2), mesh=mesh_1d).tolist()
        == [[num_devices] * 2] * 4
    )
