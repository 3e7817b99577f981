"""The user's subclasses of Tensor and Parameter behave on the device as they do on the CPU."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd

VALUES = torch.arange(1.0, 7).view(2, 3)


class Plain(torch.Tensor):
    pass


class Counting(torch.Tensor):
    """Counts calls, and carries an attribute from its arguments to its results."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.calls += 1
        assert all(t in (Counting, torch.Tensor) for t in types)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Counting) and isinstance(args[0], Counting):
            result.unit = getattr(args[0], "unit", None)
        return result


class Scaled(nn.Parameter):
    """As quantizing libraries write parameters: with attributes, made by `__new__`."""

    def __new__(cls, data, scale=1.0, requires_grad=True):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale
        return made

    def scaled(self):
        return self * self.scale


class Below(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError


class Slotted(torch.Tensor):
    __slots__ = ("extra",)


CLASSES = [Plain, Counting]
USES = {
    "arithmetic": lambda x: x * 2 + 1,
    "reversed": lambda x: 3 - x,
    "with a tensor": lambda x: x + torch.ones(3, device=x.device),
    "matmul": lambda x: x @ x.t(),
    "function": lambda x: F.softmax(x, -1),
    "view": lambda x: x.view(-1)[2:],
    "select": lambda x: x[0, 1],
    "detach": lambda x: x.detach(),
    "split": lambda x: torch.cat(x.split(1)),
    "stack": lambda x: torch.stack([x, x]),
    "max": lambda x: x.max(dim=1).values,
    "dtype": lambda x: x.to(torch.float64),
    "boolean": lambda x: x > 2,
    "in place": lambda x: x.mul_(2),
    "in place view": lambda x: x.t_(),
    "write": lambda x: x[0].zero_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.clone().resize_(2, 2),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "like": lambda x: torch.zeros_like(x),
    "new": lambda x: x.new_ones(2),
    "clone": lambda x: x.clone(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "plain": lambda x: x.as_subclass(torch.Tensor),
    "again": lambda x: x.as_subclass(Plain),
    "parameter": nn.Parameter,
    "item": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
}


def user_type(x, device):
    """The type, with the device's own class as torch's."""
    assert not isinstance(x, torch.Tensor) or x.device.type == device
    if type(x) is spmd.XLAShardedTensor:
        return nn.Parameter if isinstance(x, nn.Parameter) else torch.Tensor
    return getattr(type(x), "_user_class", type(x))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("cls", CLASSES)
def test_operations_give_what_they_give_on_the_cpu(cls, use):
    found = []
    for device in ("cpu", "xla"):
        x = VALUES.to(device, copy=True).as_subclass(cls)
        x.unit = "m"
        assert isinstance(x, cls) and type(x).__name__ == cls.__name__
        before = Counting.calls
        result = use(x)
        found.append(
            [
                user_type(result, device),
                getattr(result, "unit", None),
                result.tolist() if isinstance(result, torch.Tensor) else result,
                x.tolist(),
                tuple(x.shape),
                x.unit,
                Counting.calls > before,
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("cls", CLASSES)
def test_moves_between_devices_keep_the_class(cls):
    on_host = VALUES.clone().as_subclass(cls)
    moved = on_host.to("xla")
    assert isinstance(moved, cls) and isinstance(moved, spmd.XLAShardedTensor)
    for back in (moved.cpu(), moved.to("cpu")):
        assert type(back) is cls and torch.equal(back, on_host)
    assert type(moved.to("xla").half()) is type(moved)
    spmd.sync()
    assert "tensor([[1., 2., 3.]" in repr(moved.as_subclass(torch.Tensor))
    assert "1., 2., 3." in repr(moved) and "xla:0" in repr(moved)


def test_gradients_flow_through_the_class():
    grads = []
    for device in ("cpu", "xla"):
        x = VALUES.to(device, copy=True).requires_grad_()
        y = x.as_subclass(Plain)
        assert y.requires_grad and y.grad_fn is not None
        (y * y).sum().backward()
        leaf = VALUES.to(device, copy=True).as_subclass(Plain).requires_grad_()
        (leaf.exp() * 2).sum().backward()
        grads.append((x.grad.tolist(), leaf.grad.tolist()))
    torch.testing.assert_close(*(torch.tensor(g) for g in grads), rtol=1e-5, atol=1e-6)


def test_a_copy_keeps_class_and_attributes():
    x = VALUES.to("xla", copy=True).as_subclass(Plain)
    x.unit = ["m"]
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(copied) is type(x) and copied.unit == ["m"] and copied.unit is not x.unit
        copied.zero_()
    assert x.tolist() == VALUES.tolist()
    shared = copy.copy(x)
    assert shared.unit is x.unit and shared.data_ptr() == x.data_ptr()


def test_it_shares_the_memory():
    x = VALUES.to("xla", copy=True)
    y = x.as_subclass(Plain)
    y[0].zero_()
    assert x.tolist() == [[0.0, 0, 0], [4, 5, 6]] and y.data_ptr() == x.data_ptr()
    x.add_(1)
    assert y.tolist() == [[1.0, 1, 1], [5, 6, 7]]


def test_marks_work(mesh_1d, num_devices):
    x = torch.ones(num_devices, 2, device="xla").as_subclass(Plain)
    assert spmd.mark_sharding(x, mesh_1d, ("x", None)) is x
    assert x.sharding is not None and (x + 1).sum().item() == 4 * num_devices


def test_parameters_of_quantizers():
    results = []
    for device in ("cpu", "xla"):
        layer = nn.Linear(3, 2)
        layer.weight = weight = Scaled(VALUES.clone(), scale=3.0)
        layer.bias.data.zero_()
        layer.to(device)
        assert layer.weight is weight and isinstance(weight, Scaled) and weight.scale == 3.0
        assert isinstance(weight, nn.Parameter) and next(layer.parameters()) is weight
        direct = Scaled(VALUES.to(device), scale=3.0, requires_grad=False)
        assert type(direct) is type(weight) and not direct.requires_grad and direct.is_leaf
        F.linear(torch.ones(1, 3, device=device), weight.scaled()).sum().backward()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        optimizer.step()
        again = copy.deepcopy(weight)
        read = pickle.loads(pickle.dumps(weight))
        state = io.BytesIO()
        torch.save(layer.state_dict(), state)
        state.seek(0)
        results.append(
            [
                weight.grad.tolist(),
                weight.tolist(),
                again.tolist(),
                isinstance(again, Scaled),
                read.scale,
                user_type(read, device),
                torch.load(state)["weight"].tolist(),
                user_type(weight * 2, device),
                user_type(weight.data, device),
            ]
        )
        layer.cpu()
        assert layer.weight is weight and type(weight) is Scaled and weight.scale == 3.0
    assert results[0] == results[1]


def test_a_parameter_made_of_a_subclass():
    layer = nn.Module()
    layer.weight = nn.Parameter(VALUES.clone().as_subclass(Plain))
    weight = layer.weight
    for device in ("xla", "cpu", "xla"):
        layer.to(device)
        assert layer.weight is weight and isinstance(weight, nn.Parameter)
        assert user_type(weight, device) is Plain and weight.requires_grad
        weight.grad = None
        (weight * 2).sum().backward()
        assert weight.grad.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("made_on", ["cpu", "xla"])
def test_lazy_modules(made_on):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    if made_on == "xla":
        with torch.device("xla"):
            model = nn.Sequential(
                nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5)
            )
    model.to("xla")
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    assert model[0].weight.device.type == "xla"
    copied = copy.deepcopy(model)
    for p in copied.parameters():
        p.requires_grad = True
    x = torch.randn(2, 3, 6, 6)
    for m in (model, copied):
        result = m(x.to("xla"))
        result.sum().backward()
        for p in m.parameters():
            assert type(p) is spmd.XLAShardedTensor and isinstance(p, nn.Parameter)
            assert p.grad is not None
        assert m[1].running_mean.shape == (4,)
        m.eval()
        on_host = copy.deepcopy(m).cpu()
        torch.testing.assert_close(m(x.to("xla")).cpu(), on_host(x), rtol=1e-4, atol=1e-5)


def test_lazy_modules_return_to_the_host_uninitialized():
    model = nn.LazyLinear(5).to("xla").cpu()
    assert type(model.weight) is nn.UninitializedParameter
    assert model(torch.ones(2, 3)).shape == (2, 5)


@pytest.mark.parametrize("kind", [nn.UninitializedParameter, nn.UninitializedBuffer])
def test_uninitialized_tensors_stay_what_they_are(kind):
    host = kind(requires_grad=False, dtype=torch.float64)
    for move in (lambda: host.to("xla"), lambda: host.to(torch.zeros((), device="xla").device)):
        moved = move()
        assert isinstance(moved, kind) and isinstance(moved, spmd.XLAShardedTensor)
        assert not moved.requires_grad and moved.dtype is torch.float64
        with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
            moved + 1
        for returned in (moved.cpu(), moved.to("cpu", torch.float32)):
            assert type(returned) is kind
        assert returned.dtype is torch.float32
        moved.copy_(host)  # as in load_state_dict
        moved.materialize((2, 3))
        assert moved.shape == (2, 3) and moved.device.type == "xla"
    assert nn.UninitializedParameter().to("xla").requires_grad


def test_uninitialized_tensors_are_not_copied():
    given, target = nn.UninitializedParameter(), torch.ones(3, device="xla")
    for copy_of in (lambda: torch.as_tensor(given, device="xla"), lambda: target.copy_(given)):
        with pytest.raises(ValueError, match=r"once it is initialized; got one of class Unin.* Mo"):
            copy_of()
    assert target.tolist() == [1.0] * 3
    # As the message advises.
    assert isinstance(given.to("xla"), nn.UninitializedParameter)
    lazy = nn.LazyLinear(2)
    lazy(torch.ones(1, 3))
    assert torch.as_tensor(lazy.weight, device="xla").shape == (2, 3)


def test_lazy_modules_load_the_state_of_lazy_modules():
    model, source = nn.LazyLinear(5).to("xla"), nn.LazyLinear(5)
    model.load_state_dict(source.state_dict())
    assert isinstance(model.weight, nn.UninitializedParameter)
    source(torch.ones(2, 3))
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.weight.cpu(), source.weight)


def test_images_of_torchvision():
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    image = tv_tensors.Image(torch.rand(3, 4, 4))
    moved = image.to("xla")
    assert isinstance(moved, tv_tensors.Image) and moved.device.type == "xla"
    assert torch.equal(moved.to("cpu"), image) and type(moved.to("cpu")) is tv_tensors.Image
    made = tv_tensors.Image(torch.rand(3, 4, 4).to("xla"))
    assert isinstance(made, tv_tensors.Image) and made.device.type == "xla"
    # By torchvision's rule, an operation gives a plain tensor.
    assert type(moved + 1) is spmd.XLAShardedTensor
    boxes = tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(8, 8))
    on_device = boxes.to("xla")
    assert isinstance(on_device, tv_tensors.BoundingBoxes)
    assert on_device.format is boxes.format and on_device.canvas_size == (8, 8)


def test_a_class_with_its_own_dispatch_is_refused():
    message = r"got the class Below, which has another one\..*_make_wrapper_subclass"
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        torch.ones(2, device="xla").as_subclass(Below)
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        torch.Tensor._make_subclass(Below, torch.ones(2, device="xla"))


def test_a_wrapper_as_the_message_says():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            args = [a.inner if isinstance(a, cls) else a for a in args]
            return cls(func(*args, **(kwargs or {})))

    result = Wrapper(VALUES.to("xla")) * 2 + 1
    assert type(result) is Wrapper and result.inner.tolist() == (VALUES * 2 + 1).tolist()


def test_a_class_with_slots_is_refused():
    with pytest.raises(
        spmd.errors.UnsupportedOpError, match=r"class Slotted. Remove its __slots__"
    ):
        torch.ones(2, device="xla").as_subclass(Slotted)


class WithMethod(nn.Parameter):
    """A parameter class as users write them: with a constructor and a method."""

    def __new__(cls, data, scale=2):
        made = super().__new__(cls, data)
        made.scale = scale
        return made

    def __init__(self, data, scale=2):
        super().__init__()

    def scaled(self):
        return self * self.scale


def test_a_parameter_class_is_made_of_a_tensor_of_the_device():
    p = WithMethod(torch.ones(2).to("xla"), 3)
    assert (
        isinstance(p, WithMethod) and isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
    )
    p.scaled().sum().backward()
    assert p.grad.tolist() == [3, 3] and p.device.type == "xla"
    module = nn.Module()
    module.p = p
    assert [type(q).__name__ for q in module.parameters()] == ["WithMethod"]
    assert type(nn.Parameter(torch.ones(2).to("xla"))) is type(torch.ones(2).to("xla") + 1)
