"""torch.compile with torch_xla's names: marks, devices and the global mesh inside of functions."""

import pytest
import torch

import torch_xla
import torch_xla.core.dynamo_bridge as bridge
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla import runtime as xr

# torch.compile imports inductor, which decorates methods for torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
N = xr.global_runtime_device_count()


@pytest.fixture
def mesh():
    yield xs.Mesh(range(N), (N, 1), ("x", "y"))
    torch._dynamo.reset()


def test_names_in_a_compiled_function(mesh):
    xs.set_global_mesh(mesh)

    @torch.compile(backend="openxla", fullgraph=True)
    def function(x):
        y = (
            x
            + torch.zeros(8, 4, device=xm.xla_device())
            + torch.ones(8, 4, device=torch_xla.device(0))
        )
        xs.mark_sharding(y, mesh, ("x", "y"))
        z = xs.mark_sharding_with_gradients(y * 2, xs.get_global_mesh(), ("x", None))
        u = xs.MarkShardingFunction.apply(z + 1, mesh, (None, "x"))
        v = xs.annotate_custom_sharding(u + 1, mesh, ("y", None))
        return y, z, u, xs.clear_sharding(v)

    found = function(torch.ones(8, 4, device="xla"))
    assert [t.partition_spec for t in found] == [("x", "y"), ("x", None), (None, "x"), None]
    assert [t[0, 0].item() for t in found] == [2, 4, 5, 6]


def test_wrong_marks_have_torch_xlas_errors(mesh):
    def mark(x, spec):
        return xs.mark_sharding(x + 1, mesh, spec)

    compiled = torch.compile(mark, fullgraph=True)
    x = torch.ones(8, 4, device="xla")
    with pytest.raises(AssertionError, match=r"Partition spec length \(1\) should be equal"):
        compiled(x, ("x",))
    with pytest.raises(ValueError, match="'nowhere'"):
        compiled(x, ("x", "nowhere"))
    # Dynamo wraps the error in some releases.
    with pytest.raises((IndexError, RuntimeError), match="there is one logical device"):
        torch.compile(lambda x: x + torch.ones(4, device=torch_xla.device(1)))(x)


def test_other_functions_of_the_package_run_between_the_graphs(mesh):
    @torch.compile
    def function(x):
        y = xs.mark_sharding(x + 1, xs.get_1d_mesh("x"), ("x", None))
        torch_xla.sync()
        return y * 2

    found = function(torch.ones(8, 4, device="xla"))
    assert found.tolist() == [[4.0] * 4] * 8


def test_the_bridge():
    x = torch.arange(3.0)
    on_device = x.to("xla")
    evaluated = torch.compile(lambda x: x.sin() + 1, backend="openxla_eval")(on_device)
    torch.testing.assert_close(evaluated.cpu(), x.sin() + 1)
    graph = torch.fx.symbolic_trace(lambda x: x * 2)
    assert bridge.partition_fx_func_for_cpu_fallback(graph) is graph
    compiled = bridge.extract_compiled_graph(graph, (on_device,))
    with bridge.alias_with_buffer_donor_config():
        assert compiled(on_device).tolist() == [0.0, 2.0, 4.0]
    assert bridge.is_xla_tensor(on_device) and not bridge.is_xla_tensor(x)
    assert bridge.all_tensors_on_xla_device([on_device, 1]) is True
    assert bridge.all_tensors_on_xla_device({"a": on_device, "b": x}) is False
