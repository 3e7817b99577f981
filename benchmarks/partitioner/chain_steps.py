"""The operations of random chains: per element, views, writes, indices, reductions, windows."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.partitioner.chain_draws import DTYPE, LARGEST, Compute, Draw, maker


def _at(dim: int, index: Any) -> tuple[Any, ...]:
    """An index that applies `index` to one dim and takes all dims before it whole."""
    return (*itertools.repeat(slice(None), dim), index)


# ---- elements and products -----------------------------------------------------------------------


_UNARY: list[Compute] = [
    torch.sin, torch.tanh, torch.neg, torch.sigmoid, torch.square, F.relu, F.gelu, F.silu,
    lambda x: x * 0.5 + 1,
    lambda x: x.abs() + 0.1,
    lambda x: x.clamp(-0.5, 0.7),
    lambda x: x.masked_fill(x < 0, -0.5),
]  # fmt: skip
_BINARY: list[Compute] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y * 2),
]  # fmt: skip


@maker
def _unary(draw: Draw) -> Compute:
    draw.take()
    return draw.rng.choice(_UNARY)


@maker
def _binary(draw: Draw) -> Compute:
    x = draw.take()

    def fits(y: torch.Tensor) -> bool:
        try:
            return math.prod(torch.broadcast_shapes(x.shape, y.shape)) <= LARGEST
        except RuntimeError:
            return False

    draw.take(fits=fits)
    return draw.rng.choice(_BINARY)


@maker
def _matmul(draw: Draw) -> Compute:
    x = draw.take(2, 4)
    draw.take(2, 2, lambda y: y.shape[0] == x.shape[-1])
    return torch.matmul


@maker
def _linear(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    draw.take(2, 2, lambda y: y.shape[1] == x.shape[-1])
    return F.linear


@maker
def _gram(draw: Draw) -> Compute:
    draw.take(2, 4)
    return lambda x: x @ x.mT


@maker
def _outer(draw: Draw) -> Compute:
    draw.take(1, 1)
    draw.take(1, 1)
    return torch.outer


@maker
def _einsum(draw: Draw) -> Compute:
    x = draw.take(3, 3)
    draw.take(3, 3, lambda y: y.shape == x.shape)
    equation = draw.rng.choice(["abc,dbc->ad", "abc,abd->cd", "abc,abc->b", "abc,dec->adbe"])
    return lambda x, y: torch.einsum(equation, x, y)


@maker
def _kron(draw: Draw) -> Compute:
    x = draw.take(1, 2)
    draw.take(x.dim(), x.dim(), lambda y: x.numel() * y.numel() <= LARGEST)
    return torch.kron


@maker
def _distances(draw: Draw) -> Compute:
    x = draw.take(2, 2)
    draw.take(2, 2, lambda y: y.shape[1] == x.shape[1])
    return lambda x, y: torch.cdist(x, y + 3, p=1.0)


@maker
def _attention(draw: Draw) -> Compute:
    draw.take(3, 4)
    is_causal = draw.rng.random() < 0.5
    return lambda x: F.scaled_dot_product_attention(x, x * 0.5, x, is_causal=is_causal)


# ---- along dims ----------------------------------------------------------------------------------


@maker
def _reduction(draw: Draw) -> Compute:
    x = draw.take(1)
    dims = tuple(draw.rng.sample(range(x.dim()), draw.rng.randint(1, x.dim())))
    keepdim = draw.rng.random() < 0.5
    name = draw.rng.choice(["sum", "mean", "amax", "amin", "logsumexp", "var"])
    more = {"correction": 0} if name == "var" else {}
    return lambda x: getattr(x, name)(dims, keepdim=keepdim, **more)


@maker
def _along(draw: Draw) -> Compute:
    d = draw.dim(draw.take(1))
    count = draw.rng.randint(-5, 5)
    return draw.rng.choice(
        [
            lambda x: x.cumsum(d),
            lambda x: (x * 0.2 + 1).cumprod(d),
            lambda x: x.cummax(d)[0],
            lambda x: x.logcumsumexp(d),
            lambda x: x.softmax(d),
            lambda x: x.log_softmax(d),
            lambda x: F.normalize(x, dim=d),
            lambda x: x.diff(dim=d),
            lambda x: x.flip(d),
            lambda x: x.roll(count, d),
            lambda x: x.sort(d)[0],
            lambda x: x.sort(d, descending=True)[0],
            lambda x: x.median(d)[0],
            lambda x: x.argsort(d).to(DTYPE),
            lambda x: x.argmax(d).to(DTYPE),
            lambda x: torch.take_along_dim(x, x.argsort(d), d),
        ]
    )


@maker
def _topk(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    count = draw.rng.randint(1, x.shape[d])
    return lambda x: x.topk(count, d)[0]


@maker
def _normalization(draw: Draw) -> Compute:
    x = draw.take(2)
    choices: list[Compute] = [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.group_norm(x, 1),
    ]
    if x.shape[0] > 1:
        choices.append(lambda x: F.batch_norm(x, None, None, training=True))
    return draw.rng.choice(choices)


# ---- views and copies ----------------------------------------------------------------------------


@maker
def _permute(draw: Draw) -> Compute:
    x = draw.take(2)
    order = draw.rng.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(order)


@maker
def _reshape(draw: Draw) -> Compute:
    left = draw.take(1).numel()
    shape: list[int] = []
    while left > 1 and len(shape) < 4:
        shape.append(draw.rng.choice([d for d in range(2, left + 1) if not left % d]))
        left //= shape[-1]
    shape += [left] * (left > 1) + [1] * (draw.rng.random() < 0.2)
    draw.rng.shuffle(shape)
    return lambda x: x.reshape(shape)


@maker
def _flatten(draw: Draw) -> Compute:
    x = draw.take(2)
    first = draw.rng.randrange(x.dim() - 1)
    last = draw.rng.randrange(first + 1, x.dim())
    return lambda x: x.flatten(first, last)


@maker
def _unflatten(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    d = draw.dim(x)
    outer = draw.rng.choice([k for k in range(1, x.shape[d] + 1) if not x.shape[d] % k])
    return lambda x: x.unflatten(d, (outer, -1))


@maker
def _unsqueeze(draw: Draw) -> Compute:
    d = draw.rng.randint(0, draw.take(0, 4).dim())
    return lambda x: x.unsqueeze(d)


@maker
def _expand(draw: Draw) -> Compute:
    sizes = [draw.rng.choice((2, 3, 4, 8)) if n == 1 else n for n in draw.take(1, 4).shape]
    sizes = [draw.rng.choice((2, 3, 4))] * (draw.rng.random() < 0.4) + sizes
    return lambda x: x.expand(sizes)


@maker
def _repeat(draw: Draw) -> Compute:
    x = draw.take(1, 3)
    counts = [draw.rng.choice((1, 1, 2, 3)) for _ in x.shape]
    d = draw.dim(x)
    return draw.rng.choice(
        [lambda x: x.repeat(counts), lambda x: x.repeat_interleave(max(counts), d)]
    )


@maker
def _slice(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    start = draw.rng.randrange(x.shape[d])
    end = draw.rng.randint(start + 1, x.shape[d])
    at = _at(d, slice(start, end, draw.rng.choice((1, 1, 2, 3))))
    return lambda x: x[at]


@maker
def _select(draw: Draw) -> Compute:
    x = draw.take(2)
    d = draw.dim(x)
    index = draw.rng.randrange(x.shape[d])
    return lambda x: x.select(d, index)


@maker
def _cat(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    d = draw.dim(x)
    rest = (*x.shape[:d], *x.shape[d + 1 :])
    draw.take(x.dim(), x.dim(), lambda y: (*y.shape[:d], *y.shape[d + 1 :]) == rest)
    return lambda x, y: torch.cat([x, y], d)


@maker
def _stack(draw: Draw) -> Compute:
    x = draw.take(0, 3)
    d = draw.rng.randint(0, x.dim())
    draw.take(fits=lambda y: y.shape == x.shape)
    return lambda x, y: torch.stack([x, y], d)


@maker
def _split(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    size, part = draw.rng.randint(1, x.shape[d]), draw.rng.random()

    def compute(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(size, d)
        return parts[int(part * len(parts))]

    return compute


@maker
def _pad(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    edges = [draw.rng.choice((0, 0, 1, 2, 3, -1)) for _ in range(2 * draw.rng.randint(1, x.dim()))]
    return lambda x: F.pad(x, edges, value=0.25)


@maker
def _pad_from_inside(draw: Draw) -> Compute:
    x = draw.take(3, 3)
    edges = [draw.rng.randint(0, x.shape[-1] - 1) for _ in range(2)]
    mode = draw.rng.choice(["reflect", "replicate", "circular"])
    return lambda x: F.pad(x, edges, mode=mode)


@maker
def _diagonal(draw: Draw) -> Compute:
    x = draw.take(2)
    first, second = draw.rng.sample(range(x.dim()), 2)
    offset = draw.rng.choice((0, 0, 1, -1))
    return lambda x: x.diagonal(offset, first, second)


@maker
def _triangle(draw: Draw) -> Compute:
    draw.take(2)
    diagonal = draw.rng.randint(-2, 2)
    return draw.rng.choice([lambda x: x.tril(diagonal), lambda x: x.triu(diagonal)])


# ---- indices -------------------------------------------------------------------------------------


@maker
def _index(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    rows = draw.indices(x.shape[d], draw.rng.choice((1, 2, 3, 5, 8)))
    return lambda x: x[_at(d, rows.to(x.device))]


@maker
def _index_two_dims(draw: Draw) -> Compute:
    x = draw.take(2)
    first, second = sorted(draw.rng.sample(range(x.dim()), 2))
    count = draw.rng.choice((1, 2, 4, 8))
    a, b = draw.indices(x.shape[first], count), draw.indices(x.shape[second], count)

    def compute(x: torch.Tensor) -> torch.Tensor:
        between = itertools.repeat(slice(None), second - first - 1)
        return x[(*_at(first, a.to(x.device)), *between, b.to(x.device))]

    return compute


@maker
def _gather(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    shape = list(x.shape)
    shape[d] = draw.rng.choice((1, 2, 3, 8))
    index = draw.indices(x.shape[d], *shape)
    return lambda x: x.gather(d, index.to(x.device))


@maker
def _embedding(draw: Draw) -> Compute:
    shape = [draw.rng.choice((1, 3, 4, 8)) for _ in range(draw.rng.randint(1, 2))]
    ids = draw.indices(draw.take(2, 2).shape[0], *shape)
    return lambda x: F.embedding(ids.to(x.device), x)


@maker
def _cross_entropy(draw: Draw) -> Compute:
    x = draw.take(2, 2)
    labels = draw.indices(x.shape[1], x.shape[0])
    reduction = draw.rng.choice(["none", "mean", "sum"])
    return lambda x: F.cross_entropy(x, labels.to(x.device), reduction=reduction)


@maker
def _index_write(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    rows = draw.indices(x.shape[d], draw.rng.choice((1, 2, 3, 5, 8)))
    order = draw.rng.sample(range(x.shape[d]), draw.rng.randint(1, x.shape[d]))
    distinct = torch.tensor(order)

    def add(x: torch.Tensor) -> torch.Tensor:
        at = rows.to(x.device)
        return x.index_add(d, at, x.index_select(d, at) * 2)

    def copy(x: torch.Tensor) -> torch.Tensor:
        at = distinct.to(x.device)
        return x.index_copy(d, at, x.index_select(d, at) * 2 + 1)

    return draw.rng.choice([add, copy])


@maker
def _scatter(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    shape = [draw.rng.randint(1, n) for n in x.shape]
    shape[d] = draw.rng.choice((1, 2, 4))
    index, values = draw.indices(x.shape[d], *shape), draw.weight(*shape)
    reduce = draw.rng.choice(["sum", "amax", "mean"])
    return lambda x: x.scatter_reduce(d, index.to(x.device), values.to(x.device), reduce)


@maker
def _write(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    start = draw.rng.randrange(x.shape[d])
    end = draw.rng.randint(start + 1, x.shape[d])

    def row(y: torch.Tensor) -> None:
        y[_at(d, start)] = 7.0

    def row_by_tensor(y: torch.Tensor) -> None:
        y[_at(d, torch.tensor([start], device=y.device))] *= 3.0

    def rows(y: torch.Tensor) -> None:
        y[_at(d, slice(start, end))] *= 2

    def every_second(y: torch.Tensor) -> None:
        y[_at(d, slice(start % 2, None, 2))] += 1

    def mask(y: torch.Tensor) -> None:
        y[y > 0.3] = 0.1

    def last_from_first(y: torch.Tensor) -> None:
        y.select(d, -1).copy_(y.select(d, 0).clone())

    def flat(y: torch.Tensor) -> None:
        y.view(-1)[1::2].mul_(3)

    def transposed(y: torch.Tensor) -> None:
        y.transpose(0, -1).mul_(2).narrow(0, 0, 1).add_(1)

    write = draw.rng.choice(
        [row, row_by_tensor, rows, every_second, mask, last_from_first, flat, transposed]
    )

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        write(y)
        return y

    return compute


@maker
def _rows_in_a_loop(draw: Draw) -> Compute:
    draw.take(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i in range(min(len(x), 3)):
            y[i] = x[len(x) - 1 - i] * (i + 1)
        return y

    return compute


# ---- windows -------------------------------------------------------------------------------------


@maker
def _unfold(draw: Draw) -> Compute:
    x = draw.take(1, 3)
    d = draw.dim(x)
    size, step = draw.rng.randint(1, x.shape[d]), draw.rng.randint(1, 3)
    return lambda x: x.unfold(d, size, step)


@maker
def _convolution(draw: Draw) -> Compute:
    x = draw.take(3, 4)
    size = draw.rng.choice((1, 2, 3))
    weight = draw.weight(draw.rng.choice((2, 4, 6)), x.shape[1], *(size,) * (x.dim() - 2))
    stride, padding = draw.rng.choice((1, 2)), draw.rng.choice((0, 1, 2))
    function: Compute = F.conv1d if x.dim() == 3 else F.conv2d
    return lambda x: function(x, weight.to(x.device), stride=stride, padding=padding)


@maker
def _pooling(draw: Draw) -> Compute:
    x = draw.take(3, 4)
    size, stride = draw.rng.choice((2, 3)), draw.rng.choice((1, 2))
    padding = draw.rng.choice((0, 1))
    kinds: list[Compute] = (
        [F.max_pool1d, F.avg_pool1d] if x.dim() == 3 else [F.max_pool2d, F.avg_pool2d]
    )
    function = draw.rng.choice(kinds)
    return lambda x: function(x, size, stride, padding)


@maker
def _resampling(draw: Draw) -> Compute:
    draw.take(4, 4)
    return draw.rng.choice(
        [
            lambda x: F.adaptive_avg_pool2d(x, 2),
            lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
            lambda x: F.interpolate(x, size=(5, 3), mode="bilinear"),
        ]
    )


@maker
def _pixel_shuffle(draw: Draw) -> Compute:
    draw.take(3, 4, lambda x: x.shape[-3] % 4 == 0)
    return lambda x: F.pixel_shuffle(x, 2)
