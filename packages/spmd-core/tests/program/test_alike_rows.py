"""Which operations treat rows alike: rows in another order give their results in that order."""

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of

from spmd_core.program.alike_rows import NotAlikeError, Order, orders
from spmd_core.program.ir import Ref

ROWS, COLUMNS = 6, 4


def followed(tensor, given):
    """The dim of the rows in a pending tensor, by the orders of the graph's inputs."""
    graph = graph_of(tensor)
    known = dict(zip((Ref(x) for x in graph.inputs), given))
    for op in graph.ops:
        own = [known.get(x, Order()) for x in op.operands]
        if any(x.dim is not None for x in own):
            made = orders(op.entry, [x.spec for x in op.operands], own)
            known.update(zip(op.results, made, strict=True))
    return known[graph.outputs[0]].dim


def found(function):
    """The dim of the rows in the result of a function of rows and of other values like them."""
    x, y = (torch.ones(ROWS, COLUMNS).to("xla") for _ in range(2))
    return followed(function(x, y), [Order(0), Order()])


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda x, y: x.exp(), 0),
        (lambda x, y: F.silu(x), 0),
        (lambda x, y: F.gelu(x), 0),
        (lambda x, y: x.clamp(0, 1), 0),
        (lambda x, y: x.double(), 0),
        (lambda x, y: torch.transpose_copy(x, 0, 1), 1),
        (lambda x, y: torch.unsqueeze_copy(x, 0), 1),
        (lambda x, y: torch.slice_copy(x, 1, 1, 3), 0),
        (lambda x, y: x.sum(1), 0),
        (lambda x, y: x.sum(0), None),
        (lambda x, y: x.amax(0), None),
        (lambda x, y: x.argmax(1), 0),
        (lambda x, y: x.softmax(1), 0),
        (lambda x, y: x.cumsum(1), 0),
        (lambda x, y: x.flip(1), 0),
        (lambda x, y: F.pad(x, (1, 2)), 0),
        (lambda x, y: F.rms_norm(x, (COLUMNS,)), 0),
    ],
)
def test_operations_on_rows(function, result):
    assert found(function) == result


@pytest.mark.parametrize(
    ("function", "second", "result"),
    [
        (lambda x, y: x * y, Order(0), 0),
        (lambda x, y: x * y, Order(uniform=frozenset({0, 1})), 0),
        (lambda x, y: torch.where(x > 0, y, y), Order(0), 0),
        (lambda x, y: torch.cat([x, y], 1), Order(0), 0),
    ],
)
def test_operations_on_rows_of_two(function, second, result):
    x, y = (torch.ones(ROWS, COLUMNS).to("xla") for _ in range(2))
    assert followed(function(x, y), [Order(0), second]) == result


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.cumsum(0),
        lambda x, y: x.flip(0),
        lambda x, y: torch.slice_copy(x, 0, 1, 3),
        lambda x, y: x.sort(0)[0],
        lambda x, y: x.argmax(0),
        lambda x, y: x.tril(),
        lambda x, y: torch.view_copy(x, (ROWS * COLUMNS,)),
        lambda x, y: F.pad(x, (0, 0, 1, 0)),
        lambda x, y: F.dropout(x, 0.5),
        lambda x, y: x * y,
        lambda x, y: torch.cat([x, y], 0),
        lambda x, y: torch.roll(x, 1, 0),
    ],
)
def test_operations_that_need_the_order(function):
    with pytest.raises(NotAlikeError):
        found(function)


def product(left, right, given):
    return followed(torch.ones(left).to("xla") @ torch.ones(right).to("xla"), given)


def test_products():
    assert product((6, 4), (4, 3), [Order(0), Order()]) == 0
    assert product((3, 4), (4, 6), [Order(), Order(1)]) == 1
    assert product((4, 6), (6, 3), [Order(1), Order(0)]) is None
    assert product((6, 2, 4), (6, 4, 3), [Order(0), Order(0)]) == 0
    for given in ([Order(1), Order()], [Order(0), Order(1)], [Order(), Order(0)]):
        with pytest.raises(NotAlikeError):
            product((6, 6), (6, 6), given)
