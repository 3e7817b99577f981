"""Tensors besides arithmetic: moving, printing, copying, pickling, saving, sharing, shards."""

import copy
import io
import pickle
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.sharding.sharding import ShardingType
from spmd_core.tensor.sharded_tensor import _rebuild_parameter

pytestmark = pytest.mark.one_device


def test_factories_make_device_tensors():
    for make in (torch.randn, torch.rand, torch.ones, torch.zeros, torch.empty):
        x = make(2, 3, device="xla")
        assert x.device.type == "xla" and x.shape == (2, 3) and x.dtype == torch.float32
    assert torch.full((2,), 7, device="xla").tolist() == [7, 7]
    assert torch.tensor([[1, 2], [3, 4]], device="xla").dtype == torch.int64
    assert torch.arange(2, 11, 3, device="xla").tolist() == [2, 5, 8]
    assert torch.linspace(0, 1, 5, device="xla").tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert torch.eye(2, device="xla").tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    ],
)
def test_round_trip_keeps_dtype_and_values(dtype):
    x = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    y = x.to("xla")
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu(), x)
    torch.testing.assert_close((y + y).cpu(), x + x)


def test_int64_keeps_all_its_bits():
    x = torch.tensor([2**40 + 1, -(2**50)])
    assert (x.to("xla") * 3).tolist() == (x * 3).tolist()


def test_to_copies_the_host_data():
    x = torch.ones(3)
    y = x.to("xla")
    x.zero_()
    assert y.tolist() == [1, 1, 1]
    z = y.cpu()
    z.zero_()
    assert y.tolist() == [1, 1, 1]


def test_a_module_moves_and_keeps_its_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.to("xla")
    assert model[1].weight is model[0].weight and isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.device.type == "xla" and model[0].weight.is_leaf
    model.cpu()
    assert model[0].weight.device.type == "cpu"


def test_a_model_is_created_on_the_device_without_host_data():
    spmd.sync()
    before = spmd.metrics.counters()
    with torch.device("xla"):
        model = nn.Linear(64, 64)
    assert model.weight.device.type == "xla"
    assert spmd.metrics.counter("uploaded_bytes") == before["uploaded_bytes"]
    bound = 1 / 8
    assert -bound <= model.weight.min().item() < model.weight.max().item() <= bound


def test_printing_shows_values_and_device():
    assert repr(torch.ones(2, device="xla")) == "tensor([1., 1.], device='xla:0')"
    x = torch.ones(2, device="xla", requires_grad=True)
    assert "requires_grad=True" in repr(x) and "grad_fn=<MulBackward0>" in str(x * 2)
    assert repr(nn.Parameter(torch.ones(1, device="xla"))).startswith(
        "Parameter containing:\ntensor([1.], device='xla:0'"
    )
    assert f"{torch.tensor(2.5, device='xla'):.1f}" == "2.5"


def test_printing_a_marked_tensor_shows_its_sharding(mesh_1d):
    p = nn.Parameter(torch.ones(2, device="xla"))
    spmd.mark_sharding(p, mesh_1d, ("x",))
    assert repr(p) == (
        "Parameter containing:\nXLAShardedTensor("
        "tensor([1., 1.], device='xla:0', requires_grad=True), sharding=('x',))"
    )


def test_printing_a_result_shows_how_the_partitioner_split_it(mesh_1d, num_devices):
    x = spmd.mark_sharding(torch.ones(num_devices).to("xla"), mesh_1d, ("x",))
    y = x + 1
    inner = f"tensor({[2.0] * num_devices}, device='xla:0')".replace(".0", ".")
    if num_devices == 1:
        assert repr(y) == inner
    else:
        ids = ",".join(map(str, range(num_devices)))
        spec = f"{{devices=[{num_devices}]{ids}}}"
        assert repr(y) == f"XLAShardedTensor({inner}, sharding='{spec}')"
        assert y.sharding_type is ShardingType.TILED
    assert repr(y.sum()).startswith("tensor(")


def test_scalars_and_truth():
    x = torch.tensor(3, device="xla")
    assert x.item() == 3 and int(x) == 3 and float(x) == 3.0 and bool(x > 2)
    assert [10, 20, 30, 40][x] == 40
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(torch.ones(2, device="xla"))


def test_numpy_asks_for_force():
    x = torch.ones(2, device="xla")
    with pytest.raises(TypeError, match=r"numpy\(force=True\)"):
        x.numpy()
    assert x.numpy(force=True).tolist() == [1, 1]


def test_memory_is_not_shared_by_dlpack():
    x = torch.ones(2, device="xla")
    for take in (np.from_dlpack, torch.from_dlpack, type(x).__dlpack__):
        with pytest.raises(BufferError, match=r"shape \(2,\)\. Pass tensor\.detach\(\)\.cpu\(\)"):
            take(x)
    assert np.from_dlpack(x.detach().cpu()).tolist() == [1, 1]
    assert jnp.asarray(spmd.to_jax(x)).tolist() == [1, 1]


def test_deepcopy_keeps_values_and_sharding(mesh_1d, num_devices):
    p = nn.Parameter(torch.arange(2.0 * num_devices, device="xla"))
    spmd.mark_sharding(p, mesh_1d, ("x",))
    (p * 2).sum().backward()
    q = copy.deepcopy(p)
    p.data.add_(1)
    assert (
        isinstance(q, nn.Parameter)
        and q.requires_grad
        and q.tolist() == list(range(2 * num_devices))
    )
    assert q.sharding == p.sharding and q.grad is None  # as a copy of torch's own Parameters
    plain = torch.ones(2, device="xla", requires_grad=True)
    (plain * 2).sum().backward()
    twin = copy.deepcopy(plain)
    assert twin.grad.tolist() == [2.0, 2.0] and twin.grad is not plain.grad
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("xla")
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[1].weight is twin[0].weight and twin[0].weight is not model[0].weight


def test_deepcopy_of_a_result_is_refused():
    x = torch.ones(2, device="xla", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"graph leaves.*detach\(\) or clone\(\)"):
        copy.deepcopy(x)


def test_pickle_and_torch_save():
    x = torch.randn(3, device="xla", requires_grad=True)
    y = pickle.loads(pickle.dumps(x))
    assert y.device.type == "xla" and y.requires_grad and y.tolist() == x.tolist()
    model = nn.Linear(2, 2).to("xla")
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state["model"]["weight"].device.type == "xla"
    other = nn.Linear(2, 2)
    other.load_state_dict(state["model"])
    torch.testing.assert_close(other.weight.detach(), model.weight.detach().cpu())
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again.weight, nn.Parameter) and again.weight.tolist() == model.weight.tolist()


def test_data_may_be_assigned():
    p = nn.Parameter(torch.zeros(2, device="xla"))
    p.data = torch.ones(3, device="xla")
    assert p.shape == (3,) and p.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"must be an xla tensor.*new\.to\('xla'\)"):
        p.data = torch.ones(3)


def test_the_class_gives_a_tensor_that_is_there(mesh_1d, num_devices):
    x = torch.arange(8.0).reshape(8, 1)
    t = spmd.XLAShardedTensor(x)
    assert torch.equal(t.cpu(), x) and spmd.XLAShardedTensor(t) is t
    marked = spmd.XLAShardedTensor(x, (num_devices,), (0, None), requires_grad=True)
    assert marked.partition_spec == (0, None) and marked.is_leaf and marked.requires_grad
    with pytest.raises(
        TypeError, match=r"takes a tensor; got list\. Pass one, or use torch\.tensor"
    ):
        spmd.XLAShardedTensor([1.0])
    with pytest.raises(TypeError, match=r"go together; got \(2,\) and None"):
        spmd.XLAShardedTensor(x, (2,))


def test_worker_threads_record_and_read():
    results = {}

    def work(i):
        x = torch.full((4,), float(i), device="xla")
        for _ in range(20):
            x = x + 1
            if i % 2:
                x.mul_(1)
        results[i] = x.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {i: 4.0 * (i + 20) for i in range(6)}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_replays_dropout(use_reentrant):
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).to("xla")
    x = torch.randn(4, 16, device="xla", requires_grad=True)
    torch.manual_seed(3)
    layer(x).sum().backward()
    plain = x.grad.clone()
    x.grad = None
    torch.manual_seed(3)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), plain.cpu())


def test_autograd_through_a_worker_thread():
    x = torch.ones(3, device="xla", requires_grad=True)
    out = []
    t = threading.Thread(target=lambda: ((x * 3).sum().backward(), out.append(x.grad.tolist())))
    t.start()
    t.join()
    assert out == [[3.0] * 3]


def test_local_shards_need_a_sharding():
    with pytest.raises(
        spmd.errors.SpmdError, match=r"needs a tensor with a sharding.*mark_sharding"
    ):
        _ = torch.ones(4, device="xla").local_shards


def test_shards_of_an_uneven_tensor_show_their_padding(mesh_1d, num_devices):
    n = 2 * num_devices + 1 if num_devices == 1 else 2 * num_devices - 1
    block = -(-n // num_devices)
    x = spmd.mark_sharding(torch.arange(float(n)).to("xla"), mesh_1d, ("x",))
    shards = x.local_shards
    assert all(s.data.shape == (block,) for s in shards)
    assert torch.cat([s.unpadded_data for s in shards]).tolist() == list(range(n))
    assert (
        shards[-1].indices == ([slice((num_devices - 1) * block, n, 1)] if num_devices > 1 else ...)
        and shards[-1].shard_device == f"CPU:{num_devices - 1}"
    )
    assert x.tolist() == list(range(n)) and (x * 2).sum().item() == n * (n - 1)
    whole = spmd.mark_sharding(torch.ones(3, device="xla"), mesh_1d, (None,)).local_shards
    assert all(s.indices is ... for s in whole) and [s.replica_id for s in whole] == list(
        range(num_devices)
    )


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_in_an_older_file_is_trainable_or_not(requires_grad):
    weight = torch.arange(8.0).reshape(4, 2)
    parameter = _rebuild_parameter(weight, requires_grad)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.device.type == "xla"
    assert parameter.requires_grad is requires_grad and torch.equal(parameter.cpu(), weight)


def test_a_format_is_for_one_number_as_in_torch():
    one, many = torch.tensor(2.5).to("xla"), torch.ones(2, device="xla")
    assert f"{one:.2f}" == "2.50" and f"{many}" == str(many)
    for tensor in (many, many.cpu()):
        with pytest.raises(TypeError, match="unsupported format string"):
            f"{tensor:.2f}"
