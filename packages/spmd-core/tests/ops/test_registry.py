"""Registration of lowerings: for one exact overload, and only once."""

import pytest
import torch

from spmd_core.ops import registry


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    """Copies of the real tables, so that a test can add to them."""
    monkeypatch.setattr(registry, "_LOWERINGS", dict(registry._LOWERINGS))
    monkeypatch.setattr(registry, "_VIEW_WRITES", dict(registry._VIEW_WRITES))


def never(*args):
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize("register", [registry.lowering, registry.view_write])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.add", r"registered on one exact overload, namespace\.op\.overload; got 'aten\.add'"),
        (
            "aten.add.NoSuchOverload",
            r"no overload 'aten\.add\.NoSuchOverload'; "
            r"list them with torch\.ops\.aten\.add\.overloads\(\)",
        ),
        ("aten.no_such_operation.default", r"no overload 'aten\.no_such_operation\.default'"),
    ],
)
def test_a_packet_and_an_unknown_overload_are_refused(register, name, message):
    before = len(registry._LOWERINGS), len(registry._VIEW_WRITES)
    with pytest.raises(ValueError, match=message):
        register(name)(never)
    assert (len(registry._LOWERINGS), len(registry._VIEW_WRITES)) == before


def test_a_second_registration_is_refused_and_the_first_stays():
    first = registry.find(torch.ops.aten.add.Tensor)
    assert first is not None
    with pytest.raises(
        ValueError,
        match=rf"aten\.add\.Tensor already has a lowering, in {first.function.__module__}; "
        r"an overload is lowered in one place",
    ):
        registry.lowering("aten.add.Tensor")(never)
    assert registry.find(torch.ops.aten.add.Tensor) is first
    place = registry.find_view_write(torch.ops.aten.as_strided.default)
    with pytest.raises(
        ValueError,
        match=r"aten\.as_strided\.default already has a view write, in .*; register it once",
    ):
        registry.view_write("aten.as_strided.default")(never)
    assert registry.find_view_write(torch.ops.aten.as_strided.default) is place is not None


def test_an_overload_of_a_later_torch_is_left_out():
    registry.lowering("aten.no_such_operation.default", since="99.0")(never)
    with pytest.raises(ValueError, match="no overload"):
        registry.lowering("aten.no_such_operation.default", since="2.0")(never)


def test_what_is_registered_is_found(monkeypatch):
    monkeypatch.delitem(registry._LOWERINGS, torch.ops.aten.sin.default)
    assert registry.find(torch.ops.aten.sin.default) is None
    registry.lowering("aten.sin.default")(never)
    found = registry.find(torch.ops.aten.sin.default)
    assert found is not None and found.function is never and registry.registered()[-1] is found
