"""Marks inside of compiled functions."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd

# torch.compile imports inductor, which decorates methods for torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.mark.one_device
@pytest.mark.parametrize("size", [8, 6])
def test_marks_inside_a_compiled_function(mesh_2d, size):
    sharding = spmd.ShardingSpec(mesh_2d, (None, ("a", "b")))

    @torch.compile(fullgraph=True)
    def function(x, w):
        y = x @ w
        spmd.mark_sharding(y, mesh_2d, ("a", "b"))
        z = spmd.mark_sharding(y * 2, mesh_2d, spmd.PartitionSpec("a"), inplace=False)
        u = spmd.mark_sharding(z + 1, sharding)
        v = spmd.clear_sharding(spmd.constrain(u.sin(), mesh_2d, ("b", None)))
        return y, z, u, v

    x, w = torch.randn(size, 4), torch.randn(4, 8).requires_grad_()
    on_device = w.detach().to("xla").requires_grad_()
    y, z, u, v = function(x.to("xla"), on_device)
    assert [t.partition_spec for t in (y, z, u)] == [("a", "b"), ("a", None), (None, ("a", "b"))]
    expected = (2 * (x @ w) + 1).sin()
    torch.testing.assert_close(v.cpu(), expected, rtol=1e-4, atol=1e-5)
    v.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), w.grad, rtol=1e-4, atol=1e-5)


class Marked(nn.Module):
    """Marks its result as `torch_xla`'s documents do, by the operator of strings."""

    def __init__(self, num_devices, names):
        super().__init__()
        self.num_devices, self.names = num_devices, names
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        output = self.layer(x)
        device_ids = [i for i in range(self.num_devices)]  # noqa: C416 - as the document has it
        mesh_shape = [self.num_devices, 1]
        torch.ops.xla.dynamo_mark_sharding(
            output, device_ids, mesh_shape, "('data', 'model')", self.names
        )
        return output.relu()


@pytest.mark.parametrize("backend", ["openxla", "aot_eager"])
def test_the_operator(backend, num_devices):
    model = Marked(num_devices, "('data', 'model')")
    on_device = copy.deepcopy(model).to("xla")
    compiled = torch.compile(on_device, backend=backend, fullgraph=True)
    x = torch.randn(8, 4)
    found, expected = compiled(x.to("xla")), model(x)
    assert "sharding_constraint" in spmd.debugging.stablehlo(found)
    torch.testing.assert_close(found.cpu(), expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(on_device.layer.weight.grad.cpu(), model.layer.weight.grad)


def test_parameters_are_marked_themselves(mesh_1d):
    layer = nn.Linear(8, 8, device="xla")

    @torch.compile(fullgraph=True)
    def mark():
        spmd.mark_sharding(layer.weight, mesh_1d, ("x", None))

    mark()
    assert layer.weight.partition_spec == ("x", None)


def test_the_global_mesh_is_guarded(mesh_1d, mesh_2d):
    @torch.compile(fullgraph=True)
    def function(x):
        y = x + torch.zeros(8, device=spmd.device())
        return spmd.mark_sharding(y, spmd.get_global_mesh(), (0,))

    for mesh in (mesh_1d, mesh_2d):
        spmd.set_global_mesh(mesh)
        assert function(torch.ones(8, device="xla")).sharding.mesh == mesh


def test_wrong_arguments_have_their_own_errors(mesh_1d):
    def marked(device, spec):
        compiled = torch.compile(lambda x: spmd.mark_sharding(x * 2, mesh_1d, spec), fullgraph=True)
        return compiled(torch.ones(8, device=device))

    with pytest.raises(spmd.errors.PartitionSpecError, match=r"'nowhere'.* Use one of 'x'"):
        marked("xla", ("nowhere",))
    with pytest.raises(spmd.errors.DeviceMismatchError, match=r"a tensor on cpu\. Move it first"):
        torch.compile(
            lambda x: spmd.mark_sharding(x * 2, mesh_1d, ("x",)), fullgraph=True, backend="eager"
        )(torch.ones(8))
    assert marked("xla", ("x",)).tolist() == [2.0] * 8


def test_a_mesh_made_inside_breaks_the_graph(num_devices):
    def function(x):
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
        return spmd.mark_sharding(x * 2, mesh, ("x",))

    x = torch.ones(8, device="xla")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Avoid calling .*Mesh\.__init__"):
        torch.compile(function, fullgraph=True)(x)
    torch._dynamo.reset()
    found = torch.compile(function)(x)
    assert found.partition_spec == ("x",) and found.tolist() == [2.0] * 8


def test_functions_of_tensors_are_calls_of_the_graph(mesh_2d):
    torch.manual_seed(0)
    x, weight = torch.randn(8, 6, 4), torch.randn(10, 4)
    target, documents = torch.randint(0, 10, (8, 6)), torch.randint(0, 2, (8, 6)).sort().values

    def loss(x, weight, target, documents):
        q = x[:, None]
        y = spmd.document_attention(q, q, q, documents).flatten(0, 1)
        return spmd.linear_cross_entropy(y, weight, target, num_chunks=2) * 2

    compiled = torch.compile(loss, fullgraph=True)
    leaves = [
        [t.detach().to(device).requires_grad_() for t in (x, weight)] for device in ("cpu", "xla")
    ]
    spmd.mark_sharding(leaves[1][0], mesh_2d, ("a", None, None))
    spmd.mark_sharding(leaves[1][1], mesh_2d, (None, "b"))
    expected = loss(*leaves[0], target, documents)
    found = compiled(*leaves[1], target.to("xla"), documents.to("xla"))
    assert "class_sums" in spmd.debugging.operations(found)
    torch.testing.assert_close(found.cpu(), expected)
    found.backward()
    expected.backward()
    for on_device, leaf in zip(leaves[1], leaves[0]):
        torch.testing.assert_close(on_device.grad.cpu(), leaf.grad, rtol=1e-4, atol=1e-5)
