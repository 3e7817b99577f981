"""Which graphs sort rows by group so that another order would do, and what is computed in parts."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from grouped_experts import WIDTH, experts, gradients, inverse_of, multiply, route, tensors
from recorded_graphs import graph_of

from spmd_core.program.sorted_rows import Role, sorted_rows

NUM, K = 64, 2


def on_device(num_experts=4):
    return [t.to("xla") for t in tensors(num_experts=num_experts)]


def roles(*found):
    """The roles of the operations of each sort in the graph of pending tensors."""
    held = [t + 0 for t in found if t is not None]
    return [Counter(rows.roles.values()) for rows in sorted_rows(graph_of(*held))]


def test_forward_and_backward_of_experts():
    (found,) = roles(*gradients(experts, on_device()))
    assert found == {Role.SORT: 1, Role.READ: 3, Role.WRITE: 4, Role.ROWS: 4, Role.SUMS: 2}


def test_each_layer_has_rows_of_its_own():
    x, *weights = on_device()
    found = roles(experts(experts(x, *weights), *weights))
    assert found == [{Role.SORT: 1, Role.READ: 3, Role.WRITE: 1, Role.ROWS: 2}] * 2


def layer(counts, *, k=K, num_experts=4, chosen=lambda c: c):
    """Tokens through experts; `counts` takes the sorted experts and gives the ends of experts."""
    x, router, up, down, bias = on_device(num_experts)
    flat = x.view(-1, WIDTH)
    _, picked = route(flat, router, bias, k)
    by_expert, order = torch.sort(chosen(picked).reshape(-1))
    out = multiply(flat[order // k], up, down, counts(by_expert))
    return out[inverse_of(order)]


def ends(bins, low, high, dtype=torch.int32):
    return lambda x: torch.histc(x.int(), bins=bins, min=low, max=high).cumsum(0, dtype=dtype)


@pytest.mark.parametrize(
    ("counts", "is_found"),
    [
        (ends(4, 0, 3), True),
        (ends(4, 0, 4), True),
        (ends(4, 1, 4), False),  # expert 0 is not counted
        (ends(4, 0, 5), False),
        (ends(4, 0, 2), False),
        (ends(4, 0.0, 3.0), False),  # inputs of the program, not part of it
        (lambda x: torch.histc(x.int(), bins=4, min=0, max=3).int(), False),  # no ends
        (lambda x: torch.histc(x.int() + 1, bins=4, min=0, max=3).cumsum(0).int(), False),
        (lambda x: torch.full((4,), 32, dtype=torch.int32, device="xla"), False),
    ],
)
def test_ends_of_groups(counts, is_found):
    assert bool(roles(layer(counts))) == is_found


def test_one_expert_is_counted_with_others_by_an_interval_without_length():
    """torch takes the interval of the data then, so that experts above 0 would count, too."""
    assert not roles(layer(ends(1, 0, 0), k=1, num_experts=1))


@pytest.mark.parametrize(
    ("chosen", "is_found"),
    [
        (lambda c: c.clone(), True),
        (lambda c: c.flip(0), True),
        (lambda c: c - 1, False),  # below 0: sorted first, counted nowhere
        (lambda c: c * 2, False),
    ],
)
def test_numbers_of_groups(chosen, is_found):
    assert bool(roles(layer(ends(4, 0, 3), chosen=chosen))) == is_found


def test_a_last_bin_with_both_ends_would_count_a_group_too_many():
    # Experts 0 to 3 in 3 bins up to 3: the last one would have experts 2 and 3.
    x, router, up, down, bias = on_device(4)
    flat = x.view(-1, WIDTH)
    _, picked = route(flat, router, bias)
    by_expert, order = torch.sort(picked.reshape(-1))
    out = multiply(flat[order // K], up[:3], down[:3], ends(3, 0, 3)(by_expert))
    assert not roles(out[inverse_of(order)])
    out = multiply(flat[order // K], up[:3], down[:3], ends(3, 0, 2)(by_expert))
    assert roles(out[inverse_of(order)])


def test_positions_divided_by_another_number_are_read_over_all_parts():
    x, router, up, down, bias = on_device()
    flat = torch.cat([x.view(-1, WIDTH), x.view(-1, WIDTH)])
    _, picked = route(flat[:NUM], router, bias)
    by_expert, order = torch.sort(picked.reshape(-1))
    out = multiply(flat[order // K], up, down, ends(4, 0, 3)(by_expert))
    (found,) = roles(out[inverse_of(order)])
    assert found[Role.READ] == 1  # the way back alone


def test_groups_of_columns():
    x, router, up, _, bias = on_device()
    flat = x.view(-1, WIDTH)
    _, picked = route(flat, router, bias)
    by_expert, order = torch.sort(picked.reshape(-1))
    rows = flat[order // K]
    out = F.grouped_mm(up, rows.t(), offs=ends(4, 0, 3)(by_expert)).t()
    (found,) = roles(out[inverse_of(order)])
    assert found[Role.COLUMNS] == 1


@pytest.mark.parametrize("descending", [False, True])
def test_ascending_order_alone(descending):
    x, router, up, down, bias = on_device()
    flat = x.view(-1, WIDTH)
    _, picked = route(flat, router, bias)
    by_expert, order = torch.sort(picked.reshape(-1), descending=descending)
    out = multiply(flat[order // K], up, down, ends(4, 0, 3)(by_expert))
    assert bool(roles(out[inverse_of(order)])) != descending
