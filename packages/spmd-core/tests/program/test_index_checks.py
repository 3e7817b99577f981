"""`config.check_indices`: each operation with an index that the device computed reports it."""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from recorded_graphs import graph_of, names, rewritten
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.program import compile_cache, index_checks, index_flag
from spmd_core.program.passes.index_checks import index_checks as passes_index_checks


@pytest.fixture(autouse=True)
def checks() -> Iterator[None]:
    index_checks.forget()
    yield
    spmd.sync()
    index_checks.forget()


# Each operation takes a (4, 5) tensor, two indices, and the same indices for each element.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "index": lambda x, i, e: x[i],
    "index of two dims": lambda x, i, e: x[torch.zeros_like(i), i],
    "index_put": lambda x, i, e: x.index_put((i,), x[:2]),
    "index_put_": lambda x, i, e: x.clone().index_put_((i,), torch.zeros_like(x[:2])),
    "gather": lambda x, i, e: x.gather(0, e),
    "scatter": lambda x, i, e: x.scatter(0, e, x),
    "scatter of a value": lambda x, i, e: x.scatter(0, e, 2.0),
    "scatter and multiply": lambda x, i, e: x.scatter(0, e, x, reduce="multiply"),
    "scatter and multiply a value": lambda x, i, e: x.scatter(0, e, 2.0, reduce="multiply"),
    "scatter_add_": lambda x, i, e: x.clone().scatter_add_(0, e, x),
    "scatter_reduce": lambda x, i, e: x.scatter_reduce(0, e, x, "amax"),
    "index_select": lambda x, i, e: x.index_select(0, i),
    "index_add": lambda x, i, e: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i, e: x.index_copy(0, i, x[:2]),
    "index_fill": lambda x, i, e: x.index_fill(0, i, 1.0),
    "index_reduce": lambda x, i, e: x.index_reduce(0, i, x[:2], "prod"),
    "embedding": lambda x, i, e: F.embedding(i, x),
    "embedding_bag": lambda x, i, e: F.embedding_bag(i, x, torch.zeros_like(i[:1])),
    "take": lambda x, i, e: x.reshape(-1)[:4].take(i),
    "put": lambda x, i, e: x.reshape(-1)[:4].put(i, x[0, :2]),
    "nll_loss": lambda x, i, e: F.nll_loss(x[:2, :4], i),
    "cross_entropy": lambda x, i, e: F.cross_entropy(x[:2, :4], i),
    "cross_entropy of images": lambda x, i, e: F.cross_entropy(
        x.t()[None, :4], i[None, [0, 1, 0, 1]]
    ),
    "multi_margin_loss": lambda x, i, e: F.multi_margin_loss(x[:2, :4], i),
    "multilabel_margin_loss": lambda x, i, e: F.multilabel_margin_loss(
        x[0, :4], torch.cat([i, i[:1], i[:1]])
    ),
    "one_hot": lambda x, i, e: F.one_hot(i, 4),
    "linear_cross_entropy": lambda x, i, e: spmd.linear_cross_entropy(x[:2], x, i),
    "offsets of bags": lambda x, i, e: F.embedding_bag(torch.zeros_like(e[0, :3]), x, i),
}
IN_RANGE = (0, 3)
WRAPS = {"multilabel_margin_loss"}  # where -1 ends the list
WRAPS |= {
    "take_along_dim",
    "index",
    "index of two dims",
    "index_put",
    "index_put_",
    "index_fill",
    "take",
    "put",
}


def result(name: str, indices: tuple[int, int], device: str = "xla") -> torch.Tensor:
    x = torch.arange(1.0, 21.0, device=device).view(4, 5)
    # Computed on the device: the host does not see these values before the program has run.
    i = torch.tensor(indices, device=device) * 1
    return OPERATIONS[name](x, i, i[:, None].expand(2, 5))


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_index_outside_its_dim_raises_at_the_read(name: str) -> None:
    inside = IN_RANGE if name != "index of two dims" else (0, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(result(name, inside).cpu(), result(name, inside, "cpu"))
        for outside in ((0, 5), (-1, 0), (-6, 0)):
            if outside[0] == -1 and name in WRAPS:
                torch.testing.assert_close(
                    result(name, outside).cpu(), result(name, outside, "cpu")
                )
                continue
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                result(name, outside, "cpu")
            got = result(name, outside)
            with pytest.raises(spmd.errors.IndexRangeError, match="must lie inside the dim"):
                got.cpu()


def test_the_error_names_the_operation_and_the_line() -> None:
    x, i = torch.zeros(4, 5, device="xla"), torch.full((2,), 3, device="xla") + 1
    first = x[i - 1] + 1
    wrong = first + x.index_select(0, i)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(
        IndexError,
        match=rf"aten::index_select -> float32\[2, 5\], recorded at {__file__}:{line}, takes 0 to "
        "3 and got another index.* wrong, .*config.check_indices = False",
    ):
        wrong.cpu()
    assert first.tolist() == [[1.0] * 5] * 2  # raised once
    with spmd.debugging.source_lines():
        wrong = x.index_select(0, i)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(RuntimeError, match=rf"recorded at {__file__}:{line}, takes"):
        spmd.sync(wait=True)
    del wrong
    spmd.config.check_indices = False  # the advice
    assert x.index_select(0, i).tolist() == [[0.0] * 5] * 2


def test_a_later_read_raises_for_the_earliest_program() -> None:
    x, i = torch.zeros(4, 5, device="xla"), torch.full((2,), 3, device="xla") + 1
    kept = []
    for operation in (torch.Tensor.index_select, torch.Tensor.index_add):
        extra = () if operation is torch.Tensor.index_select else (x[:2],)
        kept.append(operation(x, 0, i, *extra))
        spmd.sync()
    with pytest.raises(IndexError, match="aten::index_select"):
        torch.ones(2, device="xla").sum().item()
    with pytest.raises(IndexError, match="aten::index_add"):
        torch.ones(2, device="xla").sum().item()
    assert torch.ones(2, device="xla").sum().item() == 2


@pytest.mark.filterwarnings("ignore:the shape of the result")
def test_ignored_targets_and_masks_are_no_indices() -> None:
    x = torch.zeros(3, 4, device="xla")
    target = torch.tensor([0, -100, 3], device="xla") * 1
    assert F.cross_entropy(x, target).isfinite().item()
    assert x[x > 1].numel() == 0
    x[x < 1] = 2.0
    assert x.sum().item() == 24


def test_the_operands_may_be_split(mesh_1d: spmd.Mesh, num_devices: int) -> None:
    x = spmd.mark_sharding(torch.zeros(2 * num_devices, 3).to("xla"), mesh_1d, ("x", None))
    i = spmd.mark_sharding(torch.arange(num_devices).to("xla"), mesh_1d, ("x",)) * 3
    if num_devices > 2:
        with pytest.raises(spmd.errors.IndexRangeError, match=r"aten::index.*float32\[8, 3\]"):
            x[i].cpu()
    assert x[i // 2].sum().item() == 0


def test_the_indices_of_one_device_in_a_manual_region(mesh_1d: spmd.Mesh, num_devices: int) -> None:
    def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index + 0] * 2

    specs = {"in_specs": (("x", None), ("x",)), "out_specs": ("x", None)}
    x = torch.ones(2 * num_devices, 3).to("xla")
    inside = torch.tensor([1, 0] * num_devices).to("xla")
    rows = spmd.shard_map(look_up, mesh_1d, **specs)(x, inside)
    assert rows.tolist() == [[2.0] * 3] * (2 * num_devices)
    outside = torch.tensor([1, 0] * (num_devices - 1) + [0, 2]).to("xla")  # on the last device
    rows = spmd.shard_map(look_up, mesh_1d, **specs)(x, outside)
    with pytest.raises(
        spmd.errors.IndexRangeError, match=r"aten::index.*float32\[2, 3\].* -2 to 1 "
    ):
        rows.cpu()


def test_without_the_checks_nothing_is_returned_for_them() -> None:
    """The setting is part of a program's key; without it the program is what it was."""

    def compiled() -> tuple[compile_cache.Key, str]:
        x, i = torch.zeros(4, 5, device="xla"), torch.full((2,), 3, device="xla") + 1
        kept = x.index_select(0, i)
        spmd.sync()
        del kept
        program = compile_cache.newest()
        assert program is not None
        return compile_cache.keys()[-1], program.lowered.stage.as_text()

    checked, text = compiled()
    index_checks.forget()
    spmd.config.check_indices = False
    plain, plain_text = compiled()
    assert compile_cache.changed(plain, checked) == ("checks_indices",)
    (change,) = spmd.debugging.explain_recompile().changes
    assert change.text == "config.check_indices: True -> False"
    assert text.count("stablehlo.compare") > plain_text.count("stablehlo.compare")
    assert not index_checks._unread
    assert not compile_cache.newest().index_checks


def test_the_tokens_of_many_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_checks, "_MAX_UNREAD", 3)
    x, i = torch.zeros(2, device="xla"), torch.full((2,), 3, device="xla") + 1
    for step in range(8):
        x = x + 1
        wrong = x.index_select(0, i) if step == 1 else None
        spmd.sync()
        assert len(index_checks._unread) <= 3
    del wrong
    with pytest.raises(IndexError, match="aten::index_select"):
        x.tolist()
    assert x.tolist() == [8.0, 8.0]


def num_checks(*results: torch.Tensor) -> int:
    """The checks of the program that computes these tensors."""
    spmd.sync()
    program = compile_cache.newest()
    assert program is not None and results
    return len(program.index_checks)


def test_what_is_known_to_lie_inside_is_not_checked() -> None:
    table = torch.randn(6, 5, device="xla", requires_grad=True)
    ids = torch.arange(6).view(2, 3).to("xla")
    spmd.sync()
    # Positions that operations made.
    order = table.argsort(0)[:, :2]
    top = table.topk(2, dim=0).indices.t().reshape(-1).to(torch.int32)
    best = table.argmax(0)
    spots = torch.multinomial(torch.ones(6, device="xla"), 3)
    drawn = torch.randint(6, (3,), device="xla")
    steps = torch.arange(4, -1, -2, device="xla")
    found = [table[:, :2].gather(0, order), *(table[i] for i in (top, best, spots, drawn, steps))]
    assert num_checks(*found) == 0
    assert num_checks(table[torch.arange(1, 7, device="xla")]) == 1
    assert num_checks(table[torch.randint(7, (3,), device="xla")]) == 1
    assert num_checks(table[best * 1]) == 1
    index_checks.forget()
    # What the same program has checked: its backward, its parts, and what is computed again.
    looked_up = F.embedding(ids, table)
    looked_up.sum().backward()
    assert num_checks(looked_up, table.grad) == 1
    picked = table.gather(0, ids.t()).sum() + table.index_select(0, ids[0]).sum()
    picked.backward()
    assert num_checks(picked, table.grad) == 1  # of `ids`, which has all of these
    logits = F.embedding(ids, table)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 5), ids[:, 1:].reshape(-1))
    assert num_checks(loss) == 2  # 5 classes are fewer than 6 rows
    index_checks.forget()  # a class of 5
    wide = torch.cat([table, table], 1)
    loss = F.cross_entropy(F.embedding(ids, wide).reshape(-1, 10), ids.view(-1).int().long())
    assert num_checks(loss) == 1
    again = checkpoint(lambda: F.embedding(ids, table).tanh(), use_reentrant=False)
    again.sum().backward()
    assert num_checks(again, table.grad) == 1


def collectives(text: str) -> int:
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return sum(text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds)


# The shape of the indices, how they are marked, and what is done with them first.
LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...], Callable[[torch.Tensor], torch.Tensor]]] = [
    ((8, 3), ("a",), lambda i: i),
    ((8, 4), ("a", "b"), lambda i: i * 1),
    ((16,), (("b", "a"),), lambda i: i.view(8, 2) + 0),
    ((4, 8), (None, ("a", "b")), lambda i: i.to(torch.int32)),
    ((8, 3), ("b",), lambda i: i.reshape(-1)),
    ((7, 3), ("a",), lambda i: i + 0),  # uneven
    ((5, 7), ("a", "b"), lambda i: i),
    ((8, 6), ("a", None), lambda i: i[:, 1:]),
    ((8, 4), ("b", "a"), lambda i: i.t().reshape(-1).repeat(2)),
    ((6, 4), ("a", "b"), lambda i: (i + 0).reshape(-1).flip(0)),  # uneven, and merged
]


def test_no_index_is_moved_to_check_it(num_devices: int) -> None:
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("a", "b"))
    table = torch.randn(9, 4)
    on_xla = spmd.mark_sharding(table.to("xla"), mesh, (None, None))
    for shape, spec, prepare in LAYOUTS:
        ids = torch.arange(torch.Size(shape).numel()).view(shape) % 9
        moved, results = {}, {}
        for checks in (True, False):
            spmd.config.check_indices = checks
            data = spmd.mark_sharding(ids.to("xla"), mesh, spec)
            found = F.embedding(prepare(data), on_xla) * 2
            spmd.sync()
            program = compile_cache.newest()
            assert program is not None and len(program.index_checks) == checks
            moved[checks] = collectives(program.compiled_text())
            results[checks] = found.cpu()
        assert torch.equal(results[True], results[False])
        assert torch.equal(results[True], F.embedding(prepare(ids), table) * 2)
        assert moved[True] == moved[False], (shape, spec)
        spmd.config.check_indices = True
        for position in (0, -1):  # on the first device and on the last one
            wrong = ids.clone()
            wrong.view(-1)[position] = 9
            if prepare(wrong).max() < 9:
                continue
            data = spmd.mark_sharding(wrong.to("xla"), mesh, spec)
            found = F.embedding(prepare(data + 0), on_xla)
            with pytest.raises(spmd.errors.IndexRangeError, match="takes 0 to 8 and got another"):
                found.cpu()


def test_processes_agree_by_one_reduction(num_devices: int, monkeypatch: Any) -> None:
    """As if the devices belonged to several processes."""
    monkeypatch.setattr(index_flag, "_num_processes_of", lambda mesh: 2)
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("a",))
    table = torch.ones(9, 4, device="xla")
    rows = [spmd.mark_sharding((torch.arange(16) % 9).to("xla"), mesh, ("a",)) for _ in range(3)]
    found = [table[rows[0] + 0], table.index_select(0, rows[1]), F.embedding(rows[2], table)]
    assert num_checks(*found) == 3
    program = compile_cache.newest()
    assert program is not None and program.compiled.output_shardings[1].is_fully_replicated
    assert collectives(program.compiled_text()) == (num_devices > 1)
    assert "s32[] all-reduce(" in program.compiled_text() or num_devices == 1
    wrong = table[rows[0] + 1]
    with pytest.raises(spmd.errors.IndexRangeError):
        wrong.cpu()


def test_sizes_that_grow_share_a_program_with_its_check() -> None:
    table = torch.randn(7, 4)
    on_xla = table.to("xla")
    before = compile_cache.keys()
    for length in range(33, 40):
        ids = torch.arange(length) % 7
        found = F.embedding(ids.to("xla") + 0, on_xla)
        assert torch.equal(found.cpu(), F.embedding(ids, table))
    assert len(set(compile_cache.keys()) - set(before)) == 2  # the first size, and all others
    program = compile_cache.newest()
    assert program is not None and program.graph.growth is not None and program.index_checks
    ids = (torch.arange(41) % 7).to("xla")
    ids[-1] = 7
    spmd.sync()
    found = F.embedding(ids + 0, on_xla)
    with pytest.raises(IndexError, match="takes 0 to 6 "):
        found.cpu()


class _Token:
    """A token of a program that runs."""

    def is_ready(self) -> bool:
        return False


def test_a_read_does_not_wait_for_later_programs() -> None:
    x, i = torch.zeros(2, device="xla"), torch.full((2,), 3, device="xla") + 1
    kept = [x.index_select(0, i * 0)]
    spmd.sync()
    last = index_checks._unread[-1]
    later = dataclasses.replace(last, number=last.number + 1, token=_Token())
    index_checks._unread.append(later)
    assert kept[0].tolist() == [0.0, 0.0]
    assert list(index_checks._unread) == [later]
    index_checks.forget()


def test_the_end_of_the_process_tells_what_no_read_has_told() -> None:
    kept = torch.zeros(2, device="xla").index_select(0, torch.full((2,), 3, device="xla") + 1)
    spmd.sync()
    with pytest.warns(RuntimeWarning, match="ends unaware of an error: .*takes 0 to 1 "):
        index_checks._warn_at_exit()
    index_checks._warn_at_exit()
    assert kept.shape == (2,)


def test_an_index_is_told_in_the_thread_whose_program_has_it():
    """And in those that have read its results."""
    x = torch.arange(4.0).to("xla")

    def wrong():
        y = x[torch.tensor([8]).to("xla") + 1]
        spmd.sync()
        return y

    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(wrong).result()
        spmd.sync(wait=True)
        assert (x + 1).tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(
            spmd.errors.IndexRangeError, match="takes -4 to 3 and got another index"
        ):
            pool.submit((x + 1).tolist).result()
        y = pool.submit(wrong).result()
        with pytest.raises(
            spmd.errors.IndexRangeError, match="takes -4 to 3 and got another index"
        ):
            (y + 1).tolist()
        pool.submit(wrong).result()
    with pytest.raises(spmd.errors.IndexRangeError, match="takes -4 to 3 and got another index"):
        spmd.sync(wait=True)  # of a thread that has ended


def test_the_check_stands_before_the_operation(mesh_1d):
    table = torch.randn(6, 4).to("xla")
    ids = spmd.mark_sharding(torch.randint(6, (8,)).to("xla"), mesh_1d, ("x",)) * 1
    graph = graph_of(F.embedding(ids, table), table[ids].sin())
    made = rewritten(passes_index_checks, graph)
    checked = [names(made)[i + 1] for i, name in enumerate(names(made)) if name == "check_indices"]
    assert checked == ["embedding"]  # what is read again is known
    (found,) = made.checked
    assert found.spec.shape == ((len(mesh_1d.ids),) if len(mesh_1d.ids) > 1 else ())
    assert [check.position for check in made.flag.checks] == [found.op.source.position]
