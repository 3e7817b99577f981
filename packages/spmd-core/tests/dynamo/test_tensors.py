"""Dynamo sees tensors of the device: their device, class, size, storage and attributes."""

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd

# torch.compile imports inductor, which decorates methods for torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def test_tensors_that_a_graph_makes_and_moves():
    @torch.compile(fullgraph=True)
    def function(x):
        y = x + torch.arange(3, device="xla") + torch.ones(3, device=x.device)
        return y + torch.zeros(3).to("xla") + x.new_tensor([1.0, 2.0, 3.0]), y.cpu() * 2

    x = torch.randn(4, 3)
    found, on_host = function(x.to("xla"))
    expected = x + torch.arange(3) + 1
    torch.testing.assert_close(found.cpu(), expected + torch.tensor([1.0, 2.0, 3.0]))
    assert on_host.device.type == "cpu"
    torch.testing.assert_close(on_host, expected * 2)


# Each is True for a tensor of the device that has no mark; and whether Dynamo can trace it, as the
# sharding of a result is known when it is recorded.
QUESTIONS = {
    "type": (lambda x, y, p, mesh: type(x) is type(y) is type(p) is spmd.XLAShardedTensor, True),
    "class": (lambda x, y, p, mesh: y.__class__ is spmd.XLAShardedTensor, True),
    "subclass": (lambda x, y, p, mesh: issubclass(type(y), torch.Tensor), True),
    "instance": (
        lambda x, y, p, mesh: (
            isinstance(x, spmd.XLAShardedTensor) and isinstance(y, (int, spmd.XLAShardedTensor))
        ),
        True,
    ),
    "parameter": (
        lambda x, y, p, mesh: (
            isinstance(p, nn.Parameter)
            and isinstance(p, spmd.XLAShardedTensor)
            and not isinstance(y, nn.Parameter)
        ),
        True,
    ),
    "input": (lambda x, y, p, mesh: x.sharding is None and x.partition_spec is None, True),
    "identity": (lambda x, y, p, mesh: spmd.mark_sharding(x, mesh, ("x",)) is x, True),
    "copy": (
        lambda x, y, p, mesh: spmd.mark_sharding(x, mesh, ("x",), inplace=False) is not x,
        True,
    ),
    "result": (lambda x, y, p, mesh: y.sharding is None, False),
    "has": (lambda x, y, p, mesh: hasattr(y, "sharding"), False),
    "get": (lambda x, y, p, mesh: getattr(y, "sharding", 1) is None, False),
    "marked": (
        lambda x, y, p, mesh: (
            spmd.mark_sharding(x, mesh, ("x",)).sharding is not None and x.sharding is not None
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_a_function_asks_of_a_tensor(name, mesh_1d):
    question, is_traced = QUESTIONS[name]

    def function(x, p):
        y = x + 1
        return y if question(x, y, p, mesh_1d) else -y

    def given():
        return torch.ones(8, device="xla"), nn.Parameter(torch.ones(2, device="xla"))

    compiled = torch.compile(function, fullgraph=True)
    if not is_traced:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="known when its operations are"):
            compiled(*given())
        torch._dynamo.reset()
        compiled = torch.compile(function)
    assert function(*given()).tolist() == compiled(*given()).tolist() == [2.0] * 8


def test_the_mark_of_an_input_is_guarded(mesh_1d):
    compiled = torch.compile(lambda x: x + 1 if x.sharding is None else -x, fullgraph=True)
    x = torch.ones(8, device="xla")
    assert compiled(x).tolist() == [2.0] * 8
    spmd.mark_sharding(x, mesh_1d, ("x",))
    assert compiled(x).tolist() == [-1.0] * 8


def test_subclasses():
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.add:
                args = (args[0], 2 * args[1])
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3, device="xla").as_subclass(Doubled)
    found = torch.compile(lambda x: x.add(1), fullgraph=True)(x)
    assert type(found).__name__ == "Doubled" and found.tolist() == [3.0] * 3


@pytest.mark.filterwarnings("ignore:the shape of the result of x.mask.:UserWarning")
def test_elements_that_a_mask_selects():
    x = torch.randn(9)
    on_device = x.to("xla")
    double = torch.compile(lambda y: y * 2, fullgraph=True)
    select = torch.compile(lambda x: x[x > 0] * 2)
    torch.testing.assert_close(double(on_device[on_device > 0]).cpu(), x[x > 0] * 2)
    torch.testing.assert_close(double(on_device[on_device < 0]).cpu(), x[x < 0] * 2)
    torch.testing.assert_close(select(on_device).cpu(), x[x > 0] * 2)


ALIASES = {
    "detached": lambda x: (x, x.detach()),
    "view": lambda x: (x, x[1:]),
    "itself": lambda x: (x, x),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_writes_reach_every_alias(alias):
    def write(x, y):
        x.add_(1)
        x[0] = 7
        x.view(-1)[1:3].zero_()
        return y * 2

    compiled = torch.compile(write, fullgraph=True)
    x, on_device = torch.arange(4.0), torch.arange(4.0).to("xla")
    torch.testing.assert_close(
        compiled(*ALIASES[alias](on_device)).cpu(), write(*ALIASES[alias](x))
    )
    assert torch.equal(on_device.cpu(), x)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_writes_by_aot_autograd():
    def write(x, total):
        total.mul_(0.9).add_(x.mean(), alpha=0.1)
        x[0] = 7
        return x.t() + total

    x, total = torch.randn(3, 4), torch.zeros(())
    on_device = x.to("xla"), total.to("xla")
    found = torch.compile(write, fullgraph=True, backend="aot_eager")(*on_device)
    torch.testing.assert_close(found.cpu(), write(x, total))
    for changed, expected in zip(on_device, (x, total)):
        torch.testing.assert_close(changed.cpu(), expected)
    # Inputs that share a storage without being views: it would have to join their bytes.
    with pytest.raises((TypeError, AttributeError), match=r"DeviceStorage|storage of an xla"):
        torch.compile(lambda a, b: (a.add_(1), b * 2), backend="aot_eager")(
            on_device[0], on_device[0].detach()
        )


OPERATIONS = {
    "kron": lambda x: torch.kron(x, x, out=torch.empty(9, 16, device=x.device)),
    "matmul": lambda x: torch.matmul(x, x.T, out=torch.empty(3, 3, device=x.device)),
    "conjugate": lambda x: torch.view_as_real(torch.fft.rfft(x).conj().resolve_conj()),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mapped": lambda x: torch.vmap(lambda row: row.sin().sum())(x),
    "gradient": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    "lists": lambda x: torch._foreach_mul([x, x], 2.0)[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_with_kernels_above_autograd(name):
    x = torch.randn(3, 4)
    expected = OPERATIONS[name](x)
    with torch.no_grad():
        found = torch.compile(OPERATIONS[name], fullgraph=True)(x.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)


class Cubed(torch.autograd.Function):
    """The cube, with the gradient of the square, so that a test sees whether it is called."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return 2 * grads[0] * x


@torch.compiler.nested_compile_region
def region(x):
    return x.sin() * 2


# For each, the function and whether a backend of AOTAutograd is tried, too.
OPERATORS = {
    "function": (lambda x: Cubed.apply(x), True),
    "region": (lambda x: region(region(x)), True),
    "branch": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2,
        False,
    ),
    "loop": (
        lambda x: torch.while_loop(
            lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (torch.tensor(0, device=x.device), x)
        )[1],
        False,
    ),
    "checkpoint": (
        lambda x: checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False),
        True,
    ),
    # AOTAutograd orders checks by an operator that takes no tensors with operations of their own.
    "effects": (lambda x: torch.linalg.inv(x[:, None] * x + torch.eye(4, device=x.device)), False),
}


# By Dynamo, which makes an object of each function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_functions_of_functions(name):
    function, by_aot = OPERATORS[name]
    for backend in ("openxla", "aot_eager") if by_aot else ("openxla",):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        x = torch.rand(4)
        found, expected = compiled(x.to("xla")), function(x)
        torch.testing.assert_close(found.cpu(), expected)
        if name == "loop":
            continue  # torch has no derivative
        on_device, x = x.to("xla").requires_grad_(), x.requires_grad_()
        compiled(on_device).sum().backward()
        function(x).sum().backward()
        torch.testing.assert_close(on_device.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5)


def test_other_tracers():
    layer = nn.Linear(3, 2, device="xla")
    x = torch.ones(3, device="xla")
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x).cpu(), layer(x).cpu())

    def function(x):
        return (x * 2 + 1).sum()

    for mode in ("real", "fake", "symbolic"):
        assert make_fx(function, tracing_mode=mode)(x)(x).item() == 9
    assert aot_function(function, nop)(x).item() == 9


def test_tensors_on_two_devices_are_refused_as_elsewhere():
    with pytest.raises(RuntimeError, match=r"two.* devices,? xla:0.* cpu"):
        torch.compile(lambda x: x + torch.ones(3), fullgraph=True)(torch.ones(3, device="xla"))
