"""Forward-mode AD by dual tensors against eager torch."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

pytestmark = [
    # torch's own, at the first dual tensor of a process, and of eager torch's on the CPU.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

MODELS = {
    "linear": lambda: nn.Linear(3, 4),
    "no bias": lambda: nn.Linear(3, 4, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 2)),
    "gru": lambda: nn.GRU(3, 4),
    "lstm": lambda: nn.LSTM(3, 4, proj_size=2),
}


def output(model, x):
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


def tangents(model, device):
    model = copy.deepcopy(model).double().to(device)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 2, 3).to(device)
    with forward_ad.dual_level():
        of_input = forward_ad.unpack_dual(output(model, forward_ad.make_dual(x, x * 2))).tangent
    name, weight = next(iter(model.named_parameters()))
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(weight.detach(), weight.detach() * 3)}
        given = torch.func.functional_call(model, dual, (x,))
        of_weight = forward_ad.unpack_dual(given[0] if isinstance(given, tuple) else given).tangent
    return of_input.detach().cpu(), of_weight.detach().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_tangents(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.testing.assert_close(tangents(model, "xla"), tangents(model, "cpu"))


def test_forward_over_reverse():
    def product(device):
        model = nn.Linear(3, 4).to(device)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.25)
        x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            (gradient,) = torch.autograd.grad(model(dual).pow(3).sum(), dual, create_graph=True)
            return forward_ad.unpack_dual(gradient).tangent.detach().cpu()

    torch.testing.assert_close(product("xla"), product("cpu"))


def test_linear_is_one_operation_outside_of_a_level():
    model, x = nn.Linear(3, 4).to("xla"), torch.ones(2, 5, 3, device="xla")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="Nested"):
        forward_ad.enter_dual_level()
    out = model(x)
    assert out._handle.value.entry.name.startswith("aten::linear")


def test_a_level_that_is_not_open():
    with pytest.raises(RuntimeError):
        forward_ad.exit_dual_level()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 3, device="xla"), torch.ones(2, 3, device="xla"))
        assert forward_ad.unpack_dual(nn.Linear(3, 2).to("xla")(x)).tangent.shape == (2, 2)
