"""What a captured step reaches: whatever the user changes there has its effect in the next call."""

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import os
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import CaptureError

FACTOR = 2.0


class Holder:
    """An object of the user's."""


def held(**attributes):
    holder = Holder()
    vars(holder).update(attributes)
    return holder


def attribute_of_a_class():
    class Config:
        scale = 2.0

    return lambda x: x * Config.scale, lambda: setattr(Config, "scale", 3.0)


def attribute_of_a_class_hidden_by_an_object():
    class Config:
        scale = 2.0

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 3.0)


def attribute_of_a_class_hidden_by_a_module():
    class Scale(nn.Module):
        scale = 2.0

        def forward(self, x):
            return x * self.scale

    model = Scale()
    return lambda x: model(x), lambda: setattr(model, "scale", 3.0)


def class_and_static_methods():
    class Config:
        scale = 1.0

        @classmethod
        def one(cls, x):
            return x * cls.scale

        @staticmethod
        def other(x):
            return x * Config.scale

    return lambda x: Config.one(x) + Config.other(x), lambda: setattr(Config, "scale", 1.5)


def method_of_a_class():
    class Scale:
        def of(self, x):
            return x * 2

    scale = Scale()
    return lambda x: scale.of(x), lambda: setattr(Scale, "of", lambda self, x: x * 3)


def method_of_an_object():
    class Scale:
        def of(self, x):
            return x * 2

    scale = Scale()
    return lambda x: scale.of(x), lambda: setattr(scale, "of", lambda x: x * 3)


def forward_of_a_module():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    model = Scale()
    return lambda x: model(x), lambda: setattr(model, "forward", lambda x: x * 3)


def attribute_that_was_not_there():
    holder = held()
    return lambda x: x * getattr(holder, "scale", 2.0), lambda: setattr(holder, "scale", 3.0)


def attribute_by_a_text():
    holder = held(scale=2.0)
    return lambda x: x * getattr(holder, "scale"), lambda: setattr(holder, "scale", 3.0)  # noqa: B009


def attribute_by_a_computed_name():
    holder = held(scale1=2.0)
    return (
        lambda x: x * getattr(holder, f"scale{x.dim()}", 1.0),
        lambda: setattr(holder, "scale1", 3.0),
    )


def all_attributes():
    holder = held(scale=2.0)
    return lambda x: x * sum(vars(holder).values()), lambda: setattr(holder, "scale", 3.0)


def fields_of_a_dataclass():
    @dataclasses.dataclass
    class Config:
        scale: float

    config = Config(2.0)
    return (
        lambda x: x * sum(dataclasses.asdict(config).values()),
        lambda: setattr(config, "scale", 3.0),
    )


def slot_that_was_empty():
    class Slots:
        __slots__ = ("scale",)

    slots = Slots()
    return lambda x: x * getattr(slots, "scale", 2.0), lambda: setattr(slots, "scale", 3.0)


def private_slot():
    class Slots:
        __slots__ = ("__scale",)

        def __init__(self):
            self.set(2.0)

        def get(self):
            return self.__scale

        def set(self, scale):
            self.__scale = scale

    slots = Slots()
    return lambda x: x * slots.get(), lambda: slots.set(3.0)


def key_of_a_dict():
    names = {"two": 1}

    def change():
        del names["two"]
        names["three"] = 1

    return lambda x: x * (2 if "two" in names else 3), change


def attribute_of_a_dict():
    class Named(dict):
        pass

    named = Named()
    named.scale = 2.0
    return lambda x: x * named.scale, lambda: setattr(named, "scale", 3.0)


def global_of_a_namedtuple():
    class Pair(collections.namedtuple("Pair", "a b")):
        __slots__ = ()

        def of(self, x):
            return x * FACTOR

    pair = Pair(1, 2)
    return lambda x: pair.of(x), lambda: globals().update(FACTOR=3.0)


def attribute_of_a_function():
    def scale(x):
        return x * scale.by

    scale.by = 2.0
    return lambda x: scale(x), lambda: setattr(scale, "by", 3.0)


def defaults_of_a_function():
    def scale(x, by=2.0):
        return x * by

    return lambda x: scale(x), lambda: setattr(scale, "__defaults__", (3.0,))


def function_under_a_decorator_of_torch():
    by = {"scale": 2.0}

    @torch.no_grad()
    def scale(x):
        return x * by["scale"]

    return lambda x: scale(x), lambda: by.update(scale=3.0)


def cached_function():
    by = {"scale": 2.0}

    @functools.lru_cache
    def scale():
        return by["scale"]

    def change():
        by["scale"] = 3.0
        scale.cache_clear()

    return lambda x: x * scale(), change


def single_dispatch():
    @functools.singledispatch
    def scale(x):
        return x * 2

    return lambda x: scale(x), lambda: scale.register(torch.Tensor, lambda x: x * 3)


def function_of_autograd():
    by = {"scale": 2.0}

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * by["scale"]

    return lambda x: Scale.apply(x), lambda: by.update(scale=3.0)


def module_without_a_file():
    config = types.ModuleType("config_of_a_test")
    config.scale = 2.0
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 3.0)


def class_of_no_module():
    names = {"__name__": "module_of_no_file", "FACTOR": 2.0}
    exec("class Scale:\n    def of(self, x):\n        return x * FACTOR\n", names)
    scale = names["Scale"]()
    return lambda x: scale.of(x), lambda: names.update(FACTOR=3.0)


def two_variables_of_one_name():
    def make(n):
        def set_to(value):
            nonlocal n
            n = value

        return (lambda: n), set_to

    (one, set_one), (other, _) = make(2.0), make(1.0)
    return lambda x: x * one() * other(), lambda: set_one(3.0)


def user_dict():
    names = collections.UserDict(scale=2.0)
    return lambda x: x * names["scale"], lambda: names.update(scale=3.0)


def chain_of_dicts():
    names = collections.ChainMap({"scale": 2.0})
    return lambda x: x * names["scale"], lambda: names.update(scale=3.0)


def proxy_of_a_dict():
    names = {"scale": 2.0}
    proxy = types.MappingProxyType(names)
    return lambda x: x * proxy["scale"], lambda: names.update(scale=3.0)


def local_of_a_thread():
    local = threading.local()
    local.scale = 2.0
    return lambda x: x * local.scale, lambda: setattr(local, "scale", 3.0)


def context_variable():
    variable = contextvars.ContextVar("scale", default=2.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


def weak_reference():
    holder = held(scale=2.0)
    reference = weakref.ref(holder)
    return lambda x: x * reference().scale, lambda: setattr(holder, "scale", 3.0)


def event():
    done = threading.Event()
    return lambda x: x * (3 if done.is_set() else 2), done.set


def bytes_of_an_array():
    data = bytearray([2])
    return lambda x: x * (3 if data[0] > 2 else 2), lambda: data.__setitem__(0, 3)


def array_of_numbers():
    data = array.array("d", [2.0])
    return lambda x: x * (3 if data[0] > 2 else 2), lambda: data.__setitem__(0, 3.0)


def tensor_of_the_cpu_under_an_array():
    data = np.full(3, 2.0, np.float32)
    tensor = torch.from_numpy(data)
    return lambda x: x * tensor.to("xla"), lambda: data.fill(3.0)


def choice_of_an_enum():
    class Choice(enum.Enum):
        TWO = 2
        THREE = 3

    chosen = {"by": Choice.TWO}
    return lambda x: x * chosen["by"].value, lambda: chosen.update(by=Choice.THREE)


def environment_variable():
    os.environ["SCALE_OF_A_TEST"] = "2"
    return (
        lambda x: x * float(os.environ["SCALE_OF_A_TEST"]),
        lambda: os.environ.update(SCALE_OF_A_TEST="3"),
    )


def attribute_of_an_argument():
    by = [2.0]

    def given():
        x = torch.ones(3).to("xla")
        x.scale = by[0]
        return x

    return lambda x: x * x.scale, lambda: by.__setitem__(0, 3.0), given


def hook_of_all_modules():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    model = Scale()
    change = nn.modules.module.register_module_forward_hook
    return lambda x: model(x), lambda: change(lambda module, given, result: result * 1.5)


CHANGES = (
    attribute_of_a_class, attribute_of_a_class_hidden_by_an_object,
    attribute_of_a_class_hidden_by_a_module, class_and_static_methods, method_of_a_class,
    method_of_an_object, forward_of_a_module, attribute_that_was_not_there, attribute_by_a_text,
    attribute_by_a_computed_name, all_attributes, fields_of_a_dataclass, slot_that_was_empty,
    private_slot, key_of_a_dict, attribute_of_a_dict, global_of_a_namedtuple,
    attribute_of_a_function, defaults_of_a_function, function_under_a_decorator_of_torch,
    cached_function, single_dispatch, function_of_autograd, module_without_a_file,
    class_of_no_module, two_variables_of_one_name, user_dict, chain_of_dicts, proxy_of_a_dict,
    local_of_a_thread, context_variable, weak_reference, event, bytes_of_an_array,
    array_of_numbers, tensor_of_the_cpu_under_an_array, choice_of_an_enum, environment_variable,
    attribute_of_an_argument, hook_of_all_modules,
)  # fmt: skip


@pytest.mark.parametrize("make", CHANGES)
def test_a_change_has_its_effect(make, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setenv("SCALE_OF_A_TEST", "2")
    function, change, *given = make()
    take = given[0] if given else lambda: torch.ones(3).to("xla")
    step = spmd.compile(function, capture=True)
    assert [step(take())[0].item() for _ in range(4)] == [2.0] * 4
    assert step.replayed == 2
    changed = change()
    try:
        assert [step(take())[0].item() for _ in range(4)] == [3.0] * 4
    finally:
        if hasattr(changed, "remove"):
            changed.remove()


def test_hooks_of_a_parameter():
    w = torch.ones(3).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def step(x):
        w.grad = None
        (w * x).sum().backward()

    for change in (
        lambda: w.register_hook(lambda grad: grad * 3),
        lambda: w.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2) is None),
    ):
        for _ in range(4):
            step(torch.ones(3).to("xla"))
        change()
    assert w.grad.tolist() == [3.0] * 3


def counts_in_a_closure():
    def make():
        n = 0

        def count(x):
            nonlocal n
            n += 1
            return x * 2

        return count

    def other():
        n = 5.0
        return lambda x: x * n

    first, last = make(), other()
    return lambda x: last(first(x))


def writes_to(value):
    def step(x):
        value.__setitem__(0, value[0] + 1)
        return x * 2

    return step


def draws_of(generator):
    return lambda x: x * (2 if generator.random() < 0.5 else 3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (counts_in_a_closure, r"changes what it reaches: n'* is \d+ in place of"),
        (lambda: writes_to(torch.zeros(1)), "writes to memory of the host: value"),
        (lambda: writes_to(np.zeros(1)), "writes to memory of the host: value"),
        (lambda: writes_to(bytearray(1)), "writes to memory of the host: value"),
        (lambda: draws_of(random.Random(1)), "writes to memory of the host: generator"),
        (lambda: draws_of(np.random.default_rng(1)), "writes to memory of the host: generator"),
        (lambda: lambda x: x * (2 if os.urandom(1) < b"a" else 3), r"random number .*py:\d+"),
    ],
)
def test_writes_on_the_host_are_refused(make, match):
    step = spmd.compile(make(), capture=True)

    def loop():
        for _ in range(12):
            step(torch.ones(3).to("xla"))

    with pytest.raises(CaptureError, match=match):
        loop()


def test_large_arrays_are_passed():
    data = np.zeros(1 << 18)
    step = spmd.compile(lambda x: x * float(data[0]), capture=True)
    with pytest.raises(CaptureError, match=r"at most 1,048,576 bytes; got one of 2,097,152 .*data"):
        step(torch.ones(3).to("xla"))
    passed = spmd.compile(lambda x, data: x + data[0], capture=True)
    for _ in range(4):
        assert passed(torch.ones(3).to("xla"), torch.from_numpy(data)).tolist() == [1.0] * 3
    assert passed.replayed == 2
