"""Tests spmd_core.modules.alike: what differs between modules, and the guard against reading it."""

import functools

import pytest
import torch
from torch import nn

from spmd_core.errors import WrapError
from spmd_core.modules.alike import differences, guarded


class Plain:
    def __init__(self, value):
        self.value = value


def holding(value):
    module = nn.Linear(2, 2)
    module.value = value
    return module


def scaled(factor, owner=None):
    return lambda x: (x * factor, owner)


EQUAL = [
    (1, 1),
    ([1, {"a": (2.0, None)}], [1, {"a": (2.0, None)}]),
    (functools.partial(torch.sum, dim=1), functools.partial(torch.sum, dim=1)),
    (scaled(2), scaled(2)),
    (Plain([1]), Plain([1])),
    (torch.ones(2), torch.ones(2)),
    (torch.Size((1,)), torch.Size((1,))),
]
OTHER = [
    (1, 2),
    (0, False),
    ([1], [2]),
    (functools.partial(torch.sum, dim=1), functools.partial(torch.sum, dim=0)),
    (scaled(2), scaled(3)),
    (Plain([1]), Plain([2])),
    (torch.ones(2), torch.zeros(2)),
    (torch.relu, torch.sin),
    ([nn.Linear(1, 1)], [nn.Linear(1, 1)]),  # nobody replaces the tensors of a hidden module
]


def test_attributes():
    for a, b in EQUAL:
        assert differences([holding(a), holding(b)]) == {}, (a, b)
    for a, b in OTHER:
        first = holding(a)
        found = differences([first, holding(a), holding(b)])
        assert [*found] == [first] and [*found[first]] == ["value"], (a, b)
        assert "in layer 2 and" in found[first]["value"]
    missing = nn.Linear(2, 2)
    assert [*differences([missing, holding(None)])[missing]] == ["value"]


def test_objects_of_the_modules_themselves():
    def linked():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].__dict__["last"] = module[1]
        module.forward = module[1].forward
        module[0].register_forward_hook(scaled(1, module))
        return module

    assert differences([linked(), linked()]) == {}
    crossed = linked()
    crossed[0].__dict__["last"] = crossed[0]
    first = linked()
    assert [*differences([first, crossed])[first[0]]] == ["last"]
    hooked = linked()
    hooked[0].register_forward_hook(scaled(1))
    assert [*differences([first, hooked])[first[0]]] == ["_forward_hooks"]


def test_classes_and_names():
    for other, what in ((nn.ReLU(), "a ReLU in layer 1 and a Tanh"), (None, "missing in layer 1")):
        models = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2))]
        if other is not None:
            models[1].append(other)
        with pytest.raises(WrapError, match=rf"1, which is {what}.*Build them alike"):
            differences(models)


def test_the_guard_refuses_reads_of_what_differs_and_nothing_else():
    models = [nn.Sequential(holding(1)) for _ in range(2)]
    models[1][0].value, models[1][0].name = 2, "b"
    models[1].eval()
    x = torch.ones(2)
    with guarded(differences(models)):
        assert models[0](x).shape == (2,) and isinstance(models[0][0], nn.Linear)
        with pytest.raises(WrapError, match=r"0\.value, which is 2 in layer 1 and 1 in layer 0"):
            _ = models[0][0].value
        with pytest.raises(WrapError, match=r"read of training, which is False"):
            _ = models[0].training
        with pytest.raises(
            WrapError, match=r"read of 0\.name, which is 'b' .* and missing in layer 0"
        ):
            getattr(models[0][0], "name", None)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = models[0][0].nothing
    assert type(models[0][0]) is nn.Linear and models[0][0].value == 1
    models[1][0].value = 1  # as the error says
    with guarded(differences(models)):
        assert models[0][0].value == 1
