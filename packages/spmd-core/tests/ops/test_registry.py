"""Registration of lowerings: for one exact overload, and only once."""

import re

import pytest
import torch

from spmd_core import releases
from spmd_core.ops import registry


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    """Copies of the real tables, so that a test can add to them."""
    monkeypatch.setattr(registry, "_LOWERINGS", dict(registry._LOWERINGS))
    monkeypatch.setattr(registry, "_VIEW_WRITES", dict(registry._VIEW_WRITES))
    monkeypatch.setattr(releases, "_absent", dict(releases._absent))


def never(*args):
    raise AssertionError("nobody calls it")


REGISTER = pytest.mark.parametrize("register", [registry.lowering, registry.view_write])


def sizes():
    return len(registry._LOWERINGS), len(registry._VIEW_WRITES)


@REGISTER
def test_a_packet_is_refused(register):
    before = sizes()
    with pytest.raises(ValueError, match=r"named namespace\.op\.overload; got 'aten\.add'"):
        register("aten.add")(never)
    assert sizes() == before


@REGISTER
@pytest.mark.parametrize("name", ["aten.add.NoSuchOverload", "aten.no_such_operation.default"])
def test_what_this_torch_lacks_is_listed_and_left_out(register, name):
    before = sizes()
    assert register(name)(never) is never
    assert sizes() == before and name in releases.versions().absent
    with pytest.raises(
        ValueError,
        match=f"an overload must exist to be called; got '{re.escape(name)}', which torch .* lacks",
    ):
        registry.resolve(name)


def test_a_second_registration_is_refused_and_the_first_stays():
    first = registry.find_lowering(torch.ops.aten.add.Tensor)
    assert first is not None
    with pytest.raises(
        ValueError,
        match=rf"aten\.add\.Tensor already has a lowering, in {first.function.__module__}; "
        r"an overload is lowered in one place",
    ):
        registry.lowering("aten.add.Tensor")(never)
    assert registry.find_lowering(torch.ops.aten.add.Tensor) is first
    place = registry.find_view_write(torch.ops.aten.as_strided.default)
    with pytest.raises(
        ValueError,
        match=r"aten\.as_strided\.default already has a view write, in .*; register it once",
    ):
        registry.view_write("aten.as_strided.default")(never)
    assert registry.find_view_write(torch.ops.aten.as_strided.default) is place is not None


def test_what_is_registered_is_found(monkeypatch):
    monkeypatch.delitem(registry._LOWERINGS, torch.ops.aten.sin.default)
    assert registry.find_lowering(torch.ops.aten.sin.default) is None
    registry.lowering("aten.sin.default")(never)
    found = registry.find_lowering(torch.ops.aten.sin.default)
    assert found is not None and found.function is never and registry.registered()[-1] is found
