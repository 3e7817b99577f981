"""auto/resharding.py: the bytes that a change of layout over several axes moves."""

from dataclasses import replace

import pytest

from spmd_core.auto.machine import Machine
from spmd_core.auto.resharding import Partial, Resharding

_CHIP = Machine("made up", 8, 1e9, 1e8, 1e7, 1e6, 1e-6, None, (0,) * 8)
_SUM = Partial.SUM


def sent(source, target, *, crossing=(False, False), machine=_CHIP):
    """The bytes that a device sends of 800, over axes of 2 and 4."""
    model = Resharding((2, 4), crossing, machine.counting_bytes())
    return model.seconds(800, (8, 8), source, target)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((0, 1), (0, 1), 0),
        ((0, 1), (None, None), 800 * 7 / 8),  # as over one axis of 8
        ((0, 0), (None, None), 800 * 7 / 8),
        ((0, 1), (0, None), 400 * 3 / 4),  # each device has half of it anyway
        ((0, None), (None, 1), 200 * 1 / 2),  # a quarter is cut out before it is gathered
        ((None, None), (0, 1), 0),
        ((0, None), (1, None), 400 * 1 / 2),
        ((_SUM, None), (None, None), 2 * 800 * 1 / 2),
        ((_SUM, _SUM), (None, None), 2 * 800 * 7 / 8),
        ((_SUM, _SUM), (0, None), 800 * 1 / 2 + 2 * 400 * 3 / 4),
        ((_SUM, 1), (0, None), 200 * 1 / 2 + 400 * 3 / 4),  # scattered before it is gathered
        ((_SUM, 0), (_SUM, 0), 0),
        ((None, 0), (_SUM, 0), 0),
    ],
)
def test_bytes_over_both_axes(source, target, expected):
    assert sent(source, target) == pytest.approx(expected)


def test_a_collective_over_an_axis_between_slices_is_as_slow_as_that():
    machine = replace(_CHIP, latency_s=0.0)
    inside, across = (
        Resharding((2, 4), crossing, machine).seconds(800, (8, 8), (0, 0), (None, None))
        for crossing in ((False, False), (True, False))
    )
    assert across == pytest.approx(10 * inside)


def test_axes_of_one_kind_have_one_latency():
    machine = replace(_CHIP, links_bytes_per_s=float("inf"))
    model = Resharding((2, 4), (False, False), machine)
    assert model.seconds(800, (8, 8), (_SUM, _SUM), (None, None)) == pytest.approx(1e-6)


def test_parts_along_an_inner_dim_are_put_in_order():
    model = Resharding((2, 4), (False, False), replace(_CHIP, latency_s=0.0))
    outer, inner = (model.seconds(800, (8, 8), (d, None), (None, None)) for d in (0, 1))
    assert inner - outer == pytest.approx(2 * 800 / 1e8)
