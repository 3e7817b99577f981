"""Ring attention over split sequences: keys and values circulate among the devices.

The algorithm is that of Liu et al. 2023. Each device keeps its queries. The keys and values of the
others pass by, one device's at a time, and the partial results are combined by the logs of their
sums of exponentials, as in `flash`. In backward, the gradients of keys and values circulate with
them. So a device never holds the keys of more than two devices, nor an array of all scores.

With a causal mask, the device of the last rows would compute scores for all keys, and that of the
first rows for few. So the sequence is split into twice as many chunks as there are devices, and
device i computes chunks i and 2n - 1 - i (Brandon et al. 2023 use stripes instead). Then each
device has the same work at every step: two chunks of queries by one of keys, or the reverse.
Devices exchange their chunks accordingly at the start, and the results at the end.

The arrays are those of `flash`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.ops.kernels import flash, loops
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import AttentionLayout

# Keys and values, or their gradients; or results and the logs of their sums of exponentials.
_Pair: TypeAlias = tuple[jax.Array, jax.Array]


def forward(
    options: flash.AttentionOptions,
    layout: AttentionLayout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: flash.Mask,
) -> tuple[jax.Array, jax.Array]:
    """As `flash.forward`, over the ring of `layout.rows`, without dropout."""
    ring = _Ring(options, layout)
    queries, keys = ring.specs(query, key)

    def local(query: jax.Array, key: jax.Array, value: jax.Array, *masks: jax.Array) -> Any:
        query, key, value = (ring.balanced(x) for x in (query, key, value))
        out, lse = ring.attend(query, key, value, *masks)
        return ring.in_order(out), ring.in_order(lse[..., None])[..., 0]

    shape = (*query.shape[:-1], value.shape[-1])
    out, lse = ring.run(
        local,
        [(query, queries), (key, keys), (value, keys), *ring.masks(mask, query, queries)],
        [(shape, queries), (shape[:-1], PartitionSpec(*queries[:-1]))],
    )
    return out, lse


def backward(
    options: flash.AttentionOptions,
    layout: AttentionLayout,
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: flash.Mask,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, as `flash.backward`, over the ring."""
    ring = _Ring(options, layout)
    queries, keys = ring.specs(query, key)

    def local(
        query: jax.Array,
        grad: jax.Array,
        out: jax.Array,
        lse: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *masks: jax.Array,
    ) -> Any:
        # Backward needs only one number for each row of the result (see `flash.backward`).
        wide = opmath(query.dtype)
        delta = jnp.sum(grad.astype(wide) * out.astype(wide), axis=-1)
        rows = ring.balanced(jnp.stack([lse.astype(wide), delta], axis=-1))
        query, grad, key, value = (ring.balanced(x) for x in (query, grad, key, value))
        found = ring.gradients(grad, query, rows[..., 0], rows[..., 1], key, value, *masks)
        return tuple(ring.in_order(x) for x in found)

    of_query, of_key, of_value = ring.run(
        local,
        [
            *((x, queries) for x in (query, grad, out)),
            (lse, PartitionSpec(*queries[:-1])),
            *((x, keys) for x in (key, value)),
            *ring.masks(mask, query, queries),
        ],
        [(query.shape, queries), (key.shape, keys), (value.shape, keys)],
    )
    return of_query, of_key, of_value


class _Meetings(NamedTuple):
    """Pairs of a chunk of rows and a chunk of keys whose scores are computed, one after another.

    Attributes:
        is_causal: whether the causal mask applies to these pairs.
        rows, keys: the numbers of the chunks, integer arrays of equal length.
    """

    is_causal: bool
    rows: jax.Array
    keys: jax.Array

    def fold(self, step: Callable[[Any, Any, Any], Any], start: Any) -> Any:
        """The last carry of `carry = step(carry, row, key)` over the pairs.

        This is a loop, so that the scores of one pair are in memory at a time.
        """
        if len(self.rows) == 1:
            return step(start, self.rows[0], self.keys[0])

        def body(carry: Any, pair: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return step(carry, *pair), None

        return loops.scan(body, start, (self.rows, self.keys))[0]


class _Ring:
    """One attention over a ring of devices.

    Attributes:
        size: the number of devices in the ring.
    """

    def __init__(self, options: flash.AttentionOptions, layout: AttentionLayout) -> None:
        self._options, self._layout = options, layout
        self.size = layout.count(layout.rows)

    def specs(self, query: jax.Array, key: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
        """The partition specs of arrays with queries, and of those with keys."""
        layout = self._layout
        leading = (layout.batch or None, *(None,) * (key.ndim - 4)) if key.ndim > 3 else ()
        heads, rows = layout.heads or None, layout.rows
        group = (None,) if query.ndim > key.ndim else ()
        return (
            PartitionSpec(*leading, heads, *group, rows, None),
            PartitionSpec(*leading, heads, rows, None),
        )

    def masks(
        self, mask: flash.Mask, query: jax.Array, queries: PartitionSpec
    ) -> list[tuple[jax.Array, PartitionSpec]]:
        """The mask with its spec, if one is needed; each device has all columns of its rows.

        For documents, each device has the ids of all keys, which are also those of all queries.
        """
        num_keys = self._padded_size(self._options.num_keys, self._layout.rows)
        if isinstance(mask, flash.Documents):
            ids = mask.columns
            widths = [(0, 0)] * (ids.ndim - 1) + [(0, num_keys - ids.shape[-1])]
            # The padding gets a document of its own. Even if that id is in use, a causal mask hides
            # the padding, which comes after all rows.
            ids = jnp.pad(ids, widths, constant_values=int(np.iinfo(ids.dtype).min))
            return [(ids, PartitionSpec(queries[0], *(None,) * (ids.ndim - 1)))]
        if mask is None and (num_keys == self._options.num_keys or self._options.is_causal):
            return []  # the causal mask hides the padding, which comes after all rows
        if mask is None:
            is_key = np.arange(num_keys) < self._options.num_keys
            mask = jnp.asarray(is_key.reshape((1,) * (query.ndim - 1) + (-1,)))
        elif mask.shape[-1] > 1 and num_keys > mask.shape[-1]:
            widths = [(0, 0)] * (mask.ndim - 1) + [(0, num_keys - mask.shape[-1])]
            hidden = False if mask.dtype == bool else -np.inf
            mask = jnp.pad(mask, widths, constant_values=hidden)
        # The dim of a group is never split, nor is a broadcast dim.
        spec = [axes if n > 1 else None for n, axes in zip(mask.shape, queries)]
        return [(mask, PartitionSpec(*spec[:-1], None))]

    def run(
        self,
        local: Callable[..., Any],
        arrays: Sequence[tuple[jax.Array, PartitionSpec]],
        results: Sequence[tuple[tuple[int, ...], PartitionSpec]],
    ) -> Any:
        """Has every device run `local` on its blocks, padded with zeros if the split is uneven.

        Args:
            local: takes a block of each array, and returns a block of each result.
            arrays: the arrays, with their specs.
            results: the global shapes of the results, with their specs.
        """
        padded = [
            jnp.pad(
                x,
                [
                    (0, self._padded_size(n, axes) - n)
                    for n, axes in zip(x.shape, spec, strict=True)
                ],
            )
            for x, spec in arrays
        ]
        mapped: Callable[..., Any] = jax.shard_map(
            local,
            mesh=self._layout.mesh,
            in_specs=tuple(spec for _, spec in arrays),
            out_specs=tuple(spec for _, spec in results),
            check_vma=False,
        )
        found = mapped(*padded)
        return [lax.slice(x, (0,) * x.ndim, shape) for x, (shape, _) in zip(found, results)]

    def _padded_size(self, n: int, entry: Any) -> int:
        """The padded size of a dim that is split by this entry of a partition spec."""
        axes = (entry,) if isinstance(entry, str) else entry or ()  # jax unpacks a single name
        parts = self._layout.count(axes)
        if self._options.is_causal and axes == self._layout.rows:
            parts *= 2
        return -(-n // parts) * parts

    # ---- Inside `run`: on one device's blocks. Rows are the last dim but one. --------------------

    def _index(self) -> jax.Array:
        return lax.axis_index(self._layout.rows)

    def _sent(self, x: Any, targets: Sequence[int]) -> Any:
        """Sends `x` to `targets[i]` from each device i; returns what this device receives."""
        pairs = list(enumerate(targets))
        return x if all(a == b for a, b in pairs) else lax.ppermute(x, self._layout.rows, pairs)

    def _sent_on(self, x: Any) -> Any:
        """Sends `x` to the next device; returns that of the previous one."""
        return self._sent(x, [(i + 1) % self.size for i in range(self.size)])

    def _targets(self, parity: int) -> list[int]:
        """For each device, the one that computes its first (0) or second (1) chunk, if causal."""
        chunks = [2 * i + parity for i in range(self.size)]
        return [min(chunk, 2 * self.size - 1 - chunk) for chunk in chunks]

    def balanced(self, x: jax.Array) -> jax.Array:
        """The chunks of rows that this device computes, in a new first dim."""
        if not self._options.is_causal:
            return x[None]
        # A device gets one chunk from each permutation; that of the even one may be its second.
        even, odd = (
            self._sent(chunk, self._targets(parity))
            for parity, chunk in enumerate(jnp.split(x, 2, axis=-2))
        )
        return jnp.where(self._index() % 2 == 0, jnp.stack([even, odd]), jnp.stack([odd, even]))

    def in_order(self, chunks: jax.Array) -> jax.Array:
        """The inverse of `balanced`."""
        if not self._options.is_causal:
            return chunks[0]
        parities = jnp.where(self._index() % 2 == 0, chunks, chunks[::-1])
        return jnp.concatenate(
            [
                self._sent(chunk, np.argsort(self._targets(parity)).tolist())
                for parity, chunk in enumerate(parities)
            ],
            axis=-2,
        )

    def _own_pairs(self) -> list[_Meetings]:
        """The pairs of chunks for a device's own keys."""
        if not self._options.is_causal:
            return [_Meetings(False, jnp.zeros(1, int), jnp.zeros(1, int))]
        both, second = jnp.arange(2), jnp.ones(1, int)
        return [_Meetings(True, both, both), _Meetings(False, second, jnp.zeros(1, int))]

    def _pairs(self, source: jax.Array) -> list[_Meetings]:
        """The pairs of chunks for the keys of another device."""
        if not self._options.is_causal:
            return self._own_pairs()
        # The second chunk of rows comes after all first chunks of keys. If the keys' device comes
        # before this one, so does the first chunk of rows; else its second keys come before those
        # of the second chunk of rows.
        same = jnp.where(source < self._index(), 0, 1)
        return [_Meetings(False, jnp.stack([1, same]), jnp.stack([0, same]))]

    def _part(self, query: jax.Array, key: jax.Array, is_causal: bool) -> flash.AttentionOptions:
        sizes = {"num_queries": query.shape[-2], "num_keys": key.shape[-2]}
        return replace(self._options, **sizes, is_causal=is_causal, is_part=True)

    def _chunk(self, device: Any, i: Any) -> Any:
        """The position in the global sequence of chunk `i` of a device."""
        if not self._options.is_causal:
            return device
        return jnp.where(i == 0, device, 2 * self.size - 1 - device)

    def _mask(
        self, masks: Sequence[jax.Array], source: Any, i: Any, j: Any, key: jax.Array
    ) -> flash.Mask:
        """The mask of this device's rows of chunk `i` for the keys of chunk `j` of `source`."""
        num = key.shape[-2]
        if masks and jnp.issubdtype(masks[0].dtype, np.integer):
            rows, columns = (
                lax.dynamic_slice_in_dim(masks[0], self._chunk(*chunk) * num, num, axis=-1)
                for chunk in ((self._index(), i), (source, j))
            )
            return flash.Documents(rows.swapaxes(-1, -2), columns)
        if not masks or masks[0].shape[-1] == 1:
            return masks[0] if masks else None
        return lax.dynamic_slice_in_dim(masks[0], source * num, num, axis=-1)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *masks: jax.Array
    ) -> _Pair:
        """The rows' results, and the logs of their sums of exponentials; all in chunks."""

        def add(total: _Pair, source: Any, keys: _Pair, pairs: Sequence[_Meetings]) -> _Pair:
            for each in pairs:

                def meet(total: _Pair, i: Any, j: Any, is_causal: bool = each.is_causal) -> _Pair:
                    rows, key, value = query[i], keys[0][j], keys[1][j]
                    found = flash.forward(
                        self._part(rows, key, is_causal),
                        *(rows, key, value, self._mask(masks, source, i, j, key), None),
                    )
                    joined = _joined((total[0][i], total[1][i]), found)
                    return _updated(total[0], i, joined[0]), _updated(total[1], i, joined[1])

                total = each.fold(meet, total)
            return total

        wide = opmath(query.dtype)
        start = (
            jnp.zeros((*query.shape[:-1], value.shape[-1]), wide),
            jnp.full(query.shape[:-1], -np.inf, wide),
        )
        total = add(start, self._index(), (key, value), self._own_pairs())

        def step(total: _Pair, number: Any, keys: _Pair) -> _Pair:
            source = (self._index() - number) % self.size
            return add(total, source, keys, self._pairs(source))

        def body(carry: tuple[_Pair, _Pair], number: Any) -> tuple[tuple[_Pair, _Pair], None]:
            total, keys = carry
            following = self._sent_on(keys)  # sent while the keys are used
            return (step(total, number, keys), following), None

        carry = total, self._sent_on((key, value))
        (total, keys), _ = loops.scan(body, carry, jnp.arange(1, self.size - 1))
        return step(total, self.size - 1, keys)

    def gradients(
        self,
        grad: jax.Array,
        query: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *masks: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of query, key and value; all in chunks."""
        wanted = flash.Wanted(query=True, key=True, value=True, mask=False)

        def add(of: Any, source: Any, keys: _Pair, pairs: Sequence[_Meetings]) -> Any:
            for each in pairs:

                def meet(of: Any, i: Any, j: Any, is_causal: bool = each.is_causal) -> Any:
                    rows, key, value = query[i], keys[0][j], keys[1][j]
                    found = flash.backward(
                        self._part(rows, key, is_causal),
                        *(grad[i], rows, key, value, self._mask(masks, source, i, j, key)),
                        *(None, lse[i], None, wanted),
                        delta=delta[i],
                    )
                    return tuple(
                        _updated(total, at, total[at] + part)
                        for total, at, part in zip(of, (i, j, j), found)
                    )

                of = each.fold(meet, of)
            return of

        wide = opmath(query.dtype)
        keys = key, value
        of = tuple(jnp.zeros(x.shape, wide) for x in (query, key, value))
        of_query, *of_keys = add(of, self._index(), keys, self._own_pairs())

        def step(of_query: jax.Array, of_keys: Any, number: Any, keys: _Pair) -> Any:
            source = (self._index() - number) % self.size
            of_query, *of_keys = add((of_query, *of_keys), source, keys, self._pairs(source))
            return of_query, self._sent_on(of_keys)

        def body(carry: Any, number: Any) -> Any:
            of_query, of_keys, keys = carry
            following = self._sent_on(keys)
            return (*step(of_query, of_keys, number, keys), following), None

        carry = of_query, self._sent_on(of_keys), self._sent_on(keys)
        (of_query, of_keys, keys), _ = loops.scan(body, carry, jnp.arange(1, self.size - 1))
        # The device that adds the last part to the gradients of keys sends them to their owner.
        of_query, of_keys = step(of_query, of_keys, self.size - 1, keys)
        return of_query, *of_keys


def _updated(x: jax.Array, i: Any, chunk: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, chunk, i, 0)


def _joined(a: _Pair, b: _Pair) -> _Pair:
    """Combines the results of attention over two sets of keys."""
    highest = jnp.maximum(a[1], b[1])
    # A row that attends to nothing yet has -inf; exp(-inf - 0) is 0, and -inf - -inf would be NaN.
    shift = jnp.where(highest == -np.inf, 0, highest)
    weights = [jnp.exp(lse - shift) for _, lse in (a, b)]
    total = weights[0] + weights[1]
    summed = sum(out * weight[..., None] for (out, _), weight in zip((a, b), weights))
    return summed / jnp.where(total == 0, 1, total)[..., None], shift + jnp.log(total)
