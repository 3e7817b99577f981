"""Guards of a captured step: each change of what it reaches makes them fail, and nothing else."""

import array
import collections
import copy

import pytest
import torch
from torch import nn

from spmd_core.steps.capture import dict_versions, reachable
from spmd_core.steps.capture.guards import Guards


class Holder:
    """An object of the user's."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slots:
    __slots__ = ("scale",)


SCALE = 2.0


def reached():
    """A function, with an example of each kind of thing that it reaches."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("xla")
    model[1].register_forward_hook(lambda *args: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.ones(2, 3).to("xla")).sum().backward()
    optimizer.step()
    of = Holder(
        model=model, optimizer=optimizer, holder=Holder(scale=1.0), slots=Slots(),
        names={"a": 1.0, "b": 2.0}, ordered=collections.OrderedDict(a=1.0, b=2.0),
        single=collections.OrderedDict(a=1.0), made=collections.defaultdict(list, a=[1.0]),
        items=[1.0, 2.0], nothing={}, no_items=[],
        numbers=array.array("d", [1.0]), plain=torch.ones(3).to("xla"), scale=1.0,
        view=model[0].bias.view(3),
    )  # fmt: skip
    of.slots.scale = 1.0
    ordered, single, made, items, nothing, no_items = (
        of.ordered, of.single, of.made, of.items, of.nothing, of.no_items
    )  # fmt: skip

    def helper(x, by=2.0):
        return x * by

    def step(x):
        optimizer.step()
        seen = (ordered, single, made, items, nothing, no_items, of.numbers, of.names)
        seen += (of.plain, of.view)
        return helper(model(x)) * of.holder.scale * of.slots.scale * SCALE, seen, of.scale

    of.helper, of.step = helper, step
    return of


def replace_hook(of):
    (key,) = of.model[1]._forward_hooks
    of.model[1]._forward_hooks[key] = lambda *args: None


def set_cell(of):
    cell = next(c for c in of.step.__closure__ if c.cell_contents is of.items)
    cell.cell_contents = [1.0, 2.0]


def moment(of):
    return next(iter(of.optimizer.state.values()))


def swap(of):
    torch.utils.swap_tensors(of.plain, torch.zeros(3).to("xla"))


def delete_and_set(of):
    del of.names["a"]
    of.names["a"] = 1.0


CHANGES = {
    "value of a dict": lambda of: of.names.update(a=3.0),
    "key of a dict": lambda of: of.names.update(c=3.0),
    "key that is gone": lambda of: of.names.pop("a"),
    "order of a dict": delete_and_set,
    "order of an OrderedDict": lambda of: of.ordered.move_to_end("a"),
    "value of an OrderedDict": lambda of: of.ordered.update(a=3.0),
    "value of an OrderedDict of one item": lambda of: of.single.update(a=3.0),
    "key of an OrderedDict of one item": lambda of: of.single.update(b=3.0),
    "other key of an OrderedDict": lambda of: (of.single.popitem(), of.single.update(b=1.0)),
    "no item of an OrderedDict": lambda of: of.single.clear(),
    "hook of a module in place of another": replace_hook,
    "key of a defaultdict": lambda of: of.made["b"],
    "item": lambda of: of.items.__setitem__(0, 3.0),
    "more items": lambda of: of.items.append(3.0),
    "first item": lambda of: of.no_items.append(3.0),
    "first key": lambda of: of.nothing.update(a=1.0),
    "attribute": lambda of: setattr(of.holder, "scale", 3.0),
    "slot": lambda of: setattr(of.slots, "scale", 3.0),
    "training": lambda of: of.model[1].eval(),
    "attribute of a module": lambda of: setattr(of.model[0], "more", 1),
    "hook of a module": lambda of: of.model[0].register_forward_hook(print),
    "pre-hook with keywords": lambda of: of.model[0].register_forward_pre_hook(
        print, with_kwargs=True
    ),
    "hook that gets keywords later": lambda of: of.model[1]._forward_hooks_with_kwargs.update(
        dict.fromkeys(of.model[1]._forward_hooks, True)
    ),
    "parameter": lambda of: setattr(of.model[0], "bias", nn.Parameter(of.model[0].bias * 2)),
    "submodule": lambda of: of.model.append(nn.Identity()),
    "state of an optimizer": lambda of: moment(of).update(exp_avg=torch.zeros(3, 3).to("xla")),
    "number of a group": lambda of: of.optimizer.param_groups[0].update(lr=0.25),
    "group": lambda of: of.optimizer.add_param_group({"params": [torch.ones(1).requires_grad_()]}),
    "cell": set_cell,
    "code": lambda of: setattr(of.helper, "__code__", (lambda x, by: x).__code__),
    "defaults": lambda of: setattr(of.helper, "__defaults__", (3.0,)),
    "global": lambda of: globals().update(SCALE=3.0),
    "contents": lambda of: of.numbers.__setitem__(0, 3.0),
    "data": lambda of: setattr(of.plain, "data", torch.zeros(3).to("xla")),
    "data of a moment": lambda of: setattr(moment(of)["exp_avg"], "data", of.plain),
    "swapped tensor": swap,
    "strides": lambda of: moment(of)["exp_avg"].t_(),
    "requires_grad": lambda of: of.model[0].bias.requires_grad_(False),
    "requires_grad of a buffer": lambda of: of.plain.requires_grad_(),
    "requires_grad of a moment": lambda of: moment(of)["exp_avg"].requires_grad_(),
    "requires_grad by detach_": lambda of: torch.detach_(of.model[0].bias),
    "hook of a tensor": lambda of: of.model[0].bias.register_hook(print),
    "class of a module": lambda of: setattr(of.model[1], "__class__", nn.Identity),
    "class of an object": lambda of: setattr(of.holder, "__class__", type("Other", (), {})),
    "hook of a view": lambda of: of.view.register_hook(print),
    "later hook": lambda of: of.model[0].bias.register_post_accumulate_grad_hook(print),
    "attribute of a tensor": lambda of: setattr(of.plain, "scale", 2.0),
    "mark": lambda of: setattr(of.plain._handle, "sharding", "a mark"),
}  # fmt: skip


def guarded(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    of = reached()
    own = Guards(reachable.walk(of.step))
    assert own.hold() and own.hold()
    return of, own


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, versions, monkeypatch):
    if not versions:
        monkeypatch.setattr(dict_versions, "_version_of", None)
    of, own = guarded(monkeypatch)
    CHANGES[change](of)
    assert not own.hold() and not own.hold()


def test_a_method_that_is_replaced_in_a_class_of_a_library(monkeypatch):
    _, own = guarded(monkeypatch)
    around = nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert not own.hold()
    assert nn.Linear.forward is around and own.hold()


def test_what_stays_is_no_change(monkeypatch):
    of, own = guarded(monkeypatch)
    one = of.holder.scale
    of.holder.scale = 3.0
    of.holder.scale = one
    of.names.update(a=of.names["a"])
    of.model.train()
    of.model.zero_grad()
    of.plain.mul_(2)
    of.model[0].bias.requires_grad_(True)
    handle = of.model[0].bias.register_hook(print)
    handle.remove()
    copy.deepcopy(of.model)
    assert not own.hold()  # the dict of hooks stays
    own = Guards(reachable.walk(of.step))
    assert own.hold()
    of.model[0].bias.register_hook(print).remove()
    of.model[0].bias.requires_grad_(True)
    assert own.hold()


def test_a_live_number_of_a_group(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    of = reached()
    found = reachable.walk(of.step)
    (path,) = [p for p in found.numbers if p.endswith("['lr']")]
    own = Guards(found, [path])
    assert own.hold()
    group = of.optimizer.param_groups[0]
    group["lr"] = 0.125
    assert own.hold()
    group["weight_decay"] = 0.125
    assert not own.hold()
