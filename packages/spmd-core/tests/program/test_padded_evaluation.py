"""Functions of growing arrays, evaluated with padding: equal to jax without any, or refused.

The padding holds NaN and large integers, so that an element which depends on it shows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax import lax
from tiers import by_tier

from spmd_core.program.affine_sizes import Affine, Fit, Form, GrowthRefusedError
from spmd_core.program.padded_arrays import Capacity
from spmd_core.program.padded_evaluation import Evaluation

FIRST, SECOND, BOUND = 5, 6, 32
Function = Callable[..., Any]


def arrays(shapes: Sequence[tuple[Any, ...]], number: int) -> list[np.ndarray]:
    """Seeded arrays; "n" stands for the number, and a first "i" or "b" for the dtype."""
    made = []
    for position, shape in enumerate(shapes):
        kind = shape[0] if shape and shape[0] in ("i", "b") else "f"
        dims = [number if d == "n" else d for d in shape if d not in ("i", "b")]
        random = np.random.default_rng(position)
        largest = [64 if d == "n" else d for d in shape if d not in ("i", "b")]
        whole = random.standard_normal(largest)  # the same elements for each number
        whole = whole[tuple(slice(d) for d in dims)]
        if kind == "i":
            made.append((np.abs(whole) * 100).astype(np.int64) % 5)
        else:
            made.append(whole > 0 if kind == "b" else whole)
    return made


def padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    garbage = np.nan if x.dtype.kind == "f" else (1 << 40 if x.dtype.kind == "i" else True)
    wide = np.full(shape, garbage, x.dtype)
    wide[tuple(slice(n) for n in x.shape)] = x
    return wide


def traced(function: Function, shapes: Sequence[Any], number: int) -> Any:
    with jax.enable_x64(True):
        inputs = arrays(shapes, number)
        return jax.make_jaxpr(lambda *xs: function(number, *xs))(*inputs)


class Padded:
    """A function of growing arrays as one program with padding for all numbers up to the bound."""

    def __init__(
        self, function: Function, shapes: Sequence[Any], shrinking: frozenset[Affine] = frozenset()
    ) -> None:
        self.function, self.shapes = function, shapes
        self.fit = Fit(FIRST, SECOND, shrinking)
        self.first, self.second = (traced(function, shapes, n) for n in (FIRST, SECOND))
        self.forms = Form.of(self.first), Form.of(self.second)
        self.run = jax.jit(self._run)

    def _run(self, n: Any, inputs: Any) -> list[Any]:
        evaluation = Evaluation(self.fit, Capacity(BOUND, n))
        return [x.array for x in evaluation.results(self.first, self.second, inputs)]

    def evaluate(self, number: int) -> list[np.ndarray]:
        first, second = self.forms
        third = Form.of(traced(self.function, self.shapes, number))
        if not first.agrees(second) or not first.predicts(second, self.fit, third, number):
            raise GrowthRefusedError("its operations differ")
        inputs = zip(arrays(self.shapes, number), arrays(self.shapes, BOUND))
        with jax.enable_x64(True):
            wide = [padded(x, y.shape) for x, y in inputs]
            return [np.asarray(x) for x in self.run(np.int64(number), wide)]

    def check(self, number: int) -> None:
        found = self.evaluate(number)
        with jax.enable_x64(True):
            # Compiled at once: each primitive by itself would be a program for each size.
            expected = jax.jit(functools.partial(self.function, number))(
                *arrays(self.shapes, number)
            )
        for ours, right in zip(found, jax.tree.leaves(expected), strict=True):
            right = np.asarray(right)
            cut = ours[tuple(slice(n) for n in right.shape)]
            np.testing.assert_allclose(cut, right, rtol=1e-8, atol=1e-9)


def attention(n, q, k, v, w):
    scores = jnp.einsum("bqd,bnd->bqn", q, k) / 2
    out = jax.nn.softmax(scores, axis=-1) @ v
    return jnp.concatenate([k, out @ w], axis=1), out


def beside_a_region(n, x, y):
    """A mark along one axis is a shard_map, here of what does not grow."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec()
    region = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    return x.sum(0) + region(y)


CASES: dict[str, tuple[Function, list[tuple[Any, ...]]]] = {
    "elementwise": (lambda n, x, y: jnp.sin(x) * y + n, [("n", 3), ("n", 3)]),
    "beside a region": (beside_a_region, [("n", 3), (3,)]),
    "where": (lambda n, m, x: jnp.where(m, x, -1.0), [("b", "n"), ("n",)]),
    "sum": (lambda n, x: x.sum(0), [("n", 3)]),
    "mean": (lambda n, x: x.mean(1), [(2, "n")]),
    "prod": (lambda n, x: jnp.prod(x, 0), [("n", 3)]),
    "max": (lambda n, x: x.max(0), [("n", 3)]),
    "min": (lambda n, x: x.min(), [("n", 3)]),
    "max of ints": (lambda n, x: (x.max(), x.min(), x.sum()), [("i", "n", 2)]),
    "all bits": (lambda n, x: (lax.reduce_and(x, (0,)), lax.reduce_and(x.astype(np.uint8), (0,))),
                 [("i", "n", 2)]),
    "sorted writes in rows": (
        lambda n, x, y: jnp.zeros((3, 40)).at[jnp.arange(3)[:, None], jnp.arange(n)[None]].add(
            y, indices_are_sorted=True, unique_indices=True), [("n",), (3, "n")]),
    "any and all": (lambda n, m: (m.any(0), m.all(0)), [("b", "n", 3)]),
    "argmax": (lambda n, x: (x.argmax(0), x.argmin(0)), [("n", 3)]),
    "softmax": (lambda n, x: jax.nn.softmax(x, axis=-1), [(3, "n")]),
    "logsumexp": (lambda n, x: jax.nn.logsumexp(x, axis=-1), [(3, "n")]),
    "layer norm": (lambda n, x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True),
                   [("n", 4)]),
    "variance of rows": (lambda n, x: x.var(0), [("n", 4)]),
    "cumsum": (lambda n, x: jnp.cumsum(x, 0), [("n", 3)]),
    "cumsum from the end": (lambda n, x: lax.cumsum(x, 0, reverse=True), [("n", 3)]),
    "cummax from the end": (lambda n, x: lax.cummax(x, 0, reverse=True), [("n", 3)]),
    "product over rows": (lambda n, x, y: x.T @ y, [("n", 3), ("n", 2)]),
    "product of rows": (lambda n, x, w: x @ w, [("n", 3), (3, 2)]),
    "outer product": (lambda n, x, y: x @ y.T, [("n", 3), ("n", 3)]),
    "products in batches": (lambda n, x, y: jnp.einsum("nij,njk->nik", x, y),
                            [("n", 2, 3), ("n", 3, 2)]),
    "attention": (attention, [(2, 1, 4), (2, "n", 4), (2, "n", 4), (4, 4)]),
    "concatenate behind": (lambda n, x, y: jnp.concatenate([x, y], 0), [("n", 3), (2, 3)]),
    "concatenate in front": (lambda n, x, y: jnp.concatenate([y, x], 0), [("n", 3), (2, 3)]),
    "concatenate two": (lambda n, x, y: jnp.concatenate([x, y, x], 1), [(2, "n"), (2, 3)]),
    "concatenate others": (lambda n, x, y: jnp.concatenate([x, y], 0), [(2, "n"), (3, "n")]),
    "last row": (lambda n, x: x[n - 1 :], [("n", 3)]),
    "row before the last": (lambda n, x: x[-2], [("n", 3)]),
    "all but the first": (lambda n, x: x[1:] * 2, [("n", 3)]),
    "all but the last": (lambda n, x: x[:-1] - x[1:], [("n", 3)]),
    "first rows": (lambda n, x: x[:3], [("n", 3)]),
    "middle": (lambda n, x: x[n - 4 : n - 1, 1:], [("n", 3)]),
    "every second column": (lambda n, x: x[:, ::2], [("n", 4)]),
    "row at the number": (lambda n, x: lax.dynamic_slice(x, (n, 0), (1, 3)), [(40, 3)]),
    "slice at an index": (lambda n, x, i: lax.dynamic_slice(x, (i[0] + n, 0), (2, 3)),
                          [("n", 3), ("i", 1)]),
    "write the last row": (lambda n, x, y: x.at[n - 1].set(y), [("n", 3), (3,)]),
    "write beyond": (lambda n, x, y: lax.dynamic_update_slice(x, y, (n, 0)), [("n", 3), (2, 3)]),
    "write ever more": (lambda n, x, y: lax.dynamic_update_slice(x, y, (2, 0)),
                        [(40, 3), ("n", 3)]),
    "rows of a table": (lambda n, t, i: t[i], [(5, 3), ("i", "n")]),
    "rows of a growing table": (lambda n, t, i: t[i], [("n", 3), ("i", 4)]),
    "rows beyond the table": (lambda n, t, i: jnp.take(t, i + n - 2, axis=0, mode="fill"),
                              [("n", 3), ("i", 4)]),
    "rows at the table's end": (lambda n, t, i: jnp.take(t, i + n - 2, axis=0, mode="clip"),
                                [("n", 3), ("i", 4)]),
    "elements along rows": (lambda n, x, i: jnp.take_along_axis(x, i, axis=0),
                            [("n", 3), ("i", "n", 3)]),
    "add rows at indices": (lambda n, i, y: jnp.zeros((5, 3)).at[i].add(y),
                            [("i", "n"), ("n", 3)]),
    "add to growing rows": (lambda n, x, i, y: x.at[i].add(y), [("n", 3), ("i", 4), (4, 3)]),
    "clipped writes": (lambda n, x, i, y: x.at[i + n].set(y[0], mode="clip"),
                       [("n", 3), ("i", 4), (4, 3)]),
    "dropped writes": (lambda n, x, i, y: x.at[i + n - 2].add(y, mode="drop"),
                       [("n", 3), ("i", 4), (4, 3)]),
    "writes of columns": (lambda n, x, y: x.at[:, 1].set(y), [("n", 3), ("n",)]),
    "iota": (lambda n, x: x + jnp.arange(n), [("n",)]),
    "triangle": (lambda n, x: jnp.tril(x), [("n", "n")]),
    "padding": (lambda n, x: jnp.pad(x, [(1, 2), (0, 0)], constant_values=7).sum(0), [("n", 3)]),
    "flatten": (lambda n, x: x.reshape(1, -1).sum(1), [("n", 3)]),
    "split heads": (lambda n, x: x.reshape(1, n, 2, 2).transpose(0, 2, 1, 3), [(1, "n", 4)]),
    "sort other dims": (lambda n, x: jnp.sort(x, axis=1), [("n", 3)]),
    "reverse other dims": (lambda n, x: x[:, ::-1], [("n", 3)]),
    "greatest": (lambda n, x: lax.top_k(x, 2), [(2, "n")]),
    "repeat": (lambda n, x: jnp.broadcast_to(x[:, None], (3, 2, n)).reshape(6, n), [(3, "n")]),
    "inner function": (lambda n, x: jax.jit(lambda y: y.sum(0) + n)(x), [("n", 3)]),
    "a loop of fixed size": (lambda n, x, y: lax.fori_loop(0, 3, lambda i, z: z * 2, y) + x.sum(0),
                             [("n", 3), (3,)]),
    "one over the number": (lambda n, x: x.sum() * (1 / n), [("n",)]),
    "merge": (lambda n, x: (x.reshape(-1), x.T.reshape(-1)), [(2, "n")]),
    "merge and sum": (lambda n, x: (x.reshape(-1, 3).sum(0), x.reshape(2 * n, 3).max()),
                      [(2, "n", 3)]),
    "merge, multiply, split": (lambda n, x, w: (x.reshape(-1, 3) @ w + n).reshape(2, n, 4),
                               [(2, "n", 3), (3, 4)]),
    "product over merged rows": (lambda n, x, y: x.reshape(-1, 3).T @ y.reshape(2 * n, 2),
                                 [(2, "n", 3), (2, "n", 2)]),
    "merge in other parts": (lambda n, x: x.reshape(3, 2 * n) * 2, [("n", 6)]),
    "merge and split otherwise": (lambda n, x: x.reshape(2, 3, n).reshape(2, 3 * n).reshape(n, 6),
                                  [(6, "n")]),
    "split into a minor part": (lambda n, x: x.reshape(3, n).sum(1), [("n", 3)]),
    "merged with broadcast": (lambda n, x: x.reshape(-1, 3) * jnp.full((2 * n, 1), 0.5)
                              - jnp.arange(2 * n)[:, None], [(2, "n", 3)]),
    "merged beside not merged": (lambda n, x, y: x.reshape(-1) + jnp.concatenate([y, y]),
                                 [(2, "n"), ("n",)]),
    "merged and sliced": (lambda n, x: (x.reshape(-1)[1:], x.reshape(-1, 3)[:, 1:],
                                        x.reshape(-1)[-2:]),
                          [(2, "n", 3)]),
    "merged and padded": (lambda n, x: (jnp.pad(x.reshape(-1), 1),
                                        jnp.pad(x.reshape(-1, 3), [(0, 0), (1, 0)])),
                          [(2, "n", 3)]),
    "merged and concatenated": (lambda n, x, y: (jnp.concatenate([x.reshape(-1, 3), y]),
                                                 jnp.concatenate([x.reshape(-1, 3)] * 2, 1)),
                                [(2, "n", 3), (2, 3)]),
    "merged and sorted": (lambda n, x: (jnp.sort(x.reshape(-1)),
                                        jnp.argsort(x.reshape(-1, 3), 0),
                                        jnp.sort(x.reshape(-1, 3), 1)), [(2, "n", 3)]),
    "merged and summed up": (lambda n, x: (jnp.cumsum(x.reshape(-1)),
                                            jnp.cumsum(x.reshape(-1, 3), 1)),
                             [(2, "n", 3)]),
    "merged and reversed": (lambda n, x: (x.reshape(-1)[::-1], x.reshape(-1, 3)[:, ::-1]),
                            [(2, "n", 3)]),
    "greatest of merged": (lambda n, x: (x.reshape(-1).argmax(), x.reshape(-1, 3).argmax(1),
                                         lax.top_k(x.reshape(-1), 3),
                                         lax.top_k(x.reshape(-1, 3), 2)),
                           [(2, "n", 3)]),
    "merged and stacked": (lambda n, x: (jnp.stack([x.reshape(-1), jnp.arange(2.0 * n)], 1),
                                         jnp.stack([x.reshape(-1)] * 2)), [(2, "n")]),
    "merged rows at indices": (lambda n, x, t, i: (x.reshape(-1, 3)[i], t[jnp.tile(i, n)[: n]]),
                               [(2, "n", 3), (5, 3), ("i", 4)]),
    "merged indices": (lambda n, t, i: (t[i.reshape(-1)], t[i].reshape(-1, 3).sum(0)),
                       [(5, 3), ("i", 2, "n")]),
    "an element of each merged row": (
        lambda n, x, i: jnp.take_along_axis(x.reshape(-1, 5), i.reshape(-1, 1), axis=1),
        [(2, "n", 5), ("i", 2, "n")]),
    "gradient of merged rows": (
        lambda n, t, i, y: jax.grad(lambda t: (t[i.reshape(-1)] * y.reshape(-1, 3)).sum())(t),
        [(5, 3), ("i", 2, "n"), (2, "n", 3)]),
    "gradient of an element of each row": (
        lambda n, x, i: jax.grad(
            lambda x: jnp.take_along_axis(x.reshape(-1, 5), i.reshape(-1, 1), axis=1).sum())(x),
        [(2, "n", 5), ("i", 2, "n")]),
    "cross entropy": (
        lambda n, x, i: jax.grad(lambda x: (jax.nn.log_softmax(x.reshape(-1, 5)) / (2 * n)
                                            * jax.nn.one_hot(i.reshape(-1), 5)).sum())(x),
        [(2, "n", 5), ("i", 2, "n")]),
    "random bits": (lambda n, x: x + jax.random.uniform(jax.random.key(3), (2, n, 3)),
                    [(2, "n", 3)]),
    "random bits of merged rows": (
        lambda n, x: x.reshape(-1, 3) * jax.random.bernoulli(jax.random.key(3), 0.5, (2 * n, 3)),
        [(2, "n", 3)]),
    "sort": (lambda n, x, i: (jnp.sort(x, 0), jnp.argsort(x, 0, descending=True), jnp.sort(i)),
             [("n", 3), ("i", "n")]),
    "sort with not a number": (lambda n, x: jnp.sort(jnp.where(x > 0, jnp.nan, x), 0), [("n", 3)]),
    "sort by two keys": (lambda n, i, x: lax.sort((i, x, x * 2), num_keys=2),
                         [("i", "n"), ("n",)]),
    "reverse": (lambda n, x: x[::-1] - x, [("n",)]),
    "pad in front": (lambda n, x: (jnp.pad(x, (n, 1), constant_values=2.0), jnp.pad(x, (n - 1, 0))),
                     [("n",)]),
    "gradient of the last row": (lambda n, x: jax.grad(lambda x: (x[-1] ** 2).sum())(x),
                                 [("n", 3)]),
    "images": (lambda n, x, w: lax.conv(x, w, (1, 1), "SAME"), [("n", 2, 4, 4), (3, 2, 3, 3)]),
    "gradient of images": (
        lambda n, x, w: jax.grad(lambda w: (lax.conv(x, w, (1, 1), "SAME") ** 2).sum())(w),
        [("n", 2, 4, 4), (3, 2, 3, 3)]),
    "windows": (lambda n, x: jax.grad(lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum())(x), [("n", 6)]),
    "apart": (lambda n, x: lax.optimization_barrier((x.reshape(-1), x)), [(2, "n")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_elements_are_those_without_padding(name):
    function, shapes = CASES[name]
    case = Padded(function, shapes)
    fewer = (17,) if [*CASES].index(name) % 2 else (BOUND,)
    for number in by_tier(fewer, in_all=(SECOND, 17, BOUND)):
        case.check(number)


def test_a_fixed_room_is_filled_to_its_end():
    shrinking = frozenset({Affine(-1, 40)})
    case = Padded(lambda n, x: jnp.pad(x, (0, 40 - n)), [("n",)], shrinking)
    for number in (7, 23, BOUND):
        case.check(number)


REFUSED: dict[str, tuple[Function, list[tuple[Any, ...]]]] = {
    "square": (lambda n, x: x.reshape(-1), [("n", "n")]),
    "every second row": (lambda n, x: x[::2], [("n",)]),
    "pad to a multiple": (lambda n, x: jnp.pad(x, (0, -n % 8)), [("n",)]),
    "a rest": (lambda n, x: jnp.concatenate([x, jnp.zeros(40 - n)]), [("n",)]),
    "all but ever more": (lambda n, x: x[n - 5 :], [(40,)]),
    "convolution": (lambda n, x: jnp.convolve(x, np.ones(3)), [("n",)]),
    "loop to the number": (lambda n, x: lax.fori_loop(0, n, lambda i, y: y * 2, x), [(3,)]),
    "table of the size": (lambda n, x: x + np.linspace(0, 1, n), [("n",)]),
    "square root of the number": (lambda n, x: x * np.sqrt(n), [("n",)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused(name):
    function, shapes = REFUSED[name]
    with pytest.raises(GrowthRefusedError):
        Padded(function, shapes, frozenset({Affine(-1, 40), Affine(-1, 45)})).evaluate(9)


def test_forms_of_three_sizes_tell_whether_the_first_two_predict_the_third():
    def forms(function, shapes, numbers):
        return [Form.of(traced(function, shapes, n)) for n in numbers]

    fit = Fit(5, 6)
    a, b, c = forms(lambda n, x: x.mean(), [("n",)], (5, 6, 19))
    assert a.agrees(b) and a.predicts(b, fit, c, 19) and not a.predicts(b, fit, c, 18)
    a, b, c = forms(lambda n, x: x[: n * n // 16], [(64,)], (5, 6, 19))
    assert not a.predicts(b, fit, c, 19)
    a, b = forms(lambda n, x: x * 2 if n < 6 else x + 2, [("n",)], (5, 6))
    assert not a.agrees(b)


@settings(deadline=None, max_examples=by_tier(20, in_all=100))
@given(st.data())
def test_random_chains(data):
    """Chains of the steps below, each on what the one before returned."""
    steps = [
        lambda n, x, y: jnp.tanh(x),
        lambda n, x, y: jnp.concatenate([x, y], 1),
        lambda n, x, y: jnp.concatenate([y, x], 1),
        lambda n, x, y: x[:, 1:],
        lambda n, x, y: x[:, -3:],
        lambda n, x, y: x - x.mean(1, keepdims=True),
        lambda n, x, y: jax.nn.softmax(x, axis=1),
        lambda n, x, y: jnp.cumsum(x, 1),
        lambda n, x, y: jnp.where(jnp.arange(x.shape[1])[:, None] < 3, x, y),
        lambda n, x, y: jnp.einsum("bnd,bmd->bnm", x, y) @ y,
        lambda n, x, y: jnp.pad(x, [(0, 0), (1, 1), (0, 0)], constant_values=0.5),
        lambda n, x, y: x.at[:, x.shape[1] // x.shape[1]].add(1.0),
        lambda n, x, y: (x.reshape(-1, 3) * 2 + 1).reshape(x.shape),
        lambda n, x, y: jnp.sort(x.reshape(-1, 3), 0).reshape(x.shape),
        lambda n, x, y: jnp.cumsum(x.reshape(-1)).reshape(x.shape),
        lambda n, x, y: x - (x.reshape(-1, 3).T @ x.reshape(-1, 3)).sum(0) / 50,
        lambda n, x, y: x[:, ::-1].reshape(-1)[::-1].reshape(x.shape),
        lambda n, x, y: x.transpose(1, 0, 2).reshape(-1, 3)[1:].reshape(1, -1, 3).repeat(2, 0),
        lambda n, x, y: (
            x + jax.random.normal(jax.random.key(1), x.reshape(-1, 3).shape).reshape(x.shape)
        ),
    ]
    chosen = data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=6))
    number = data.draw(st.integers(SECOND, BOUND))

    def function(n, x, y):
        for step in chosen:
            x = step(n, x, y)
        return x, x.sum(1)

    try:
        Padded(function, [(2, "n", 3), (2, 1, 3)]).check(number)
    except GrowthRefusedError:
        event("refused")
