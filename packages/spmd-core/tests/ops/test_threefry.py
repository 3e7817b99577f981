"""Bits and samples against jax's own generator; what drawing takes, by the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.random import threefry_2x32
from tiers import crossed
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.ops.kernels import threefry
from spmd_core.ops.kernels.threefry import fused
from spmd_core.program import compile_cache

SEED = 0x0123456789ABCDEF
SHAPES = [(), (7,), (16, 8), (13, 1, 3), (2, 3, 4, 5), (0, 2**40)]
pytestmark = pytest.mark.one_device


def key():
    """A key of jax, as a program makes one of a seed."""
    return jax.random.wrap_key_data(np.array([SEED >> 32, SEED & 0xFFFFFFFF], np.uint32))


def test_the_hash_is_that_of_its_authors():
    # Random123, tests/kat_vectors: threefry2x32 of 20 rounds.
    for position, words, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        high, low = (jnp.uint32(x) for x in position)
        got = threefry._hash(jnp.array(words, np.uint32), high, low)
        assert tuple(int(x) for x in got) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_jax(shape):
    with jax.enable_x64(True):
        for width in (8, 16, 32, 64):
            dtype = np.dtype(f"uint{width}")
            mine, right = (
                np.asarray(jax.random.bits(k, shape, dtype)) for k in (fused(key()), key())
            )
            assert mine.dtype == right.dtype and np.array_equal(mine, right)


def test_positions_of_more_than_32_bits():
    shape = (2**17, 2**16)
    rows = slice(2**16 - 1, 2**16 + 2)  # on both sides of position 2**32

    def corner(key):
        return jax.random.bits(fused(key), shape, np.uint32)[rows, :3]

    with jax.enable_x64(True):
        program = jax.jit(corner).lower(key()).compile()
        assert program.memory_analysis().temp_size_in_bytes == 0  # else it would take 34 GB
        got = np.asarray(program(key()))
        positions = [row * 2**16 + column for row in range(2**17)[rows] for column in range(3)]
        words = np.array([[p >> 32 for p in positions], [p & 0xFFFFFFFF for p in positions]])
        data = jax.random.key_data(key())
        high, low = np.split(threefry_2x32((data[0], data[1]), words.ravel().astype(np.uint32)), 2)
    assert np.array_equal(got.ravel(), high ^ low)


# Tensors of a program.


def expected(draw):
    """What a draw from the first seed of `torch.manual_seed(0)` gives, by jax's own generator."""
    generator = torch.Generator().manual_seed(0)
    seed = torch.empty((), dtype=torch.int64).random_(0, 2**63 - 1, generator=generator).item()
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    with jax.enable_x64(True):
        return np.asarray(jax.jit(draw)(jax.random.wrap_key_data(words)))


@pytest.mark.parametrize(
    ("shape", "axes"),
    crossed([(16, 24), (11, 7)], [("x", None), (None, "x"), ("a", "b"), (None, ("a", "b"))]),
)
def test_values_are_those_of_jax_on_any_mesh(shape, axes, mesh_1d, mesh_2d):
    mesh = mesh_1d if "x" in axes else mesh_2d

    def drawn(fill):
        torch.manual_seed(0)
        return fill(spmd.mark_sharding(torch.empty(shape, device="xla"), mesh, axes)).cpu().numpy()

    uniform = drawn(lambda t: t.uniform_())
    assert np.array_equal(uniform, expected(lambda k: jax.random.uniform(k, shape, np.float32)))
    normal = drawn(lambda t: t.normal_())
    right = expected(lambda k: jax.random.normal(k, shape, np.float32))
    # The inverse of erf may be rounded otherwise where LLVM optimizes nothing, as in most tiers.
    np.testing.assert_array_max_ulp(normal, right, maxulp=3)


FILLS = {
    "normal_": lambda t: t.normal_(0, 0.02),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "log_normal_": lambda t: t.log_normal_(),
    "exponential_": lambda t: t.exponential_(),
    "cauchy_": lambda t: t.cauchy_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "random_": lambda t: t.random_(),
    "kaiming_uniform_": torch.nn.init.kaiming_uniform_,
    "xavier_normal_": torch.nn.init.xavier_normal_,
}


@pytest.mark.parametrize(
    ("dtype", "axes"), crossed([torch.float32, torch.bfloat16], [("x", None), ("b", "a")])
)
def test_drawing_takes_the_memory_of_the_result(dtype, axes, mesh_1d, mesh_2d):
    mesh = mesh_1d if "x" in axes else mesh_2d
    made = [
        fill(spmd.mark_sharding(torch.empty(512, 256, dtype=dtype, device="xla"), mesh, axes))
        for fill in FILLS.values()
    ]
    spmd.sync()
    record = compile_cache.newest().record
    shards = sum(t.local_shards[0].data.nbytes for t in made)
    assert shards == len(FILLS) * 512 * 256 * dtype.itemsize // mesh.size()
    assert shards <= record.peak_bytes <= 1.02 * shards


def test_dropout_keeps_a_mask_and_no_bits(mesh_1d, num_devices):
    x = spmd.mark_sharding(torch.ones(512, 256, device="xla"), mesh_1d, ("x",))
    x.requires_grad_()
    spmd.sync()
    y = F.dropout(x, 0.25)
    y.backward(torch.ones_like(y))
    spmd.sync()
    record = compile_cache.newest().record
    assert record.temp_bytes <= 512 * 256 // num_devices
    assert torch.equal(y.detach().cpu(), x.grad.cpu())
