"""oracle.py: a check that shares its program with others fails, and says where it stands."""

import dataclasses

import pytest
import torch

import oracle
from spmd_core.ops import registry

X = torch.tensor([1.0, 2.0])


def planted(monkeypatch, function):
    """Has `aten.sub.Tensor` lowered by another function."""
    find, sub = registry.find_lowering, registry.resolve("aten.sub.Tensor")

    def wrong(overload):
        found = find(overload)
        return dataclasses.replace(found, function=function) if overload is sub else found

    monkeypatch.setattr(registry, "find_lowering", wrong)


def three_checks():
    with oracle.in_one_program():
        for name in ("add", "sub", "mul"):
            oracle.check(f"aten.{name}.Tensor", X, X)


def test_a_wrong_value_is_told_with_its_line(monkeypatch):
    planted(monkeypatch, lambda ctx, a, b, alpha=1: a + b)
    with pytest.raises(AssertionError, match="not close") as caught:
        three_checks()
    (note,) = caught.value.__notes__
    assert note.startswith(f"aten.sub.Tensor, checked at {__file__}:")
    planted(monkeypatch, lambda ctx, a, b, alpha=1: a[:1])
    with pytest.raises(AssertionError, match="shape"):
        oracle.check("aten.sub.Tensor", X, X)


def test_a_lowering_that_fails_is_told_with_its_line(monkeypatch):
    def fails(ctx, a, b, alpha=1):
        raise ValueError("no such lowering")

    planted(monkeypatch, fails)
    with pytest.raises(ValueError, match="no such lowering") as caught:
        three_checks()
    assert caught.value.__notes__[-1].startswith(f"aten.sub.Tensor, checked at {__file__}:")


def test_a_tensor_that_is_written_to_later():
    with oracle.in_one_program():
        x = X.clone()
        oracle.check("aten.exp.default", x)
        x.zero_()
