"""Cuts that differ in a growing size alone share a program, with the values of eager torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiers import by_tier, exhaustive

import spmd_core as spmd
from spmd_core.errors import DeviceMemoryError
from spmd_core.program import compile_cache, growing_program, growing_sizes
from spmd_core.program.program import explained

counter = spmd.metrics.counter


@pytest.fixture(autouse=True)
def few_elements_of_room(monkeypatch):
    """Room for 8 elements at least, so that few steps pass several bounds; nothing compiled."""
    monkeypatch.setattr(growing_program, "_LEAST_ROOM", 8)
    monkeypatch.setattr(growing_program, "_CHEAP_BYTES", 0)
    compile_cache.clear()


def decode(device, steps, *, batch=4, heads=4, width=2, marks=lambda tensors: None):
    """A decoder's attention over a cache that grows by a position a step; each step is read."""
    torch.manual_seed(0)
    weights = [torch.randn(heads * width, heads * width).to(device) / 3 for _ in range(4)]
    cache = [torch.randn(batch, heads, 3, width).to(device) for _ in range(2)]
    x = torch.randn(batch, 1, heads * width).to(device)
    marks([x, *weights, *cache])
    read = []
    for _ in range(steps):
        q, k, v = ((x @ w).view(batch, 1, heads, width).transpose(1, 2) for w in weights[:3])
        cache = [torch.cat([old, new], 2) for old, new in zip(cache, (k, v))]
        marks([None] * 5 + cache)
        attended = F.scaled_dot_product_attention(q, *cache)
        x = torch.tanh(x + attended.transpose(1, 2).reshape(batch, 1, -1) @ weights[3])
        read.append(x.sum().item())
    return torch.tensor(read), x.cpu(), *(c.cpu() for c in cache)


def same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_a_decoder_needs_a_program_for_each_power_of_two():
    ours = decode("xla", 28)
    same(ours, decode("cpu", 28))
    # Length 4, length 5, and room for 8, 16 and 32; the two results of the end are leaves.
    assert counter("compiles") <= 5
    decode("xla", 28)
    assert counter("compiles") <= 5


@pytest.mark.parametrize("kind", [*map(exhaustive, ["heads", "odd"]), "two axes", "cache"])
def test_a_sharded_decoder(kind, mesh_1d, mesh_2d):
    def marks(tensors):
        x, *weights = tensors[:5]
        if x is None:
            if kind == "cache":
                for c in tensors[5:]:
                    spmd.mark_sharding(c, mesh_2d, ("a", "b", None, None))
            return
        mesh, axis = (mesh_2d, "b") if kind == "two axes" else (mesh_1d, "x")
        if kind != "cache":
            for w in weights[:3]:
                spmd.mark_sharding(w, mesh, (None, axis))
            spmd.mark_sharding(weights[3], mesh, (axis, None))
        if kind == "two axes":
            spmd.mark_sharding(x, mesh, ("a", None, None))

    sizes = {"batch": 3, "heads": 5, "width": 3} if kind == "odd" else {}
    ours = decode("xla", 16, marks=marks, **sizes)
    same(ours, decode("cpu", 16, **sizes))
    assert counter("compiles") <= 7


def test_a_growing_dim_that_is_split_compiles_for_each_size(mesh_1d, num_devices):
    x = torch.zeros(2 * num_devices, 4).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x", None))
    for n in range(5, 9):
        grown = torch.cat([x, torch.ones(n, 4).to("xla")])
        spmd.mark_sharding(grown, mesh_1d, ("x", None))
        assert grown.sum().item() == 4 * n
        assert torch.equal(grown.cpu()[-n:], torch.ones(n, 4))


def test_another_layout_has_a_program_of_its_own(mesh_2d, num_devices):
    if num_devices == 1:
        pytest.skip("one device has one layout")

    def compiles(size, axis):
        x = torch.linspace(-1, 1, 8 * size).reshape(size, 8)
        ours = spmd.mark_sharding(x.to("xla"), mesh_2d, (None, axis)).exp().cumsum(0)
        torch.testing.assert_close(ours.cpu(), x.exp().cumsum(0))
        return counter("compiles")

    *_, shared = (compiles(size, "a") for size in (5, 7, 9))
    assert compiles(11, "a") == shared
    assert compiles(11, "b") == shared + 1


def test_sizes_in_different_layouts_do_not_grow(mesh_2d, num_devices):
    if num_devices == 1:
        pytest.skip("one device has one layout")
    for size, axis in [(5, "a"), (7, "b"), (9, "a"), (11, "a")]:
        x = spmd.mark_sharding(torch.ones(size, 8).to("xla"), mesh_2d, (None, axis))
        spmd.sync()
        before = counter("compiles")
        assert x.exp().sum().item() == pytest.approx(8 * size * math.e, rel=1e-5)
        assert counter("compiles") == before + 1


GROWING = {
    "softmax": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(dim=0),
    "max": lambda x: x.max(0),
    "argmin": lambda x: x.argmin(0),
    "cumsum": lambda x: x.cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x.topk(3, 0),
    "median": lambda x: x.median(0),
    "any": lambda x: (x > 1).any(0),
    "count_nonzero": lambda x: x.relu().count_nonzero(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "tril": lambda x: (x @ x.T).tril(),
    "last": lambda x: x[-1],
    "strided": lambda x: x[::2],
    "tail": lambda x: x[2:] - x[:-2],
    "flatten": lambda x: x.flatten(),
    "transposed and flattened": lambda x: x.T.flatten(),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1), value=-1.0),
    "pad to a room": lambda x: F.pad(x, (0, 0, 0, 40 - x.shape[0])).sum(1),
    "circular": lambda x: F.pad(x.T[None], (2, 2), mode="circular"),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "one row written": lambda x: x.index_fill(0, torch.tensor([2], device=x.device), 7.0),
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 0], device=x.device)),
    "gather": lambda x: x.gather(0, x.argsort(0)),
    "scatter": lambda x: torch.zeros_like(x).scatter_(0, x.argsort(0), x),
    "masked": lambda x: x.masked_fill(torch.eye(x.shape[0], 4, device=x.device) > 0, 9.0),
    "where": lambda x: torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < 3, x, -x),
    "one_hot": lambda x: F.one_hot(x.argmax(1), 4),
    "embedding": lambda x: F.embedding(x.argmax(1), x[:4]),
    "expand": lambda x: x[:, None].expand(-1, 3, -1).reshape(-1, 4),
    "repeat": lambda x: x.repeat(2, 1),
    "stack": lambda x: torch.stack([x, x * 2]),
    "chunks": lambda x: x.chunk(2)[1],
    "unfold": lambda x: x.unfold(0, 3, 1),
    "convolution": lambda x: F.conv1d(x.T[None], torch.ones(2, 4, 3, device=x.device)),
    "pool": lambda x: F.avg_pool1d(x.T[None], 2),
    "cdist": lambda x: torch.cdist(x, x),
    "einsum": lambda x: torch.einsum("ni,mi->nm", x, x).softmax(-1) @ x,
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "diff": lambda x: x.diff(dim=0),
    "outer": lambda x: torch.outer(x[:, 0], x[:, 1]),
    "linspace": lambda x: x[:, 0] * torch.linspace(0, 1, x.shape[0], device=x.device),
    "arange": lambda x: x[:, 0] * torch.arange(x.shape[0], 0, -1, device=x.device),
    "scaled by the size": lambda x: x / x.shape[0] ** 0.5,
    "multiple of eight": lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 8)).sum(1),
    "matrix power": lambda x: torch.linalg.matrix_power(x.T @ x / 50, 3),
    "inverse": lambda x: torch.linalg.inv(x.T @ x + torch.eye(4, device=x.device)),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], is_causal=True
    ),
    "gradient": lambda x: torch.func.grad(lambda y: (F.softmax(y, 0) * y).sum())(x),
}


# These run on a part of a buffer below.
PARTS = ["softmax", "var", "cumsum", "sort", "flip", "last", "tail", "transposed and flattened"]
PARTS += ["pad", "one row written", "gather", "masked", "expand", "convolution", "einsum"]
PARTS += ["scaled by the size", "attention", "gradient"]


@pytest.mark.parametrize("name", [exhaustive(x) if x in PARTS else x for x in GROWING])
def test_operations_along_a_dim_that_grows(name):
    """Sizes from 5 to 19, each read; whether they share a program is up to the rules.

    The first and the next, a full room, and one of the next room.
    """
    torch.manual_seed(0)
    rows = torch.randn(19, 4)
    for n in by_tier((5, 6, 8, 9), in_all=(5, 6, 7, 8, 11, 16, 17, 19)):
        expected = GROWING[name](rows[:n])
        found = GROWING[name](rows[:n].to("xla"))
        if isinstance(expected, torch.Tensor):
            expected, found = [expected], [found]
        for ours, right in zip(found, expected, strict=True):
            assert ours.shape == right.shape
            torch.testing.assert_close(ours.cpu(), right, rtol=1e-4, atol=1e-5)


# The rules of operations are those of the test above and of `test_padded_evaluation.py`.


@pytest.mark.parametrize("split", [exhaustive(False), True])
@pytest.mark.parametrize("name", [x if x in PARTS else exhaustive(x) for x in GROWING])
def test_operations_on_a_part_that_grows(name, split, mesh_1d):
    """The filled part of a buffer of one size: what is read of it grows, and nothing else."""
    torch.manual_seed(0)
    rows = torch.randn(40, 4)
    buffer = rows.to("xla")
    if split:
        spmd.mark_sharding(buffer, mesh_1d, ("x", None))
    for n in by_tier((5, 6, 8, 40), in_all=(5, 6, 7, 8, 11, 16, 33, 39, 40)):
        expected = GROWING[name](rows[:n])
        found = GROWING[name](buffer[:n])
        if isinstance(expected, torch.Tensor):
            expected, found = [expected], [found]
        for ours, right in zip(found, expected, strict=True):
            assert ours.shape == right.shape
            torch.testing.assert_close(
                (ours.sum() if split else ours).cpu(),
                right.sum() if split else right,
                rtol=1e-4,
                atol=1e-4,
            )


def test_a_static_cache_that_is_written_and_read_by_slices(mesh_1d, num_devices):
    """Attention over the filled part, as decoders without a library's cache have it."""
    torch.manual_seed(0)
    weight, first = torch.randn(8, 8) / 3, torch.randn(num_devices, 1, 8)

    def decoded(device, steps):
        cache = torch.zeros(num_devices, steps, 8, device=device)
        x, w = first.to(device), weight.to(device)
        if device == "xla":
            spmd.mark_sharding(cache, mesh_1d, ("x", None, None))
        results = []
        for t in range(steps):
            cache[:, t : t + 1] = x @ w
            filled = cache[:, : t + 1]
            x = ((x @ filled.mT).softmax(-1) @ filled).tanh() + x
            results.append(x)
            spmd.sync()
        return [*results, cache]

    for mine, right in zip(decoded("xla", 24), decoded("cpu", 24)):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-4, atol=1e-4)
    assert counter("compiles") <= 8 and growing_sizes.refusals() == []


def test_a_dim_that_shrinks_while_another_one_grows():
    torch.manual_seed(0)
    for n in (2, 3, 4):
        x = torch.randn(n, 6 - n)
        found = torch.cov(x.to("xla"), aweights=torch.ones(6 - n).to("xla")) * 1
        torch.testing.assert_close(found.cpu(), torch.cov(x, aweights=torch.ones(6 - n)))
        y = x.to("xla")
        torch.testing.assert_close((y @ y.T).cpu(), x @ x.T)
    assert "an array shrinks" in growing_sizes.refusals()


def test_most_of_them_share_programs():
    def programs(name):
        before = counter("compiles")
        for n in range(5, 16):
            found = GROWING[name](torch.ones(n, 4).to("xla"))
            (found if isinstance(found, torch.Tensor) else found[0]).cpu()
        return counter("compiles") - before

    shared = ["softmax", "var", "argmin", "tail", "pad to a room", "where", "einsum", "attention"]
    assert {name: programs(name) for name in shared} == dict.fromkeys(shared, 3)
    assert programs("convolution") == 11
    assert growing_sizes.refusals() == ["a convolution along a dim that grows"] * 3
    assert counter("growing_sizes_refused") == 3


def grow(steps, x=None):
    x = torch.ones(5, 4).to("xla") if x is None else x
    for _ in range(steps):
        x = torch.cat([x, x[-1:] + 1])
        spmd.sync()
    return x


def right(x):
    n = x.shape[0] - 5
    column = torch.cat([torch.ones(5), torch.arange(2.0, n + 2)])
    return torch.equal(x.cpu(), column[:, None].expand(-1, 4))


def test_what_has_room_is_read_and_used_as_any_tensor(mesh_1d):
    x = grow(6)
    assert x._handle.value.placement.room == (16, 4) and right(x)
    # A program of another kind, a mark, a view, an update in place, and jax's view of the data.
    assert torch.equal((x * 2).cpu(), x.cpu() * 2)
    y = grow(6)
    spmd.mark_sharding(y, mesh_1d, ("x", None))
    assert right(y)
    z = grow(6)
    z[0] = 5.0
    z.add_(1)
    assert z.cpu()[:2].tolist() == [[6.0] * 4, [2.0] * 4] and z.cpu().shape == (11, 4)
    w = grow(6)
    assert spmd.call_jax(lambda a: a.sum(0), w).cpu().tolist() == [w.cpu().sum(0)[0].item()] * 4
    assert torch.equal(torch.utils.dlpack.from_dlpack(grow(6).cpu()), x.cpu())


def test_local_shards_and_checkpoints_have_no_room(tmp_path, mesh_1d):
    x = grow(6)
    torch.save(x, tmp_path / "x.pt")
    assert right(torch.load(tmp_path / "x.pt", weights_only=False))
    y = grow(6)
    spmd.mark_sharding(y, mesh_1d, (None, None))
    assert all(shard.data.shape == (11, 4) for shard in y.local_shards)


def test_the_program_goes_on_from_where_it_was():
    x = grow(6)
    compiled = counter("compiles")
    shorter = grow(4)
    longer = grow(4, x)
    assert right(shorter) and right(longer)
    assert counter("compiles") == compiled


def test_arrays_without_elements_grow(monkeypatch):
    monkeypatch.setattr(growing_program, "_CHEAP_BYTES", 1 << 20)
    for n in (3, 4, 5, 6):
        x = torch.ones(n, 0, 2).to("xla")
        assert torch.cat([x, x], 2).cpu().shape == (n, 0, 4)
        assert x.sum((0, 1)).tolist() == [0.0, 0.0]


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)
    assert right(grow(6))
    assert counter("compiles") == 6


def test_verified_programs_and_compiled_regions_have_no_room():
    with spmd.debugging.verify():
        assert right(grow(4))
    assert counter("compiles") >= 4


def test_two_widths_of_one_model_grow_by_themselves():
    for width in (4, 6, 4, 6):
        x = torch.ones(5, width).to("xla")
        for _ in range(6):
            x = torch.cat([x, x.mean(0, keepdim=True) + 1])
            spmd.sync()
    assert counter("compiles") <= 6


def test_the_explanation_of_a_compile_names_the_room():
    grow(6)
    text = str(spmd.debugging.explain_recompile())
    assert "holds for a growing size up to" in text


def test_the_explanation_of_a_compile_names_what_has_no_rule():
    for n in (5, 6, 7):
        F.conv1d(torch.ones(1, 4, n).to("xla"), torch.ones(2, 4, 3).to("xla")).cpu()
    assert spmd.debugging.explain_recompile().note == (
        "Each size has a program of its own: a convolution along a dim that grows."
    )


def test_out_of_memory_says_how_to_have_no_room():
    grow(3)
    program = compile_cache.newest()
    assert program is not None and program.graph.growth is not None
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    error = explained(error, program.graph, program.record)
    assert isinstance(error, DeviceMemoryError)
    assert "spmd.config.bound_growing_sizes = False" in str(error)
