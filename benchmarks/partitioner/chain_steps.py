"""The operations of random chains: per element, views, writes, indices, reductions, windows.

A maker draws what an operation reads and its other arguments, and returns a function of the values.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.partitioner.programs import Skip

DTYPE = torch.float64
LARGEST = 4000  # elements of a value

Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of the maker that drew it.
        inputs: the numbers of the values that it reads; leaves come first, then steps.
        compute: the result, from these values.
        shape: of the result.
    """

    name: str
    inputs: tuple[int, ...]
    compute: Compute
    shape: tuple[int, ...]


class Draw:
    """Draws steps, and computes them on the CPU to know what may follow.

    Args:
        rng: where choices come from.
        values: the values of the leaves, to which those of the steps are added.
    """

    def __init__(self, rng: random.Random, values: list[torch.Tensor]) -> None:
        self.rng, self.values = rng, [v.requires_grad_() for v in values]
        self.inputs: list[int] = []

    def step(self) -> Step | None:
        """A step; None where what was drawn has no input, or no useful result."""
        self.inputs = []
        name = self.rng.choice(list(MAKERS))
        try:
            compute = MAKERS[name](self)
            result = compute(*(self.values[i] for i in self.inputs))
        except (Skip, RuntimeError, IndexError, ValueError):
            return None
        if result.dtype != DTYPE or not 0 < result.numel() <= LARGEST:
            return None
        if not result.isfinite().all() or result.abs().max() > 1e4:
            return None
        self.values.append(result)
        return Step(name, tuple(self.inputs), compute, tuple(result.shape))

    def take(
        self,
        least: int = 0,
        most: int = 9,
        fits: Callable[[torch.Tensor], bool] = lambda t: True,
    ) -> torch.Tensor:
        """A value with so many dims, a recent one most likely; the step reads it."""
        found = [i for i, t in enumerate(self.values) if least <= t.dim() <= most and fits(t)]
        if not found:
            raise Skip
        self.inputs.append(found[-1 - min(int(self.rng.expovariate(0.5)), len(found) - 1)])
        return self.values[self.inputs[-1]]

    def dim(self, x: torch.Tensor) -> int:
        return self.rng.randrange(x.dim())

    def indices(self, high: int, *shape: int) -> torch.Tensor:
        """Random indices below `high`."""
        count = math.prod(shape)
        return torch.tensor([self.rng.randrange(high) for _ in range(count)]).reshape(shape)

    def weight(self, *shape: int) -> torch.Tensor:
        """Random numbers, such as a kernel of a convolution."""
        count = math.prod(shape)
        numbers = [self.rng.gauss(0, 0.3) for _ in range(count)]
        return torch.tensor(numbers, dtype=DTYPE).reshape(shape)


MAKERS: dict[str, Callable[[Draw], Compute]] = {}


def _step(maker: Callable[[Draw], Compute]) -> Callable[[Draw], Compute]:
    MAKERS[maker.__name__.strip("_")] = maker
    return maker


def _at(dim: int, index: Any) -> tuple[Any, ...]:
    """What indexes a dim with `index` and takes all of those before it."""
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


@_step
def _unary(draw: Draw) -> Compute:
    draw.take()
    return draw.rng.choice(_UNARY)


@_step
def _binary(draw: Draw) -> Compute:
    x = draw.take()

    def fits(y: torch.Tensor) -> bool:
        try:
            return math.prod(torch.broadcast_shapes(x.shape, y.shape)) <= LARGEST
        except RuntimeError:
            return False

    draw.take(fits=fits)
    return draw.rng.choice(_BINARY)


@_step
def _matmul(draw: Draw) -> Compute:
    x = draw.take(2, 4)
    draw.take(2, 2, lambda y: y.shape[0] == x.shape[-1])
    return torch.matmul


@_step
def _linear(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    draw.take(2, 2, lambda y: y.shape[1] == x.shape[-1])
    return F.linear


@_step
def _gram(draw: Draw) -> Compute:
    draw.take(2, 4)
    return lambda x: x @ x.mT


@_step
def _outer(draw: Draw) -> Compute:
    draw.take(1, 1)
    draw.take(1, 1)
    return torch.outer


@_step
def _einsum(draw: Draw) -> Compute:
    x = draw.take(3, 3)
    draw.take(3, 3, lambda y: y.shape == x.shape)
    equation = draw.rng.choice(["abc,dbc->ad", "abc,abd->cd", "abc,abc->b", "abc,dec->adbe"])
    return lambda x, y: torch.einsum(equation, x, y)


@_step
def _kron(draw: Draw) -> Compute:
    x = draw.take(1, 2)
    draw.take(x.dim(), x.dim(), lambda y: x.numel() * y.numel() <= LARGEST)
    return torch.kron


@_step
def _distances(draw: Draw) -> Compute:
    x = draw.take(2, 2)
    draw.take(2, 2, lambda y: y.shape[1] == x.shape[1])
    return lambda x, y: torch.cdist(x, y + 3, p=1.0)


@_step
def _attention(draw: Draw) -> Compute:
    draw.take(3, 4)
    is_causal = draw.rng.random() < 0.5
    return lambda x: F.scaled_dot_product_attention(x, x * 0.5, x, is_causal=is_causal)


# ---- along dims ----------------------------------------------------------------------------------


@_step
def _reduction(draw: Draw) -> Compute:
    x = draw.take(1)
    dims = tuple(draw.rng.sample(range(x.dim()), draw.rng.randint(1, x.dim())))
    keepdim = draw.rng.random() < 0.5
    name = draw.rng.choice(["sum", "mean", "amax", "amin", "logsumexp", "var"])
    more = {"correction": 0} if name == "var" else {}
    return lambda x: getattr(x, name)(dims, keepdim=keepdim, **more)


@_step
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


@_step
def _topk(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    count = draw.rng.randint(1, x.shape[d])
    return lambda x: x.topk(count, d)[0]


@_step
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


@_step
def _permute(draw: Draw) -> Compute:
    x = draw.take(2)
    order = draw.rng.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(order)


@_step
def _reshape(draw: Draw) -> Compute:
    left = draw.take(1).numel()
    shape: list[int] = []
    while left > 1 and len(shape) < 4:
        shape.append(draw.rng.choice([d for d in range(2, left + 1) if not left % d]))
        left //= shape[-1]
    shape += [left] * (left > 1) + [1] * (draw.rng.random() < 0.2)
    draw.rng.shuffle(shape)
    return lambda x: x.reshape(shape)


@_step
def _flatten(draw: Draw) -> Compute:
    x = draw.take(2)
    first = draw.rng.randrange(x.dim() - 1)
    last = draw.rng.randrange(first + 1, x.dim())
    return lambda x: x.flatten(first, last)


@_step
def _unflatten(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    d = draw.dim(x)
    outer = draw.rng.choice([k for k in range(1, x.shape[d] + 1) if not x.shape[d] % k])
    return lambda x: x.unflatten(d, (outer, -1))


@_step
def _unsqueeze(draw: Draw) -> Compute:
    d = draw.rng.randint(0, draw.take(0, 4).dim())
    return lambda x: x.unsqueeze(d)


@_step
def _expand(draw: Draw) -> Compute:
    sizes = [draw.rng.choice((2, 3, 4, 8)) if n == 1 else n for n in draw.take(1, 4).shape]
    sizes = [draw.rng.choice((2, 3, 4))] * (draw.rng.random() < 0.4) + sizes
    return lambda x: x.expand(sizes)


@_step
def _repeat(draw: Draw) -> Compute:
    x = draw.take(1, 3)
    counts = [draw.rng.choice((1, 1, 2, 3)) for _ in x.shape]
    d = draw.dim(x)
    return draw.rng.choice(
        [lambda x: x.repeat(counts), lambda x: x.repeat_interleave(max(counts), d)]
    )


@_step
def _slice(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    start = draw.rng.randrange(x.shape[d])
    end = draw.rng.randint(start + 1, x.shape[d])
    at = _at(d, slice(start, end, draw.rng.choice((1, 1, 2, 3))))
    return lambda x: x[at]


@_step
def _select(draw: Draw) -> Compute:
    x = draw.take(2)
    d = draw.dim(x)
    index = draw.rng.randrange(x.shape[d])
    return lambda x: x.select(d, index)


@_step
def _cat(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    d = draw.dim(x)
    rest = (*x.shape[:d], *x.shape[d + 1 :])
    draw.take(x.dim(), x.dim(), lambda y: (*y.shape[:d], *y.shape[d + 1 :]) == rest)
    return lambda x, y: torch.cat([x, y], d)


@_step
def _stack(draw: Draw) -> Compute:
    x = draw.take(0, 3)
    d = draw.rng.randint(0, x.dim())
    draw.take(fits=lambda y: y.shape == x.shape)
    return lambda x, y: torch.stack([x, y], d)


@_step
def _split(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    size, part = draw.rng.randint(1, x.shape[d]), draw.rng.random()

    def compute(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(size, d)
        return parts[int(part * len(parts))]

    return compute


@_step
def _pad(draw: Draw) -> Compute:
    x = draw.take(1, 4)
    edges = [draw.rng.choice((0, 0, 1, 2, 3, -1)) for _ in range(2 * draw.rng.randint(1, x.dim()))]
    return lambda x: F.pad(x, edges, value=0.25)


@_step
def _pad_from_inside(draw: Draw) -> Compute:
    x = draw.take(3, 3)
    edges = [draw.rng.randint(0, x.shape[-1] - 1) for _ in range(2)]
    mode = draw.rng.choice(["reflect", "replicate", "circular"])
    return lambda x: F.pad(x, edges, mode=mode)


@_step
def _diagonal(draw: Draw) -> Compute:
    x = draw.take(2)
    first, second = draw.rng.sample(range(x.dim()), 2)
    offset = draw.rng.choice((0, 0, 1, -1))
    return lambda x: x.diagonal(offset, first, second)


@_step
def _triangle(draw: Draw) -> Compute:
    draw.take(2)
    diagonal = draw.rng.randint(-2, 2)
    return draw.rng.choice([lambda x: x.tril(diagonal), lambda x: x.triu(diagonal)])


# ---- indices -------------------------------------------------------------------------------------


@_step
def _index(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    rows = draw.indices(x.shape[d], draw.rng.choice((1, 2, 3, 5, 8)))
    return lambda x: x[_at(d, rows.to(x.device))]


@_step
def _index_two_dims(draw: Draw) -> Compute:
    x = draw.take(2)
    first, second = sorted(draw.rng.sample(range(x.dim()), 2))
    count = draw.rng.choice((1, 2, 4, 8))
    a, b = draw.indices(x.shape[first], count), draw.indices(x.shape[second], count)

    def compute(x: torch.Tensor) -> torch.Tensor:
        between = itertools.repeat(slice(None), second - first - 1)
        return x[(*_at(first, a.to(x.device)), *between, b.to(x.device))]

    return compute


@_step
def _gather(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    shape = list(x.shape)
    shape[d] = draw.rng.choice((1, 2, 3, 8))
    index = draw.indices(x.shape[d], *shape)
    return lambda x: x.gather(d, index.to(x.device))


@_step
def _embedding(draw: Draw) -> Compute:
    shape = [draw.rng.choice((1, 3, 4, 8)) for _ in range(draw.rng.randint(1, 2))]
    ids = draw.indices(draw.take(2, 2).shape[0], *shape)
    return lambda x: F.embedding(ids.to(x.device), x)


@_step
def _cross_entropy(draw: Draw) -> Compute:
    x = draw.take(2, 2)
    labels = draw.indices(x.shape[1], x.shape[0])
    reduction = draw.rng.choice(["none", "mean", "sum"])
    return lambda x: F.cross_entropy(x, labels.to(x.device), reduction=reduction)


@_step
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


@_step
def _scatter(draw: Draw) -> Compute:
    x = draw.take(1)
    d = draw.dim(x)
    shape = [draw.rng.randint(1, n) for n in x.shape]
    shape[d] = draw.rng.choice((1, 2, 4))
    index, values = draw.indices(x.shape[d], *shape), draw.weight(*shape)
    reduce = draw.rng.choice(["sum", "amax", "mean"])
    return lambda x: x.scatter_reduce(d, index.to(x.device), values.to(x.device), reduce)


@_step
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


@_step
def _rows_in_a_loop(draw: Draw) -> Compute:
    draw.take(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i in range(min(len(x), 3)):
            y[i] = x[len(x) - 1 - i] * (i + 1)
        return y

    return compute


# ---- windows -------------------------------------------------------------------------------------


@_step
def _unfold(draw: Draw) -> Compute:
    x = draw.take(1, 3)
    d = draw.dim(x)
    size, step = draw.rng.randint(1, x.shape[d]), draw.rng.randint(1, 3)
    return lambda x: x.unfold(d, size, step)


@_step
def _convolution(draw: Draw) -> Compute:
    x = draw.take(3, 4)
    size = draw.rng.choice((1, 2, 3))
    weight = draw.weight(draw.rng.choice((2, 4, 6)), x.shape[1], *(size,) * (x.dim() - 2))
    stride, padding = draw.rng.choice((1, 2)), draw.rng.choice((0, 1, 2))
    function: Compute = F.conv1d if x.dim() == 3 else F.conv2d
    return lambda x: function(x, weight.to(x.device), stride=stride, padding=padding)


@_step
def _pooling(draw: Draw) -> Compute:
    x = draw.take(3, 4)
    size, stride = draw.rng.choice((2, 3)), draw.rng.choice((1, 2))
    padding = draw.rng.choice((0, 1))
    kinds: list[Compute] = (
        [F.max_pool1d, F.avg_pool1d] if x.dim() == 3 else [F.max_pool2d, F.avg_pool2d]
    )
    function = draw.rng.choice(kinds)
    return lambda x: function(x, size, stride, padding)


@_step
def _resampling(draw: Draw) -> Compute:
    draw.take(4, 4)
    return draw.rng.choice(
        [
            lambda x: F.adaptive_avg_pool2d(x, 2),
            lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
            lambda x: F.interpolate(x, size=(5, 3), mode="bilinear"),
        ]
    )


@_step
def _pixel_shuffle(draw: Draw) -> Compute:
    draw.take(3, 4, lambda x: x.shape[-3] % 4 == 0)
    return lambda x: F.pixel_shuffle(x, 2)
