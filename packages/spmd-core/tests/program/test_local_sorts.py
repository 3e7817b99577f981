"""Tokens sorted by expert within each device's part: values, gradients, and what still moves."""

import pytest
import torch
from grouped_experts import (
    WIDTH,
    experts,
    gradients,
    inverse_of,
    marked,
    multiply,
    route,
    sort_tokens,
    tensors,
)
from recorded_graphs import graph_of, names, rewritten
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.planner import topology
from spmd_core.program.passes.local_sorts import local_sorts
from spmd_core.program.sorted_blocks import ENDS, IN_PARTS

TOKENS_BYTES = 8 * 8 * WIDTH * 4  # of the data, half of what goes to experts
DATA, BOTH = "a", ("a", "b")
COLUMNS = {"up": (None, "b", None), "down": (None, None, "b")}
EXPERTS = {"up": ("b", None, None), "down": ("b", None, None)}
WIDTHS = {"up": (None, None, "b"), "down": (None, "b", None)}


@pytest.fixture(autouse=True)
def several(num_devices):
    if num_devices < 8:
        pytest.skip("needs a mesh of two axes")


def num_local(*found):
    """How many operations the pass computes within parts."""
    held = [t + 0 for t in found if t is not None]
    return names(rewritten(local_sorts, graph_of(*held))).count(IN_PARTS.partition("::")[2])


def check(function, given, on_device, *, is_local=True, tolerance=1e-4):
    """Compares results and gradients with eager torch's."""
    found = gradients(function, on_device)
    assert bool(num_local(*found)) == is_local
    spmd.sync()
    for ours, right in zip(found, gradients(function, given), strict=True):
        if right is None:
            assert ours is None
        else:
            scale = max(1, right.abs().max().item())
            torch.testing.assert_close(ours.cpu(), right, rtol=tolerance, atol=tolerance * scale)


def moved():
    """Bytes of the largest result of a collective that moves tokens, of the last program."""
    kinds = ("all-gather", "all-to-all", "collective-permute")
    return max((c.result_bytes for c in spmd.debugging.collectives() if c.kind in kinds), default=0)


@pytest.mark.parametrize(
    ("data", "weights"),
    [
        (DATA, {}),
        (BOTH, {}),
        (BOTH, COLUMNS),
        (BOTH, WIDTHS),
        (BOTH, EXPERTS),
        (DATA, COLUMNS),
        (DATA, WIDTHS),
        (DATA, EXPERTS),
        ("b", {"up": (None, "a", "b"), "down": (None, "b", "a")}),
    ],
)
def test_values_and_gradients_on_a_mesh_of_two_axes(mesh_2d, data, weights):
    given = tensors()
    check(experts, given, marked(given, mesh_2d, data, **weights))


def test_no_device_asks_which_one_it_is(mesh_2d):
    """XLA's partitioner refuses that in some programs over a mesh of further axes."""
    given = tensors()
    found = gradients(experts, marked(given, mesh_2d, DATA, **COLUMNS))
    text = spmd.debugging.stablehlo(*(t for t in found if t is not None))
    assert num_local(*found) and "sdy.manual_computation" in text
    assert "partition_id" not in text


def test_no_tokens_move_under_data_parallelism(mesh_1d):
    given = tensors()
    check(experts, given, marked(given, mesh_1d, "x"))
    # The scores of the router: XLA's CPU backend gathers what `topk` reads.
    assert moved() <= 8 * 8 * 4 * 4 < TOKENS_BYTES


def test_gradients_of_split_experts_are_reduce_scattered(mesh_2d):
    given = tensors()
    check(experts, given, marked(given, mesh_2d, BOTH, **COLUMNS))
    assert sum(c.kind == "reduce-scatter" for c in spmd.debugging.collectives()) == 2


@pytest.mark.parametrize(
    ("batch", "length", "is_local"),
    [(16, 3, True), (4, 6, True), (7, 5, False), (3, 8, True), (1, 4, False)],
)
def test_sizes_that_devices_do_not_divide(mesh_1d, batch, length, is_local):
    given = tensors(batch, length)
    check(experts, given, marked(given, mesh_1d, "x"), is_local=is_local)


@pytest.mark.parametrize(
    "bias", [[-30.0, 0, 0, 0], [30.0, 30, 0, 0], [0.0, 0, -30, 40], [-40.0, -40, 40, 0]]
)
def test_experts_without_tokens(mesh_2d, bias):
    given = tensors(bias=bias)
    check(experts, given, marked(given, mesh_2d, BOTH, **COLUMNS))


@pytest.mark.parametrize(("k", "num_experts"), [(1, 2), (3, 24)])
def test_numbers_of_experts(mesh_1d, k, num_experts):
    given = tensors(num_experts=num_experts)

    def function(*leaves):
        return experts(*leaves, k=k)

    check(function, given, marked(given, mesh_1d, "x"))


def test_bfloat16(mesh_2d):
    given = tensors(dtype=torch.bfloat16)
    # The oracle in float32, of values that bfloat16 has: rows sum to about 40.
    found = gradients(experts, marked(given, mesh_2d, BOTH, **COLUMNS))
    assert num_local(*found)
    spmd.sync()
    for ours, right in zip(found, gradients(experts, [t.float() for t in given]), strict=True):
        scale = right.abs().max().item()
        torch.testing.assert_close(ours.cpu().float(), right, rtol=3e-2, atol=3e-2 * scale)


def test_layers_and_what_stands_between(mesh_2d):
    def function(x, *weights):
        for _ in range(3):
            x = x + experts(x.tanh(), *weights).flip(-1).roll(1, 0)
        return x.cumsum(0)

    given = tensors()
    check(function, given, marked(given, mesh_2d, BOTH, **COLUMNS))


def test_computed_again_in_backward(mesh_2d):
    def function(*leaves):
        return checkpoint(experts, *leaves, use_reentrant=False) * leaves[0]

    given = tensors()
    check(function, given, marked(given, mesh_2d, BOTH, **COLUMNS))


def unsorted_by_sort(order):
    return torch.argsort(order)


def test_the_inverse_by_another_sort(mesh_1d):
    def function(*leaves):
        return experts(*leaves, inverse=unsorted_by_sort)

    given = tensors()
    check(function, given, marked(given, mesh_1d, "x"))
    assert moved() < TOKENS_BYTES


def test_rows_written_back_at_their_positions(mesh_1d):
    def function(x, router, up, down, bias):
        flat = x.reshape(-1, WIDTH)
        shares, chosen = route(flat, router, bias)
        rows, order, ends = sort_tokens(flat, chosen, len(router))
        out = torch.zeros(len(order), WIDTH, device=x.device)
        out[order] = multiply(rows, up, down, ends)
        return (out.view(-1, 2, WIDTH) * shares.unsqueeze(-1)).sum(1)

    given = tensors()
    check(function, given, marked(given, mesh_1d, "x"))
    assert moved() < TOKENS_BYTES


def test_a_row_of_a_table_for_each_expert(mesh_1d):
    """As the biases of gpt-oss: they are read at the sorted experts."""

    def function(x, router, up, down, bias):
        flat = x.reshape(-1, WIDTH)
        _, chosen = route(flat, router, bias)
        rows, order, ends = sort_tokens(flat, chosen, len(router))
        out = multiply(rows, up, down, ends) + router[chosen.reshape(-1)[order]]
        return out[inverse_of(order)].view(-1, 2, WIDTH).sum(1)

    given = tensors()
    check(function, given, marked(given, mesh_1d, "x"))


# Programs that stay as they are.


def reads_sorted_rows(x, router, up, down, bias):
    flat = x.reshape(-1, WIDTH)
    _, chosen = route(flat, router, bias)
    rows, _, ends = sort_tokens(flat, chosen, len(router))
    return multiply(rows, up, down, ends)


def sums_up_along_rows(x, router, up, down, bias):
    flat = x.reshape(-1, WIDTH)
    _, chosen = route(flat, router, bias)
    rows, order, ends = sort_tokens(flat, chosen, len(router))
    return multiply(rows, up, down, ends).cumsum(0)[inverse_of(order)]


def adds_rows_in_their_place(x, router, up, down, bias):
    flat = x.reshape(-1, WIDTH)
    _, chosen = route(flat, router, bias)
    rows, order, ends = sort_tokens(flat, chosen, len(router))
    place = torch.arange(len(order), device=x.device, dtype=x.dtype).unsqueeze(-1)
    return (multiply(rows, up, down, ends) + 0.01 * place)[inverse_of(order)]


def takes_the_first_rows(x, router, up, down, bias):
    flat = x.reshape(-1, WIDTH)
    _, chosen = route(flat, router, bias)
    rows, _, ends = sort_tokens(flat, chosen, len(router))
    return multiply(rows, up, down, ends)[:8].sum(0)


def counts_other_experts(x, router, up, down, bias):
    flat = x.reshape(-1, WIDTH)
    _, chosen = route(flat, router, bias)
    rows, order, _ = sort_tokens(flat, chosen, len(router))
    _, _, ends = sort_tokens(flat, chosen.flip(0) * 0, len(router))
    return multiply(rows, up, down, ends)[inverse_of(order)]


@pytest.mark.parametrize(
    "function",
    [
        reads_sorted_rows,
        sums_up_along_rows,
        adds_rows_in_their_place,
        takes_the_first_rows,
        counts_other_experts,
    ],
)
def test_programs_that_need_the_order_stay(mesh_1d, function):
    given = tensors()
    check(function, given, marked(given, mesh_1d, "x"), is_local=False, tolerance=2e-3)


def test_positions_that_a_user_holds_stay(mesh_1d):
    given = tensors()
    x, router, up, down, bias = marked(given, mesh_1d, "x")
    _, chosen = route(x.view(-1, WIDTH), router, bias)
    rows, order, ends = sort_tokens(x.view(-1, WIDTH), chosen, len(router))
    out = multiply(rows, up, down, ends)[inverse_of(order)]
    assert num_local(out) and not num_local(out, order)


def test_experts_of_unknown_numbers_stay(mesh_1d):
    """Numbers below 0 would be sorted first, and counted nowhere."""
    given = tensors()
    x, router, up, down, _ = marked(given, mesh_1d, "x")
    chosen = torch.randint(0, 4, (64, 2))
    known = spmd.mark_sharding(chosen.to("xla"), mesh_1d, ("x", None))
    rows, order, ends = sort_tokens(x.view(-1, WIDTH), known, len(router))
    out = multiply(rows, up, down, ends)[inverse_of(order)]
    assert not num_local(out)
    rows, order, ends = sort_tokens(given[0].view(-1, WIDTH), chosen, 4)
    right = multiply(rows, *given[2:4], ends)[inverse_of(order)]
    torch.testing.assert_close(out.cpu(), right, rtol=1e-4, atol=1e-4)


def test_experts_that_devices_have_whole_stay_there_if_they_are_larger_than_the_rows(mesh_1d):
    split = {"up": ("x", None, None), "down": ("x", None, None)}
    many = tensors(length=1, num_experts=8)
    check(experts, many, marked(many, mesh_1d, "x", **split), is_local=False)
    few = tensors(batch=64, num_experts=8)
    check(experts, few, marked(few, mesh_1d, "x", **split))


def test_data_that_is_not_split_stays(mesh_1d):
    given = tensors(num_experts=8)
    split = {"up": ("x", None, None), "down": ("x", None, None)}
    check(experts, given, marked(given, mesh_1d, None, **split), is_local=False)


def test_products_of_a_layer_share_the_ends_of_groups(mesh_1d):
    given = tensors()
    found = gradients(experts, marked(given, mesh_1d, "x"))
    text = names(rewritten(local_sorts, graph_of(*(t + 0 for t in found))))
    assert text.count(ENDS.partition("::")[2]) == 1
    assert "_grouped_mm" not in text and "histc" not in text


@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_of_transformers(mesh_1d, recomputes):
    """What its version records is of this form; `test_models_language` trains such a model."""
    hf = pytest.importorskip("transformers")
    config = hf.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    with torch.device("xla"):
        model = hf.MixtralForCausalLM(config).train()
    if recomputes:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = spmd.mark_sharding(torch.randint(32, (8, 8)).to("xla"), mesh_1d, ("x", None))
    model(input_ids=tokens, labels=tokens).loss.backward()
    held = [p.grad + 0 for p in model.parameters()]
    count = names(rewritten(local_sorts, graph_of(*held))).count("ends_of_groups")
    assert count == (4 if recomputes else 2)


@pytest.mark.skipif(topology.libtpu_version() is None, reason="libtpu is not installed")
def test_tpus_move_no_tokens():
    mesh = spmd.Mesh(range(8), (2, 4), ("a", "b"))

    def step():
        spmd.use_spmd()
        found = gradients(experts, marked(tensors(), mesh, BOTH, **COLUMNS))[1:]
        spmd.sync()
        del found

    made = spmd.plan(step, topology="v4-16")
    sizes = {kind: [] for kind in ("all-gather", "all-reduce", "reduce-scatter")}
    for each in made.largest.collectives:
        sizes[each.kind].append(each.result_bytes)
    assert sorted(sizes["all-gather"]) == sorted(t.nbytes for t in tensors()[2:4])
