"""Marks as operators: on the device, on other tensors, on gradients, and in traces."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import spmd_core as spmd
from spmd_core.marks import custom_ops
from spmd_core.sharding.sharding import Sharding


@pytest.fixture
def mesh_arguments(mesh_2d):
    return mesh_2d.device_ids.tolist(), list(mesh_2d.mesh_shape), str(mesh_2d.axis_names)


def test_the_tensor_itself_is_marked(mesh_2d, mesh_arguments):
    x = torch.randn(8, 4).to("xla")
    y = torch.ops.xla.dynamo_mark_sharding(x, *mesh_arguments, "('a', 'b')")
    assert y is x and x.sharding == Sharding.of(mesh_2d, ("a", "b"), 2)
    z = torch.ops.xla.dynamo_mark_sharding(x + 1, *mesh_arguments[:2], "None", "[1, (0,)]")
    assert z.sharding.dims == ((1,), (0,))
    with torch.inference_mode():
        assert torch.ops.xla.dynamo_mark_sharding(
            torch.ones(8, 4).to("xla"), *mesh_arguments, "('a',)"
        ).partition_spec == ("a", None)


def test_the_gradient_of_a_marked_tensor_follows(mesh_2d, mesh_arguments):
    w = torch.randn(8, 4)
    leaf = w.to("xla").requires_grad_()
    marked = torch.ops.xla.dynamo_mark_sharding(leaf, *mesh_arguments, "('a', None)")
    (marked * 3).square().sum().backward()
    assert leaf.grad.partition_spec == ("a", None)
    torch.testing.assert_close(leaf.grad.cpu(), 18 * w)


def test_a_marked_copy(mesh_2d):
    w = torch.randn(8, 4)
    x = w.to("xla").requires_grad_()
    y = torch.ops.xla.aot_mark_sharding(x, str(mesh_2d), "('a', 'b')")
    assert x.sharding is None and y.partition_spec == ("a", "b")
    seen = []
    y.register_hook(lambda g: seen.append(g.partition_spec))
    (y * y).sum().backward()
    spmd.sync()
    assert seen == [("a", "b")] and y.sharding_spec == Sharding.of(mesh_2d, ("a", "b"), 2).text
    torch.testing.assert_close(x.grad.cpu(), 2 * w)
    y.detach().add_(1)
    assert torch.equal(x.detach().cpu(), w)


def test_other_tensors_pass(mesh_2d, mesh_arguments):
    x = torch.randn(8, 4, requires_grad=True)
    y = torch.ops.xla.dynamo_mark_sharding(x, *mesh_arguments, "('a', None)")
    z = torch.ops.xla.aot_mark_sharding(y, str(mesh_2d), "('a', None)")
    assert torch.equal(y, x) and torch.equal(z, x) and len({t.data_ptr() for t in (x, y, z)}) == 3
    (z * 2).sum().backward()
    assert x.grad.tolist() == [[2.0] * 4] * 8


def test_wrong_strings_are_refused(mesh_2d, mesh_arguments):
    x = torch.ones(8, 4).to("xla")
    for text in ("a, b c", "'a'", "{'a': 1}"):
        with pytest.raises(
            spmd.errors.PartitionSpecError,
            match=r"read from the literal of a tuple; got .*Pass str\(partition_spec\)",
        ):
            torch.ops.xla.dynamo_mark_sharding(x, *mesh_arguments, text)
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"read from the literal of a tuple, or None; got 'a, b c'. Pass their str\(\)",
    ):
        torch.ops.xla.dynamo_mark_sharding(x, *mesh_arguments[:2], "a, b c", "('a', None)")
    with pytest.raises(spmd.errors.MeshError, match="a mesh is read from a dict literal"):
        torch.ops.xla.aot_mark_sharding(x, "garbage", "('a', None)")
    with pytest.raises(spmd.errors.PartitionSpecError, match="'nowhere'"):
        torch.ops.xla.aot_mark_sharding(x, str(mesh_2d), "('nowhere', None)")
    with pytest.raises(spmd.errors.MeshError, match="name"):
        torch.ops.xla.dynamo_mark_sharding(
            torch.ones(8), *mesh_arguments[:2], "('a', 'b', 'c')", "('a',)"
        )
    assert custom_ops.parse_axis_names(" None ") is custom_ops.parse_axis_names("") is None


def test_traces_keep_the_marks_and_run_on_the_device(mesh_2d, mesh_arguments):
    def function(x, text):
        y = torch.ops.xla.dynamo_mark_sharding(x * 2, *mesh_arguments, "('a', 'b')")
        z = torch.ops.xla.aot_mark_sharding(y + 1, text, "(None, 'b')")
        return z, torch.autograd.grad(z.square().sum(), x)[0]

    x = torch.randn(8, 4)
    graph = make_fx(lambda x: function(x, str(mesh_2d)), tracing_mode="fake")(
        x.clone().requires_grad_()
    )
    names = [str(node.target) for node in graph.graph.nodes]
    # One in forward and one in backward.
    assert (
        names.count("xla.dynamo_mark_sharding.default") == 2
        and names.count("xla.aot_mark_sharding.default") == 2
    )
    z, gradient = graph(x.to("xla"))
    assert z.partition_spec == (None, "b")
    torch.testing.assert_close(z.cpu(), 2 * x + 1)
    torch.testing.assert_close(gradient.cpu(), 4 * (2 * x + 1))


def test_fake_tensors_and_dynamo(mesh_2d, mesh_arguments):
    with FakeTensorMode():
        x = torch.empty(8, 4, requires_grad=True)
        y = torch.ops.xla.dynamo_mark_sharding(x, *mesh_arguments, "('a', 'b')")
        assert y.shape == (8, 4) and y.requires_grad
        assert torch.ops.xla.aot_mark_sharding(x, str(mesh_2d), "('a', 'b')").shape == (8, 4)
    device_ids, mesh_shape, names = mesh_arguments

    text = str(mesh_2d)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        y = torch.ops.xla.dynamo_mark_sharding(x, device_ids, mesh_shape, names, "('a', None)")
        return torch.ops.xla.aot_mark_sharding(y + 1, text, "('a', 'b')") * 2

    x = torch.ones(8, 4, requires_grad=True)
    out = function(x)
    out.sum().backward()
    assert torch.equal(out, torch.full((8, 4), 4.0)) and torch.equal(
        x.grad, torch.full((8, 4), 2.0)
    )


def test_donation_is_not_steered():
    x = torch.ones(4).to("xla")
    spmd.sync()
    for wish in (True, False):
        assert torch.ops.xla.dynamo_set_buffer_donor_(x, wish) is x
    kept = x.detach().clone()
    y = x + 1
    spmd.sync()
    assert x.tolist() == kept.tolist() == [1] * 4 and y.tolist() == [2] * 4
    host = torch.ones(2, requires_grad=True)
    assert torch.ops.xla.dynamo_set_buffer_donor_(host, True) is host
