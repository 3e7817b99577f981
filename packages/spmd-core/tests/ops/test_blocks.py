"""Blocks that are computed from the tensor that they are written into, against eager torch."""

import itertools

import pytest
import torch
from jax import lax
from tiers import by_tier, crossed

import spmd_core as spmd


def shifted_rows(x):
    x[1:] = x[:-1].clone()


def shifted_diagonally(x):
    x[1:, 1:] = x[:-1, :-1].clone()


def reversed_columns(x):
    x[:, :-1] = x.flip(1)[:, 1:]


def row_of_a_row(x):
    x[0] = x[-1] * 2


def column_of_a_row(x):
    x[:1, -1] = x[-1, :1].clone()


def every_second_row(x):
    x[::2] = x[: -(-len(x) // 2)].clone()


def one_index(x):
    x[torch.tensor([len(x) - 1], device=x.device)] = x[:1] + 1


def strided(x):
    x.as_strided((3,), (1,), x.storage_offset() + 1).copy_(
        x.as_strided((3,), (1,), x.storage_offset()).clone()
    )


WRITES = [
    shifted_rows, shifted_diagonally, reversed_columns, row_of_a_row, column_of_a_row,
    every_second_row, one_index, strided,
]  # fmt: skip
VIEWS = {
    "4x4": lambda x: x.view(4, 4),
    "16x1": lambda x: x.view(16, 1),
    "2x8": lambda x: x.view(2, 8),
    "4x4 transposed": lambda x: x.view(4, 4).T,
    "middle of 2x4x2": lambda x: x.view(2, 4, 2)[:, 1:3, 1],
}


@pytest.mark.parametrize(("write", "view"), crossed(WRITES, [*VIEWS], rounds=2))
def test_a_block_that_reads_what_it_is_written_into(write, view):
    """Alone, after another write and before one; each is a program of its own."""

    def changed(before, after, device):
        base = torch.arange(16.0).to(device)
        x = VIEWS[view](base)
        if before:
            row_of_a_row(x)
        write(x)
        if after:
            x[0] = 0
        return base

    both = list(itertools.product([False, True], repeat=2))
    for before, after in by_tier(both[::3], in_all=both):
        mine, right = changed(before, after, "xla"), changed(before, after, "cpu")
        assert torch.equal(mine.cpu(), right), (before, after)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_buffer_whose_rows_move(steps):
    def moved(device):
        buffer = torch.zeros(5, 3, device=device)
        flat = buffer.flatten()
        for step in range(steps):
            flat[3:] = flat[:-3].clone()
            buffer[0] = step + 1
        return buffer, flat

    for mine, right in zip(moved("xla"), moved("cpu")):
        assert torch.equal(mine.cpu(), right)


def test_compiler_options_of_the_user_stay(monkeypatch):
    monkeypatch.setattr(spmd.config, "compiler_options", {"xla_disable_hlo_passes": "algsimp"})
    x = torch.arange(16.0, device="xla").view(4, 4)
    shifted_diagonally(x)
    x[0] = 0
    assert x.cpu()[1].tolist() == [4, 0, 1, 2] and x.cpu()[3].tolist() == [12, 8, 9, 10]


# XLA would write a loop of less than a kilobyte as one function, without code for barriers.
@pytest.mark.parametrize("size", [2, 300])
def test_a_barrier_in_a_loop_of_a_users_jax_function(size):
    def doubled(x):
        return lax.fori_loop(0, 3, lambda i, y: lax.optimization_barrier(y) * 2, x)

    assert spmd.call_jax(doubled, torch.ones(size).to("xla")).cpu().tolist() == [8.0] * size
