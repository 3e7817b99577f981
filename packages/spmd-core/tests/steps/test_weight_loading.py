"""Weights from safetensors files: equal to torch's own loading, block by block, or refused."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from children import figures
from fsdp_models import Tied
from safetensors.torch import save_file
from state import reset
from torch import nn

import spmd_core as spmd
from spmd_core import metrics
from spmd_core.errors import DataError
from spmd_core.steps import weight_loading


def network():
    """Dims that no mesh divides, a buffer of integers, an empty tensor."""
    net = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 16, bias=False))
    net.register_buffer("empty", torch.zeros(0, 3))
    return net


def saved(tmp_path, make=network):
    torch.manual_seed(1)
    right = make()
    for tensor in right.state_dict().values():
        tensor.normal_() if tensor.is_floating_point() else tensor.fill_(3)
    state = {name: t.detach().clone() for name, t in right.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    return right


def lazy(make=network):
    with torch.device("xla"):
        return make()


def check_equal(module, right):
    for name, tensor in right.state_dict().items():
        found = module.state_dict()[name]
        torch.testing.assert_close(found.cpu(), tensor.to(found.dtype), rtol=0, atol=0, msg=name)


@pytest.mark.one_device
def test_each_device_gets_its_blocks_and_nothing_is_computed(tmp_path, mesh_2d, num_devices):
    right = saved(tmp_path)
    net = lazy()
    spmd.mark_sharding(net[0].weight, mesh_2d, ("a", "b"))
    spmd.mark_sharding(net[2].weight, mesh_2d, (("b", "a"),))
    last = spmd.Mesh([num_devices - 1], (1,))
    spmd.mark_sharding(net[1].running_mean, last, (0,))
    specs = {name: t.sharding_spec for name, t in net.state_dict().items()}
    assert spmd.load_safetensors(net, tmp_path) == ([], [])
    assert metrics.counter("cuts") == 0 and metrics.counter("compiles") == 0
    found = net.state_dict()
    assert all(found[name].sharding_spec == spec for name, spec in specs.items() if spec)
    for shard in net[0].weight.local_shards:
        where = ... if shard.indices is ... else tuple(shard.indices)
        assert torch.equal(shard.unpadded_data, right[0].weight[where])
    check_equal(net, right)
    spmd.sync()
    assert metrics.counter("compiles") == 0


def test_what_was_loaded_trains_as_in_eager_torch(tmp_path, mesh_2d):
    right = saved(tmp_path)
    net = lazy()
    spmd.mark_sharding(net[2].weight, mesh_2d, ("a", "b"))
    spmd.load_safetensors(net, tmp_path)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (net, right)]
    for _ in range(3):
        x = torch.randn(8, 10)
        losses = [net(x.to("xla")).square().mean(), right(x).square().mean()]
        for loss, optimizer in zip(losses, optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pair", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_values_get_the_dtype_of_the_module(tmp_path, mesh_1d, pair):
    stored, own = pair
    right = saved(tmp_path, lambda: nn.Linear(6, 5).to(stored))
    net = lazy(lambda: nn.Linear(6, 5, dtype=own))
    spmd.mark_sharding(net.weight, mesh_1d, (None, "x"))
    spmd.load_safetensors(net, tmp_path)
    assert net.weight.dtype is own
    check_equal(net, right)


def test_large_tensors_are_read_in_pieces(tmp_path, mesh_1d, monkeypatch):
    right = saved(tmp_path)
    monkeypatch.setattr(weight_loading, "_MAPPED_BYTES", 1)
    net = lazy()
    spmd.mark_sharding(net[0].weight, mesh_1d, (None, "x"))
    spmd.load_safetensors(net, tmp_path)
    check_equal(net, right)


def test_a_module_on_the_cpu(tmp_path):
    right = saved(tmp_path)
    net = network()
    kept = net[0].weight
    spmd.load_safetensors(net, tmp_path / "model.safetensors")
    assert net[0].weight is kept
    check_equal(net, right)


def test_one_name_of_a_tied_weight_is_enough(tmp_path):
    right = saved(tmp_path, Tied)
    state = right.state_dict()
    tied = [n for n, t in state.items() if t.data_ptr() == right.embedding.weight.data_ptr()]
    assert len(tied) == 2
    for kept in tied:
        file = {n: t.clone() for n, t in state.items() if n == kept or n not in tied}
        save_file(file, tmp_path / "one.safetensors")
        net = lazy(Tied)
        assert spmd.load_safetensors(net, tmp_path / "one.safetensors") == ([], [])
        check_equal(net, right)
    # Both, with equal values, and with others.
    net = lazy(Tied)
    spmd.load_safetensors(net, tmp_path)
    check_equal(net, right)
    file = {n: t.clone() for n, t in state.items()}
    file[tied[1]][-1, -1] += 1
    save_file(file, tmp_path / "both.safetensors")
    with pytest.raises(DataError, match=f"different ones there: {tied[0]}, {tied[1]}"):
        spmd.load_safetensors(net, tmp_path / "both.safetensors")


def test_wrappers_leave_the_names_alone(tmp_path, mesh_1d):
    right = saved(tmp_path, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    net = lazy(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    spmd.checkpoint_module(net[0])
    for layer in net:
        spmd.fully_shard(layer, mesh_1d, axis="x")
    spmd.load_safetensors(net, tmp_path)
    check_equal(net, right)
    assert net[0].weight.partition_spec == ("x", None)


def test_all_problems_are_listed_and_nothing_is_loaded(tmp_path):
    file = {
        "0.weight": torch.ones(7, 9),
        "0.bias": torch.ones(7, dtype=torch.int32),
        "1.weight": torch.ones(7).to(torch.float8_e4m3fn),
        "1.bias": torch.ones(7),
        "1.num_batches_tracked": torch.tensor(1.0),
        "other": torch.ones(2),
    }
    save_file(file, tmp_path / "f.safetensors")
    net = network()
    before = net[1].bias.clone()
    with pytest.raises(DataError) as error:
        spmd.load_safetensors(net, tmp_path / "f.safetensors")
    text = str(error.value)
    for line in (
        "another shape: 0.weight, [7, 9] for [7, 10]",
        "another dtype: 0.bias, torch.int32 for torch.float32",
        "another dtype: 1.weight, torch.float8_e4m3fn for torch.float32",
        "another dtype: 1.num_batches_tracked, torch.float32 for torch.int64",
        "missing: 2.weight, float32[16, 7]",
        "unexpected: other, [2]",
        "got 9 that are not",
        "pass strict=False for missing and unexpected ones",
    ):
        assert line in text
    assert torch.equal(net[1].bias, before)
    with pytest.raises(DataError, match="got 4 that are not"):
        spmd.load_safetensors(net, tmp_path / "f.safetensors", strict=False)
    keys = spmd.load_safetensors({"1.bias": net[1].bias}, tmp_path / "f.safetensors", strict=False)
    assert keys.missing_keys == [] and "other" in keys.unexpected_keys
    assert torch.equal(net[1].bias, torch.ones(7))


def test_integers_convert_to_wider_ones_only(tmp_path):
    save_file({"n": torch.tensor([7], dtype=torch.int32)}, tmp_path / "n.safetensors")
    wide = torch.zeros(1, dtype=torch.int64)
    spmd.load_safetensors({"n": wide}, tmp_path / "n.safetensors")
    assert wide.item() == 7
    for dtype in (torch.int16, torch.bool, torch.float64, torch.complex64):
        with pytest.raises(DataError, match=f"torch.int32 for {dtype}"):
            spmd.load_safetensors(
                {"n": torch.zeros(1, dtype=dtype, device="xla")}, tmp_path / "n.safetensors"
            )


def test_tensors_that_cannot_be_filled(tmp_path):
    save_file({"t": torch.ones(2)}, tmp_path / "t.safetensors")
    with pytest.raises(DataError, match=r"on device meta: t; call module\.to_empty first"):
        spmd.load_safetensors({"t": torch.ones(2, device="meta")}, tmp_path / "t.safetensors")
    view = torch.zeros(3, 2, device="xla")[1]
    with pytest.raises(DataError, match=r"a view of another tensor: t; load before"):
        spmd.load_safetensors({"t": view}, tmp_path / "t.safetensors")
    with pytest.raises(DataError, match=r"safetensors holds tensors alone; got 't' \(int\)"):
        spmd.load_safetensors({"t": 3}, tmp_path / "t.safetensors")


def _length(number):
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-4], "file not fully covered"),
        (lambda data: data[:20], "cannot be read"),
        (lambda data: b"", r"\(0 bytes\) cannot be read"),
        (lambda data: data + b"more", "file not fully covered"),
        (lambda data: _length(8) + b"{not json" + data[17:], "invalid JSON in header"),
        (lambda data: b"PK\x03\x04" + bytes(200), "cannot be read"),
    ],
    ids=["cut data", "cut header", "empty", "too long", "no JSON", "another format"],
)
def test_damaged_files(tmp_path, change, message):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        spmd.load_safetensors(network(), tmp_path)
    assert str(path) in str(error.value) and "Copy or download it again" in str(error.value)


def test_damaged_indices(tmp_path):
    index, part = tmp_path / "model.safetensors.index.json", tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(2, 2)}, part)
    for text in ("{", "[]", '{"metadata": {}}', '{"weight_map": {"weight": 3}}'):
        index.write_text(text)
        with pytest.raises(DataError, match="an index is JSON with a file for each tensor"):
            spmd.load_safetensors(nn.Linear(2, 2), tmp_path)
    names = {"weight": part.name, "bias": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DataError, match=r"names b\.safetensors, which is not there"):
        spmd.load_safetensors(nn.Linear(2, 2), tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": part.name, "bias": part.name}}))
    with pytest.raises(DataError, match=r"names 'bias' in a\.safetensors, which cannot be found"):
        spmd.load_safetensors(nn.Linear(2, 2), tmp_path)
    save_file({"bias": torch.ones(2)}, tmp_path / "b.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    net = nn.Linear(2, 2)
    spmd.load_safetensors(net, tmp_path)
    assert net.weight.sum() == 4 and net.bias.sum() == 2


def test_paths_without_weights(tmp_path):
    with pytest.raises(DataError, match="which is neither"):
        spmd.load_safetensors(nn.Linear(2, 2), tmp_path / "missing")
    with pytest.raises(DataError, match="with no file"):
        spmd.load_safetensors(nn.Linear(2, 2), tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match=re.escape("with pytorch_model.bin. Name the file")):
        spmd.load_safetensors(nn.Linear(2, 2), tmp_path)


def test_without_the_package(monkeypatch):
    reset()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "spmd_core.steps.weight_loading")
    with pytest.raises(ImportError, match=r"pip install 'spmd-core\[safetensors\]'"):
        _ = spmd.load_safetensors
    assert callable(spmd.save_safetensors)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak there")
def test_memory_grows_by_the_shards_alone(tmp_path):
    """A file of 64 MB in bfloat16; the shards are float32, and lie in the process's memory."""
    rows = 2048
    state = {f"{i}.weight": torch.zeros(rows, rows, dtype=torch.bfloat16) for i in range(8)}
    save_file(state, tmp_path / "model.safetensors")
    found = figures(
        f"""
import json, torch
spmd.simulate(8)
spmd.use_spmd()
mesh = spmd.Mesh(range(8), (8,), ("x",))
torch.ones(8, device="xla").sum().item()
with torch.device("xla"):
    net = torch.nn.Sequential(*(torch.nn.Linear({rows}, {rows}, bias=False) for _ in range(8)))
for i, layer in enumerate(net):
    spmd.mark_sharding(layer.weight, mesh, (None, "x") if i % 2 else ("x",))
def peak():
    # Not getrusage, which knows the peak of the parent too.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
spmd.load_safetensors(net, {str(tmp_path)!r})
loaded = peak()
spmd.save_safetensors(net, {str(tmp_path / "saved")!r})
print(json.dumps([before, loaded, peak()]))
"""
    )
    before, loaded, written = found
    shards, tensor = 8 * rows * rows * 4, rows * rows * 4
    assert shards * 0.8 < loaded - before < shards + 80e6
    assert written - loaded < tensor + 60e6
