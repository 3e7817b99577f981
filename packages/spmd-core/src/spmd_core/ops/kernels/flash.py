"""Attention block by block, in plain jax, for every platform, mask and dtype.

The algorithm is FlashAttention's (Dao et al. 2022; Dao 2023, sections 2.2 and 3.1). The softmax is
computed online, over one block of queries and one of keys at a time, and the backward recomputes
each block's probabilities from the log of their sum. So no array of size (queries, keys) exists,
only blocks of it. One loop runs over a static table of block pairs, without the empty blocks of a
causal mask. The program does not grow with the sequence, and the compiler knows the loop's trip
count (a GPU would otherwise ask the host after every block).

Arrays have any leading dims, followed by:

- `query`: (kv heads, group, queries, dim)
- `key`: (kv heads, keys, dim)
- `value`: (kv heads, keys, value dim)
- `mask`: the scores' (kv heads, group, queries, keys), where each dim may also be 1; or `Documents`

A group of query heads shares one kv head, which is never repeated. Where each query head has its
own kv head, there is no group dim. No dim is merged with another, so that the partitioner splits
the leading dims and the heads, and not the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import loops, one_block
from spmd_core.ops.kernels.precision import matmul_precision, opmath

# A block has at most MAX_BLOCK^2 scores for each head and batch element: enough for matrix products
# to run at full speed, and little beside a long sequence.
MAX_BLOCK = 512


@dataclass(frozen=True)
class AttentionOptions:
    """The static options of one attention: the sizes, their blocks, and the treatment of scores.

    Attributes:
        num_queries, num_keys: the lengths of the sequences.
        scale: the factor of the products.
        is_causal: whether query i attends to keys up to i.
        dropout_p: the probability that a weight is dropped.
        is_part: whether the queries attend to further keys, in other calls (`ring`).
    """

    num_queries: int
    num_keys: int
    scale: float
    is_causal: bool
    dropout_p: float
    is_part: bool = False

    @property
    def query_blocks(self) -> tuple[int, int]:
        """The number of queries in a block, and the number of blocks.

        With few keys, a block has more queries.
        """
        return _equal_blocks(self.num_queries, MAX_BLOCK**2 // min(self.num_keys, MAX_BLOCK))

    @property
    def key_blocks(self) -> tuple[int, int]:
        """The number of keys in a block, and the number of blocks.

        With few queries, as in generation, a block has more keys.
        """
        return _equal_blocks(self.num_keys, MAX_BLOCK**2 // self.query_blocks[0])

    def pairs(self) -> Any:
        """The (query block, key block) pairs with any unmasked score, int32 of shape (n, 2)."""
        (size_q, num_q), (size_k, num_k) = self.query_blocks, self.key_blocks
        return np.array(
            [
                (i, j)
                for i in range(num_q)
                for j in range(num_k)
                if not self.is_causal or j * size_k < (i + 1) * size_q
            ],
            np.int32,
        )


class Documents(NamedTuple):
    """A mask of two short arrays: a query attends to the keys of its own document.

    Each block of the mask is made where it is needed, so no array of size (queries, keys) exists.
    It can be combined with a causal mask. A pair of blocks without a common document is computed,
    too, and masked.

    Attributes:
        rows: the document of each query, integers, as a mask with one key.
        columns: the document of each key, as a mask with one query.
    """

    rows: jax.Array
    columns: jax.Array


Mask: TypeAlias = jax.Array | Documents | None


def _padded_mask(options: AttentionOptions, mask: Mask) -> Mask:
    """The mask, padded to a multiple of the blocks; `_scores` masks the padding."""
    if mask is None:
        return None
    if isinstance(mask, Documents):
        return Documents(
            _padded(mask.rows, mask.rows.ndim - 2, options.query_blocks),
            _padded(mask.columns, mask.columns.ndim - 1, options.key_blocks),
        )
    of_rows = _padded(mask, mask.ndim - 2, options.query_blocks)
    return _padded(of_rows, mask.ndim - 1, options.key_blocks)


def _equal_blocks(n: int, most: int) -> tuple[int, int]:
    """(size, count) of the fewest equal blocks of at most `most`; they pad by less than `count`."""
    most = max(most, n) if one_block.current.get() else most
    count = -(-n // most)
    return -(-n // count), count


def _read_block(x: jax.Array, at: Any, size: int, axis: int) -> jax.Array:
    """Block `at` along dim `axis`; a dim of size 1 is broadcast, so its blocks are all the same."""
    return x if x.shape[axis] in (1, size) else lax.dynamic_slice_in_dim(x, at * size, size, axis)


def _write_block(x: jax.Array, block: jax.Array, at: Any, axis: int) -> jax.Array:
    return (
        block
        if x.shape == block.shape
        else lax.dynamic_update_slice_in_dim(x, block, at * block.shape[axis], axis)
    )


def _padded(x: jax.Array, axis: int, blocks: tuple[int, int]) -> jax.Array:
    size, count = blocks
    missing = size * count - x.shape[axis]
    if missing == 0 or x.shape[axis] == 1:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, missing)
    return jnp.pad(x, width)


def _product(pattern: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product accumulated in torch's compute dtype; 16-bit operands stay 16-bit."""
    return jnp.einsum(
        pattern, a, b, precision=matmul_precision(b.dtype), preferred_element_type=opmath(b.dtype)
    )


def _pairwise_products(query: jax.Array, key: jax.Array) -> jax.Array:
    """The dot product of each query with each key.

    Also of each row of the result's gradient with each value: the gradients of the probabilities.
    """
    return _product(
        "...hgqd,...hkd->...hgqk" if query.ndim > key.ndim else "...hqd,...hkd->...hqk", query, key
    )


def _weighted_sums(weights: jax.Array, value: jax.Array) -> jax.Array:
    """For each query the sum of the values, weighted by the query's row of weights."""
    return _product(
        "...hgqk,...hkd->...hgqd" if weights.ndim > value.ndim else "...hqk,...hkd->...hqd",
        weights,
        value,
    )


def _scores(
    options: AttentionOptions, i: Any, j: Any, query: jax.Array, key: jax.Array, mask: Mask
) -> jax.Array:
    """One block of scores, -inf where a query may not attend to a key."""
    (size_q, _), (size_k, num_k) = options.query_blocks, options.key_blocks
    scores = _pairwise_products(query, key)
    scores = scores * np.asarray(options.scale, scores.dtype)
    if isinstance(mask, Documents):
        rows = _read_block(mask.rows, i, size_q, mask.rows.ndim - 2)
        scores = _masked(
            rows == _read_block(mask.columns, j, size_k, mask.columns.ndim - 1), scores
        )
    elif mask is not None:
        block = _read_block(_read_block(mask, i, size_q, mask.ndim - 2), j, size_k, mask.ndim - 1)
        # A sum and not a select, as in torch: a score of nan stays nan under a mask.
        added = (
            jnp.where(block, np.asarray(0, scores.dtype), -np.inf)
            if block.dtype == np.bool_
            else block
        )
        scores = scores + added.astype(scores.dtype)
    columns = j * size_k + lax.broadcasted_iota(np.int32, (size_q, size_k), 1)
    if options.is_causal:
        rows = i * size_q + lax.broadcasted_iota(np.int32, (size_q, size_k), 0)
        scores = _masked(rows >= columns, scores)
    if size_k * num_k != options.num_keys:
        scores = _masked(columns < options.num_keys, scores)
    return scores


def _masked(attended: jax.Array, scores: jax.Array) -> jax.Array:
    """The scores where `attended`, -inf elsewhere.

    As a minimum and not a select: with a minimum, XLA's CPU backend keeps the product, the maximum
    and the sum of a softmax in one loop, which takes a third less time for a block.
    """
    return jnp.minimum(scores, jnp.where(attended, np.asarray(np.inf, scores.dtype), -np.inf))


def _dropout(
    options: AttentionOptions, i: Any, j: Any, seed: jax.Array | None, shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    """The function that applies dropout to one block of probabilities or of their gradients.

    Each block has its own random key, so the result is the same on any mesh and in the backward.
    """
    if seed is None:
        return lambda x: x
    keep = _block_dropout_mask(options, i, j, seed, shape)
    factor = 0.0 if options.dropout_p >= 1 else 1.0 / (1.0 - options.dropout_p)
    return lambda x: jnp.where(keep, x * np.asarray(factor, x.dtype), np.asarray(0, x.dtype))


def _block_dropout_mask(
    options: AttentionOptions, i: Any, j: Any, seed: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    threshold = min(round((1.0 - options.dropout_p) * 2**32), 2**32 - 1)
    return jax.random.bits(
        jax.random.fold_in(seed, i * options.key_blocks[1] + j), shape, np.uint32
    ) < np.uint32(threshold)


def dropout_mask(options: AttentionOptions, seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which probabilities dropout keeps, bool of shape `shape`: (..., queries, keys).

    The result is not in blocks: the caller needs memory for all of it.
    """
    (size_q, num_q), (size_k, num_k) = options.query_blocks, options.key_blocks
    block = (*shape[:-2], size_q, size_k)

    def body(result: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        i, j = pair
        start = (*(np.int32(0),) * (len(shape) - 2), i * size_q, j * size_k)
        return lax.dynamic_update_slice(
            result, _block_dropout_mask(options, i, j, seed, block), start
        ), None

    result, _ = loops.scan(
        body, jnp.zeros((*shape[:-2], size_q * num_q, size_k * num_k), bool), options.pairs()
    )
    return result[..., : shape[-2], : shape[-1]]


def _finite(x: jax.Array, mask: Mask) -> jax.Array:
    """`x`, with the lowest finite number for -inf where there is a mask.

    The maximum of a row that attends to nothing is -inf. With a finite number instead, each exp of
    (score - maximum) is exp(-inf) = 0 and not NaN. Only a mask leaves such rows; without one `x` is
    unchanged, so that XLA's CPU backend keeps product, maximum, subtraction and exp in one loop.
    """
    return x if mask is None else jnp.maximum(x, jnp.finfo(x.dtype).min)


def _softmax(scores: jax.Array, mask: Mask) -> jax.Array:
    """The probabilities of complete rows; zeros for a row that attends to nothing."""
    weights = jnp.exp(scores - _finite(jnp.max(scores, axis=-1, keepdims=True), mask))
    # The sum is at least 1 where anything is attended to: exp(maximum - maximum) is 1.
    return weights / jnp.maximum(
        jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny
    )


def _logsumexp(scores: jax.Array, mask: Mask) -> jax.Array:
    """The log of the sum of exponentials of each row; -inf for a row that attends to nothing."""
    top = _finite(jnp.max(scores, axis=-1, keepdims=True), mask)
    return (top + jnp.log(jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)))[..., 0]


def forward(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The attended values, and the log of the sum of the scores' exponentials.

    Shapes: (..., kv heads, group, queries, value dim) and (..., queries). Both are in torch's
    compute dtype. A row that attends to nothing gives zeros and -inf.
    """
    wide = opmath(query.dtype)
    size_q, size_k = options.query_blocks[0], options.key_blocks[0]
    query, key, value = (
        _padded(query, query.ndim - 2, options.query_blocks),
        _padded(key, key.ndim - 2, options.key_blocks),
        _padded(value, value.ndim - 2, options.key_blocks),
    )
    mask = _padded_mask(options, mask)
    rows, columns = query.ndim - 2, key.ndim - 2

    def attend(i: Any, j: Any, weights: jax.Array) -> jax.Array:
        weights = _dropout(options, i, j, seed, weights.shape)(weights)
        return _weighted_sums(weights.astype(value.dtype), _read_block(value, j, size_k, columns))

    def whole_rows(carry: tuple[jax.Array, ...], pair: Any) -> tuple[tuple[jax.Array, ...], None]:
        """Computes one block of queries over all keys.

        The probabilities have the same expression as in `backward`: where there is one block only,
        and forward and backward are in one program, the compiler computes them once.
        """
        (i, j), (lse, attended) = pair, carry
        scores = _scores(options, i, j, _read_block(query, i, size_q, rows), key, mask)
        return (
            _write_block(lse, _logsumexp(scores, mask), i, rows),
            _write_block(attended, attend(i, j, _softmax(scores, mask)), i, rows),
        ), None

    def online(carry: tuple[jax.Array, ...], pair: Any) -> tuple[tuple[jax.Array, ...], None]:
        """Adds one block of keys to the running softmax of one block of queries."""
        (i, j), (highest, total, attended) = pair, carry
        before, sum_before, out_before = (
            _read_block(highest, i, size_q, rows),
            _read_block(total, i, size_q, rows),
            _read_block(attended, i, size_q, rows),
        )
        scores = _scores(
            options,
            i,
            j,
            _read_block(query, i, size_q, rows),
            _read_block(key, j, size_k, columns),
            mask,
        )
        top = jnp.maximum(before, jnp.max(scores, axis=-1))
        shift = _finite(top, mask)
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(before - shift)
        summed = sum_before * shrink + jnp.sum(weights, axis=-1)
        out = out_before * shrink[..., None] + attend(i, j, weights)
        return (
            _write_block(highest, top, i, rows),
            _write_block(total, summed, i, rows),
            _write_block(attended, out, i, rows),
        ), None

    shape, pairs = query.shape[:-1], options.pairs()
    start: tuple[jax.Array, ...] = (
        jnp.full(shape, -np.inf, wide),
        jnp.zeros((*shape, value.shape[-1]), wide),
    )
    if options.key_blocks[1] == 1:
        (lse, out), _ = (
            whole_rows(start, (0, 0)) if len(pairs) == 1 else loops.scan(whole_rows, start, pairs)
        )
    else:
        start = (*start[:1], jnp.zeros(shape, wide), *start[1:])
        (highest, total, attended), _ = loops.scan(online, start, pairs)
        out = attended / jnp.where(total == 0, np.asarray(1, wide), total)[..., None]
        lse = _finite(highest, mask) + jnp.log(total)
    return out[..., : options.num_queries, :], lse[..., : options.num_queries]


@dataclass(frozen=True)
class Wanted:
    """Which gradients the backward is asked for."""

    query: bool
    key: bool
    value: bool
    mask: bool


def backward(
    options: AttentionOptions,
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    out: jax.Array | None,
    lse: jax.Array,
    seed: jax.Array | None,
    wanted: Wanted,
    *,
    delta: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """The gradients of query, key, value and mask in torch's compute dtype, None if not wanted.

    `delta` may be given instead of `out`: the sum of its products with `grad`, for each query.

    One function, although long: the step of one scan adds to all gradients, which share the scores
    and the weights of a pair of blocks.
    """
    wide = opmath(query.dtype)
    size_q, size_k = options.query_blocks[0], options.key_blocks[0]
    rows, columns = query.ndim - 2, key.ndim - 2
    transposed = "...hgqk,...hgqd->...hkd" if query.ndim > key.ndim else "...hqk,...hqd->...hkd"
    # One block of keys has complete rows, and values computed from these are more exact than from
    # `lse` and `out`. A row with one weight of nearly 1 has a gradient of nearly 0: the difference
    # of two nearly equal numbers, which must have the same rounding.
    whole_rows = options.key_blocks[1] == 1 and not options.is_part
    # The number that the softmax's backward subtracts from each row (D in Dao 2023, section 2.2).
    # It is right under dropout too, because `out` is the result after dropout.
    if delta is None:
        assert out is not None
        delta = jnp.sum(grad.astype(wide) * out.astype(wide), axis=-1)
    shift = _padded(_finite(lse, mask), rows, options.query_blocks)
    delta, grad, query = (_padded(x, rows, options.query_blocks) for x in (delta, grad, query))
    key, value = (
        _padded(key, columns, options.key_blocks),
        _padded(value, columns, options.key_blocks),
    )
    mask_shape = mask.shape if isinstance(mask, jax.Array) else None
    mask = _padded_mask(options, mask)

    def add(
        into: jax.Array | None, at: Any, axis: int, make: Callable[[], jax.Array]
    ) -> jax.Array | None:
        if into is None:
            return None
        block = make()
        return _write_block(into, _read_block(into, at, block.shape[axis], axis) + block, at, axis)

    def step(carry: tuple[Any, ...], pair: Any) -> tuple[tuple[Any, ...], None]:
        """Adds the contribution of one pair of blocks to the gradients."""
        (i, j), (of_query, of_key, of_value, of_mask) = pair, carry
        query_i, grad_i = _read_block(query, i, size_q, rows), _read_block(grad, i, size_q, rows)
        key_j, value_j = (
            _read_block(key, j, size_k, columns),
            _read_block(value, j, size_k, columns),
        )
        scores = _scores(options, i, j, query_i, key_j, mask)
        weights = (
            _softmax(scores, mask)
            if whole_rows
            else jnp.exp(scores - _read_block(shift, i, size_q, rows)[..., None])
        )
        drop = _dropout(options, i, j, seed, weights.shape)
        of_value = add(
            of_value,
            j,
            columns,
            lambda: _product(transposed, drop(weights).astype(grad.dtype), grad_i),
        )
        of_weights = drop(_pairwise_products(grad_i, value_j))
        weighed = weights * of_weights
        subtracted = (
            jnp.sum(weighed, axis=-1) if whole_rows else _read_block(delta, i, size_q, rows)
        )
        # Not weights * (of_weights - ...): in this form XLA's CPU backend computes the product, its
        # sum and the difference in one loop.
        of_scores = weighed - weights * subtracted[..., None]
        if of_mask is not None:
            summed = jnp.sum(
                of_scores,
                axis=[d for d, size in enumerate(of_mask.shape) if size == 1],
                keepdims=True,
            )
            of_row = _read_block(of_mask, i, summed.shape[-2], of_mask.ndim - 2)
            of_row = _write_block(
                of_row,
                _read_block(of_row, j, summed.shape[-1], of_mask.ndim - 1) + summed,
                j,
                of_mask.ndim - 1,
            )
            of_mask = _write_block(of_mask, of_row, i, of_mask.ndim - 2)
        narrow = (of_scores * np.asarray(options.scale, wide)).astype(query.dtype)
        of_query = add(of_query, i, rows, lambda: _weighted_sums(narrow, key_j))
        of_key = add(of_key, j, columns, lambda: _product(transposed, narrow, query_i))
        return (of_query, of_key, of_value, of_mask), None

    assert not (wanted.mask and isinstance(mask, Documents)), "integers have no gradient"
    array = None if isinstance(mask, Documents) else mask
    asked = ((query, wanted.query), (key, wanted.key), (value, wanted.value), (array, wanted.mask))
    start = tuple(jnp.zeros(x.shape, wide) if x is not None and yes else None for x, yes in asked)
    pairs = options.pairs()
    (of_query, of_key, of_value, of_mask), _ = (
        step(start, (0, 0)) if len(pairs) == 1 else loops.scan(step, start, pairs)
    )
    return (
        None if of_query is None else of_query[..., : options.num_queries, :],
        None if of_key is None else of_key[..., : options.num_keys, :],
        None if of_value is None else of_value[..., : options.num_keys, :],
        None
        if of_mask is None or mask_shape is None
        else of_mask[tuple(slice(n) for n in mask_shape)],
    )
