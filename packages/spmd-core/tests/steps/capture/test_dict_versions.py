"""capture/dict_versions.py: every change of a dict is told, and nothing else."""

import itertools
import sys
from collections import OrderedDict, defaultdict

import pytest
from torch import nn

from spmd_core.steps.capture import dict_versions
from spmd_core.steps.capture.dict_versions import DictVersions

told = pytest.mark.skipif(sys.version_info >= (3, 13), reason="dicts have no versions")

CHANGES = {
    "another value": lambda d: d.update(a=2),
    "a new key": lambda d: d.__setitem__("c", 1),
    "a key less": lambda d: d.pop("a"),
    "deleted": lambda d: d.__delitem__("a"),
    "emptied": lambda d: d.clear(),
    "a default": lambda d: d.setdefault("c", 1),
    "the last item": lambda d: d.popitem(),
    "joined": lambda d: d.__ior__({"a": 2}),
    "many keys": lambda d: d.update({i: i for i in range(100)}),
}


@pytest.fixture(params=[True, False], ids=["at once", "one by one"])
def way(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(dict_versions, "_PLACE", None)


def some_dicts():
    return [
        {"a": 1, "b": 2},
        OrderedDict(a=1),
        defaultdict(list, a=1),
        {i: i for i in range(50)} | {"a": 1},
        vars(nn.Linear(2, 2)) | {"a": 1},
    ]


@told
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_at_its_place(change, way):
    for i, _ in enumerate(some_dicts()):
        dicts = some_dicts()
        versions = DictVersions(dicts)
        old = versions.now()
        assert versions.now() == old
        CHANGES[change](dicts[i])
        new = versions.now()
        assert new != old and [*versions.changed(old, new)] == [i]
        assert versions.now() == new


@told
def test_attributes_are_told(way):
    one = nn.Linear(2, 2)
    versions = DictVersions([vars(one)])
    seen = [versions.now()]
    one.training = False
    seen.append(versions.now())
    object.__setattr__(one, "scale", 2)
    seen.append(versions.now())
    del one.scale
    seen.append(versions.now())
    assert all(a != b for a, b in itertools.pairwise(seen))


@told
def test_reading_changes_nothing(way):
    dicts = some_dicts()
    versions = DictVersions(dicts)
    old = versions.now()
    for one in dicts:
        assert one.get("a") == 1 and "z" not in one and len([*one.items()]) == len(one)
        one.copy()
    assert versions.now() == old and [*versions.changed(old, old)] == []


@told
def test_at_first_all_differ(way):
    versions = DictVersions(some_dicts())
    assert [*versions.changed((), versions.now())] == [0, 1, 2, 3, 4]
    assert [*DictVersions([]).changed((), DictVersions([]).now())] == []


def test_a_version_that_lies_nowhere_is_not_found():
    assert dict_versions._place(lambda one: 2**40) is None
    assert dict_versions._place(None) is None
    assert dict_versions.are_told() == (sys.version_info < (3, 13))
    if dict_versions.are_told():
        assert dict_versions._PLACE is not None
