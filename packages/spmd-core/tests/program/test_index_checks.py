"""`config.check_indices`: each operation with an index that the device computed reports it."""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.program import compile_cache, index_checks


@pytest.fixture(autouse=True)
def checks() -> Iterator[None]:
    index_checks.forget()
    spmd.config.check_indices = True
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
}
IN_RANGE = (0, 3)
WRAPS = {"multilabel_margin_loss"}  # where -1 ends the list
WRAPS |= {"index", "index of two dims", "index_put", "index_put_", "index_fill", "take", "put"}


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
            with pytest.raises(spmd.IndexRangeError, match="must lie inside the dim"):
                got.cpu()


def test_the_error_names_the_operation_and_the_line() -> None:
    x, i = torch.zeros(4, 5, device="xla"), torch.full((2,), 3, device="xla") + 1
    first = x[i - 1] + 1
    wrong = first + x.index_select(0, i)
    with pytest.raises(
        IndexError,
        match=r"aten::index_select -> float32\[2, 5\] got one.*record_source_lines = True",
    ):
        wrong.cpu()
    assert first.tolist() == [[1.0] * 5] * 2  # raised once
    spmd.config.record_source_lines = True
    wrong = x.index_select(0, i)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(RuntimeError, match=rf"recorded at {__file__}:{line}, got") as caught:
        spmd.sync(wait=True)
    assert "record_source_lines" not in str(caught.value)
    del wrong


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
        with pytest.raises(spmd.IndexRangeError, match=r"aten::index.*float32\[8, 3\]"):
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
    with pytest.raises(spmd.IndexRangeError, match=r"aten::index.*float32\[2, 3\] got one"):
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
        return compile_cache.keys()[-1], program.lowered_text()

    checked, text = compiled()
    index_checks.forget()
    spmd.config.check_indices = False
    plain, plain_text = compiled()
    assert compile_cache.changed(plain, checked) == ("checks_indices",)
    (change,) = spmd.debugging.explain_recompile().changes
    assert change.text == "config.check_indices: True -> False"
    assert text.count("stablehlo.compare") > plain_text.count("stablehlo.compare")
    assert not index_checks._unread


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
