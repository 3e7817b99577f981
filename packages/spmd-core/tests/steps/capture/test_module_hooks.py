"""What a call of a module does not read may change; what it reads, may not."""

import pytest
import torch
from torch import nn

import spmd_core as spmd


def captured(function):
    step = spmd.compile(function, capture=True)
    for _ in range(3):
        step()
    assert step.replayed == 1
    return step


REGISTER = {
    "state_dict": lambda m: m._register_state_dict_hook(lambda *args: None),
    "before state_dict": lambda m: m.register_state_dict_pre_hook(lambda *args: None),
    "load_state_dict": lambda m: m.register_load_state_dict_post_hook(lambda *args: None),
}


@pytest.mark.parametrize("register", REGISTER)
def test_hooks_of_saving_and_loading(register):
    model, x = nn.Linear(3, 3).to("xla"), torch.ones(2, 3).to("xla")
    captured(lambda: model(x))  # code that libraries run once may read attributes by any name
    runs = captured(lambda: model(x))
    saves = captured(lambda: model.state_dict()["bias"] * 2)
    REGISTER[register](model)
    runs(), saves()
    assert runs.replayed == 2, runs.reason
    assert saves.replayed == 1


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_gets_keywords_and_is_always_called(is_global):
    model, x = nn.Linear(3, 3).to("xla"), torch.ones(2, 3).to("xla")
    runs = captured(lambda: model(x))
    expected = model(x) * 2
    if is_global:
        double = lambda module, given, result: result * 2  # noqa: E731
        handle = nn.modules.module.register_module_forward_hook(double, always_call=True)
    else:
        double = lambda module, given, keywords, result: result * 2  # noqa: E731
        handle = model.register_forward_hook(double, with_kwargs=True, always_call=True)
    try:
        torch.testing.assert_close(runs().cpu(), expected.detach().cpu())
    finally:
        handle.remove()
    torch.testing.assert_close(runs().cpu() * 2, expected.detach().cpu())
