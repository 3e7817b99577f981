"""Parameters stay the same objects through every conversion of a module, as eager torch's do."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd

CONVERSIONS = {
    "cpu": lambda m: m.cpu(),
    "to cpu": lambda m: m.to("cpu"),
    "to xla": lambda m: m.to("xla"),
    "there and back": lambda m: m.cpu().to("xla"),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float64),
    "to_empty": lambda m: m.to_empty(device="xla"),
    "to_empty on the host": lambda m: m.to_empty(device="cpu"),
    "_apply": lambda m: m._apply(lambda t: t.cpu() * 2),
}
DEVICES = ["cpu", "xla"]


class Net(nn.Module):
    """Tied weights, a buffer, a recurrent layer (which refers to its weights weakly)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.lstm(self.embedding(x))[0]
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def step(model, optimizer, device):
    x = torch.arange(12).view(2, 6).to(device) % 7
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("start", DEVICES)
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_parameters_stay_the_same_objects(convert, start):
    model = Net().to(start)
    x = torch.arange(6).view(1, 6).to(start)
    model(x).float().sum().backward()
    before = list(model.parameters())
    references = [weakref.ref(p) for p in before]
    expected = convert(copy.deepcopy(model)) if start == "cpu" else None
    assert convert(model) is model
    after = list(model.parameters())
    assert len(after) == len(before) and all(a is b for a, b in zip(after, before))
    assert all(r() is p for r, p in zip(references, after))
    assert model.head.weight is model.embedding.weight
    for p in after:
        assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        assert p.grad.device == p.device and p.grad.dtype is p.dtype
        assert type(p) is (nn.Parameter if p.device.type == "cpu" else spmd.XLAShardedTensor)
    if expected is not None and convert is not CONVERSIONS["to_empty on the host"]:
        for p, q in zip(after, expected.parameters()):
            assert (p.dtype, p.device) == (q.dtype, q.device)


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_an_optimizer_made_before_goes_on_training(settings):
    torch.manual_seed(3)
    reference = Net()
    model = copy.deepcopy(reference).to("xla")
    losses = []
    for m, devices in ((reference, ["cpu"] * 4), (model, ["xla", "cpu", "xla", "xla"])):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.0, **settings)
        losses.append([step(m.to(d), optimizer, d) for d in devices])
    torch.testing.assert_close(*(torch.tensor(x) for x in losses), rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0] * 0.9


def test_a_state_on_the_device_is_used_again():
    torch.manual_seed(3)
    reference = Net()
    model = copy.deepcopy(reference).to("xla")
    losses = []
    for m, device in ((reference, "cpu"), (model, "xla")):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.05)
        losses.append([step(m, optimizer, device) for _ in range(2)])
        m.cpu().to(device)
        losses[-1] += [step(m, optimizer, device) for _ in range(2)]
    torch.testing.assert_close(*(torch.tensor(x) for x in losses), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [("xla",), ("xla", "cpu"), ("xla", "cpu", "xla")])
@pytest.mark.parametrize("start", DEVICES)
def test_hooks_gradients_and_attributes_stay(start, way):
    layer = nn.Linear(3, 2).to(start)
    weight, called = layer.weight, []
    weight.note = "mine"
    before = weight.register_hook(lambda g: called.append("hook") or g * 2)
    after = weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    weight.grad = torch.ones(2, 3, device=start)
    for device in way:
        layer.to(device)
    assert weight.note == "mine" and weight.grad.tolist() == [[1.0] * 3] * 2
    x = torch.ones(1, 3, device=way[-1])
    layer(x).sum().backward()
    assert called == ["hook", "after"] and weight.grad.tolist() == [[3.0] * 3] * 2
    before.remove()
    after.remove()
    layer(x).sum().backward()
    assert called == ["hook", "after"] and weight.grad.tolist() == [[4.0] * 3] * 2


def test_a_mark_comes_back_with_its_parameter(mesh_1d, num_devices):
    layer = nn.Linear(2 * num_devices, 4).to("xla")
    spmd.mark_sharding(layer.weight, mesh_1d, (None, "x"))
    sharding = layer.weight.sharding
    layer.weight.grad = torch.ones_like(layer.weight)
    layer.cpu()
    assert not hasattr(layer.weight, "_gradient_sharding") and vars(layer.weight) == {}
    x = torch.ones(1, 2 * num_devices)
    layer(x).sum().backward()
    assert pickle.loads(pickle.dumps(layer)).weight.grad is None
    layer.to("xla")
    assert layer.weight.sharding is layer.weight.grad.sharding is sharding
    layer.zero_grad()
    layer(x.to("xla")).sum().backward()
    assert layer.weight.grad.sharding is sharding
    assert layer.bias.sharding is None
    layer.double()
    assert layer.weight.sharding is sharding and layer.weight.dtype is torch.float64
    assert nn.Linear(2 * num_devices, 4).to("xla").weight.sharding is None


def test_a_parameter_that_left_is_not_kept_alive(mesh_1d, num_devices):
    layer = nn.Linear(num_devices, 4).to("xla")
    spmd.mark_sharding(layer.weight, mesh_1d, (None, "x"))
    gone = weakref.ref(layer.cpu().weight)
    del layer
    assert gone() is None


@pytest.mark.parametrize("way", [("cpu", "xla"), ("xla", "cpu")])
def test_a_graph_from_before_the_move_is_refused(way):
    layer = nn.Linear(3, 2).to(way[0])
    x = torch.ones(1, 3, device=way[0])
    result = layer(x).sum()
    layer.to(way[0]).to(way[1])
    message = (
        r"parameter of shape \((2, 3|2,)\) moved.*Call backward\(\) before module.to\(device\)"
    )
    with pytest.raises(spmd.errors.SpmdError, match=message):
        result.backward()
    # As the message says: before the move, or with a new result.
    layer(x.to(way[1])).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 3] * 2


def test_old_weight_norm_moves_with_its_graph():
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="deprecated"):
        layer = torch.nn.utils.weight_norm(nn.Linear(3, 4))
    x = torch.randn(2, 3)
    expected = layer(x)
    expected.sum().backward()
    grad = layer.weight_g.grad.clone()
    layer.zero_grad()
    g = layer.weight_g
    found = layer.to("xla")(x.to("xla"))
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight_g.grad.cpu(), grad, rtol=1e-5, atol=1e-6)
    assert layer.weight_g is g
    torch.testing.assert_close(layer.cpu()(x), expected, rtol=1e-5, atol=1e-6)


def test_modules_that_never_meet_the_device_are_torchs_own():
    layer = nn.Linear(3, 2)
    weight, memory = layer.weight, layer.weight.data_ptr()
    assert layer.double() is layer and layer.weight is weight and memory != weight.data_ptr()
    assert layer.to_empty(device="meta").weight is not weight  # as torch does
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer = nn.Linear(3, 2)
        weight = layer.weight
        assert layer.to("xla").weight is not weight and layer.weight.device.type == "xla"
        weight = layer.weight
        assert layer.cpu().weight is not weight and layer.weight.device.type == "cpu"
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_swapping_is_still_possible():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = nn.Linear(3, 2)
        weight = layer.weight
        for device in ("xla", "cpu", "xla"):
            assert layer.to(device).weight is weight and weight.device.type == device
        layer(torch.ones(1, 3, device="xla")).sum().backward()
        assert weight.grad.tolist() == [[1.0] * 3] * 2
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_frozen_and_integer_parameters():
    layer = nn.Linear(3, 2).requires_grad_(False)
    layer.index = nn.Parameter(torch.arange(3), requires_grad=False)
    objects = list(layer.parameters())
    for device in ("xla", "cpu", "xla"):
        layer.to(device)
        assert [p.requires_grad for p in layer.parameters()] == [False] * 3
        assert all(a is b for a, b in zip(layer.parameters(), objects))
    assert layer.half().index.dtype is torch.int64
    assert layer.index.tolist() == [0, 1, 2] and layer.weight.dtype is torch.float16


def test_moves_in_inference_mode():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    weight, x = layer.weight, torch.randn(4, 3)
    with torch.inference_mode():
        expected = layer(x)
        found = layer.to("xla")(x.to("xla"))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.cpu()(x), expected, rtol=1e-5, atol=1e-6)
    assert layer.weight is weight


def test_modules_with_their_own_apply():
    class Own(nn.Linear):
        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            self.extra = fn(torch.ones(2))
            return self

    layer = nn.Sequential(Own(3, 2))
    weight = layer[0].weight
    assert layer.to("xla")[0].extra.device.type == "xla" and layer[0].weight is weight
    assert layer.cpu()[0].extra.device.type == "cpu" and layer[0].weight is weight


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_move_with_all_that_they_contain(tmp_path):
    x, path = torch.randn(5, 4), str(tmp_path / "module.pt")
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    model = nn.Sequential(scripted, nn.Linear(4, 2))
    expected, kept = model(x), model[1].weight
    model.to("xla")
    tensors = [*model.parameters(), *model.buffers()]
    assert {t.device.type for t in tensors} == {"xla"} and kept is model[1].weight
    found = model(x.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)
    found.sum().backward()
    assert all(p.grad is not None and p.requires_grad for p in model.parameters())
    with pytest.raises(
        spmd.errors.UnsupportedOpError, match=r"torch\.jit\.save\(module\.cpu\(\), path\)"
    ):
        torch.jit.save(scripted, path)
    torch.jit.save(scripted.cpu(), path)
    loaded = torch.jit.load(path)
    torch.testing.assert_close(loaded(x), scripted(x))
    torch.testing.assert_close(loaded.to("xla")(x.to("xla")).cpu(), scripted(x))
    assert all(p.requires_grad for p in loaded.parameters())
