"""Loops and branches over functions of arrays, for operations that run subgraphs.

Each is a `Control`, a function of the subgraphs, the operands, and the result of index checks so
far (int32; None without index checks), which is carried from one run of a subgraph to the next.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from spmd_core.ops.kernels import loops

# As in `graph.subgraphs`.
_Found: TypeAlias = jax.Array | None
_Body: TypeAlias = Callable[[Sequence[jax.Array]], tuple[list[jax.Array], _Found]]
_Control: TypeAlias = Callable[
    [Sequence[_Body], Sequence[jax.Array], _Found], tuple[list[jax.Array], _Found]
]


def scan(num_carry: int, num_stacked: int, length: int, *, reverse: bool) -> _Control:
    """Scans a function (carry, slice of each stack, others) -> (carry, results to stack)."""

    def control(
        bodies: Sequence[_Body], inputs: Sequence[jax.Array], found: _Found
    ) -> tuple[list[jax.Array], _Found]:
        (body,) = bodies
        end = num_carry + num_stacked
        others = inputs[end:]

        def step(
            state: tuple[list[jax.Array], _Found], each: list[jax.Array]
        ) -> tuple[tuple[list[jax.Array], _Found], list[jax.Array]]:
            carry, before = state
            results, now = body([*carry, *each, *others])
            return (results[:num_carry], _first(before, now)), results[num_carry:]

        state = (list(inputs[:num_carry]), found)
        xs = list(inputs[num_carry:end])
        (carry, found), stacks = loops.scan(step, state, xs, length=length, reverse=reverse)
        return [*carry, *stacks], found

    return control


def repeat(
    num_carry: int,
    rows: Sequence[tuple[int, int]],
    num_vectors: int,
    length: int,
    *,
    reverse: bool,
) -> _Control:
    """Scans a function (carry, a row of each stack, others, elements) -> (carry, what is stacked).

    Args:
        num_carry: the number of carried arrays.
        rows: for each stack, (a, b): with row i of the results, the function gets row a + b * i.
        num_vectors: the number of vectors, of which it gets element i.
        length: the number of iterations.
        reverse: whether the last row is made first.
    """

    def control(
        bodies: Sequence[_Body], inputs: Sequence[jax.Array], found: _Found
    ) -> tuple[list[jax.Array], _Found]:
        (body,) = bodies
        first, end = num_carry + len(rows), len(inputs) - num_vectors
        stacks, others, vectors = inputs[num_carry:first], inputs[first:end], inputs[end:]
        scanned = [row == (0, 1) and stack.shape[0] == length for stack, row in zip(stacks, rows)]

        def step(state: tuple[list[jax.Array], _Found], each: list[jax.Array]) -> Any:
            carry, before = state
            i, elements, given = each[0], each[1 : 1 + num_vectors], iter(each[1 + num_vectors :])
            taken = [
                next(given)
                if is_scanned
                else lax.dynamic_index_in_dim(
                    stack, a + b * i, keepdims=False, allow_negative_indices=False
                )
                for stack, (a, b), is_scanned in zip(stacks, rows, scanned)
            ]
            results, now = body([*carry, *taken, *others, *elements])
            return (results[:num_carry], _first(before, now)), results[num_carry:]

        xs = [
            lax.iota(np.int32, length),
            *vectors,
            *(stack for stack, is_scanned in zip(stacks, scanned) if is_scanned),
        ]
        state = (list(inputs[:num_carry]), found)
        (carry, found), made = loops.scan(step, state, xs, length=length, reverse=reverse)
        return [*carry, *made], found

    return control


def while_loop(num_carry: int, num_read: int) -> _Control:
    """Runs the second function (carry, others) -> carry while the first one, of both, is true.

    Args:
        num_carry: the number of carried arrays.
        num_read: the number of further arrays that the first function takes; the second function
            takes the rest.
    """

    def control(
        bodies: Sequence[_Body], inputs: Sequence[jax.Array], found: _Found
    ) -> tuple[list[jax.Array], _Found]:
        condition, body = bodies
        read = inputs[num_carry : num_carry + num_read]
        others = inputs[num_carry + num_read :]

        def goes_on(carry: Sequence[jax.Array], before: _Found) -> tuple[jax.Array, _Found]:
            (result,), now = condition([*carry, *read])
            return result, _first(before, now)

        # The results of the condition's index checks are carried, so it runs in the body.
        def step(
            state: tuple[list[jax.Array], jax.Array, _Found],
        ) -> tuple[list[jax.Array], jax.Array, _Found]:
            carry, _, before = state
            results, now = body([*carry, *others])
            return (results, *goes_on(results, _first(before, now)))

        start = list(inputs[:num_carry])
        state = (start, *goes_on(start, found))
        carry, _, found = lax.while_loop(lambda state: state[1], step, state)
        return carry, found

    return control


def cond(counts: tuple[int, int]) -> _Control:
    """Runs the first function if the first operand, a boolean, is true, else the second function.

    Args:
        counts: the number of operands of each function; those of the first function come first.
    """

    def control(
        bodies: Sequence[_Body], inputs: Sequence[jax.Array], found: _Found
    ) -> tuple[list[jax.Array], _Found]:
        choice, given = inputs[0], inputs[1:]
        operands = (list(given[: counts[0]]), list(given[counts[0] :]))
        results, now = lax.cond(
            choice,
            lambda both: tuple(bodies[0](both[0])),
            lambda both: tuple(bodies[1](both[1])),
            operands,
        )
        return list(results), _first(found, now)

    return control


def _first(before: _Found, now: _Found) -> _Found:
    """The first of two failed checks."""
    return now if before is None or now is None else lax.min(before, now)
