"""Faults of single operations and of what is below them: settings, lowerings, meshes."""

from .fault import Fault

FAULTS = (
    # ---- config, counters, dtypes, source_lines --------------------------------------------------
    Fault(
        "spmd_core/config.py",
        "leaving an inner strict() block also ends the outer one",
        "        config.strict = before",
        "        config.strict = False",
    ),
    Fault(
        "spmd_core/counters.py",
        "programs(since=...) lists every program when none is new",
        "return tuple(_programs[-new:]) if new > 0 else ()",
        "return tuple(_programs[-new:])",
    ),
    # ---- ops -------------------------------------------------------------------------------------
    Fault(
        "spmd_core/ops/reduce.py",
        "var(correction=0) takes the default correction of 1",
        "(1 if correction is None else correction)",
        "(correction or 1)",
    ),
    Fault(
        "spmd_core/ops/matmul.py",
        "linear's weight gradient is transposed, then reshaped",
        "_contract_leading(ctx, grad_outputs, jnp.conj(x))",
        "_contract_leading(ctx, jnp.conj(x), grad_outputs)",
    ),
    Fault(
        "spmd_core/ops/softmax.py",
        "softmax's backward always sums over the last dim",
        "jnp.sum(grad * output, axis=reduced_dims(last, grad.ndim), keepdims=True)",
        "jnp.sum(grad * output, axis=reduced_dims(-1, grad.ndim), keepdims=True)",
    ),
    Fault(
        "spmd_core/ops/kernels/flash.py",
        "online softmax: earlier blocks of keys are not rescaled",
        "out = out_before * shrink[..., None] + attend(i, j, weights)",
        "out = out_before + attend(i, j, weights)",
    ),
    Fault(
        "spmd_core/ops/collective.py",
        "an all-reduce over several axes covers the first one only",
        "partial(_REDUCTIONS[op], axis_name=tuple(axes))",
        "partial(_REDUCTIONS[op], axis_name=tuple(axes)[:1])",
    ),
    Fault(
        "spmd_core/ops/comparison.py",
        "comparisons convert the second operand to the first one's dtype",
        "dtype = result_dtype(a, b)",
        "dtype = a.dtype",
    ),
    Fault(
        "spmd_core/ops/scatter.py",
        "index_put drops writes at negative indices",
        'return _write(x, key, values, "add" if accumulate else "set", wrap=True)',
        'return _write(x, key, values, "add" if accumulate else "set")',
    ),
    Fault(
        "spmd_core/ops/optimizer.py",
        "Adam's second bias correction stays that of the first step",
        "root = jnp.sqrt(second).astype(compute)",
        "root = jnp.sqrt(1 - b2).astype(compute)",
    ),
    Fault(
        "spmd_core/ops/kernels/bias_correction.py",
        "on TPUs a step's count is not a factor of the logarithm",
        "-jnp.expm1(count.astype(np.float32) * log)",
        "-jnp.expm1(log)",
    ),
    Fault(
        "spmd_core/ops/loss.py",
        "nll_loss's mean ignores class weights and ignore_index",
        "total = total / total_weight",
        "total = total / losses.size",
    ),
    Fault(
        "spmd_core/ops/sort.py",
        "a descending sort reverses the order of equal elements",
        "        keys, positions = lax.rev(keys, [x.ndim - 1]), lax.rev(positions, [x.ndim - 1])\n"
        "    keys, positions = lax.sort(",
        "        pass\n    keys, positions = lax.sort(",
    ),
    Fault(
        "spmd_core/ops/kernels/windows.py",
        "over split dims, dilate() puts its zeros in front of the elements",
        "[(0, step - 1) if d == dim + 1 else (0, 0)",
        "[(step - 1, 0) if d == dim + 1 else (0, 0)",
    ),
    Fault(
        "spmd_core/ops/kernels/channel_sums.py",
        "padded elements of split images count in their variance",
        "deviation if own is None else jnp.where(own, deviation, 0)",
        "deviation",
    ),
    Fault(
        "spmd_core/ops/mean_pool.py",
        "avg_pool in ceil mode counts elements beyond the padding",
        "last = np.minimum(first + kernel[d], size + padding[d])",
        "last = first + kernel[d]",
    ),
    Fault(
        "spmd_core/ops/kernels/ring.py",
        "a ring's devices keep the chunks that they have",
        "[min(chunk, 2 * self.size - 1 - chunk) for chunk in chunks]",
        "[chunk // 2 for chunk in chunks]",
    ),
    Fault(
        "spmd_core/ops/kernels/ring.py",
        "keys of devices before and behind are taken for each other",
        "jnp.where(source < self._index(), 0, 1)",
        "jnp.where(source < self._index(), 1, 0)",
    ),
    # ---- sharding --------------------------------------------------------------------------------
    Fault(
        "spmd_core/sharding/sharding.py",
        "a block that is all padding starts behind the tensor's end",
        "slice(min(index * block, size), min((index + 1) * block, size))",
        "slice(index * block, min((index + 1) * block, size))",
    ),
    Fault(
        "spmd_core/sharding/sharding.py",
        "of several axes that split one dim, the first counts as the minor one",
        "            for axis in axes:\n",
        "            for axis in reversed(axes):\n",
    ),
    Fault(
        "spmd_core/sharding/partition_spec.py",
        "can_apply accepts tensors with more dims than the spec",
        "return len(self.partition_spec) == _rank_of(tensor)",
        "return len(self.partition_spec) <= _rank_of(tensor)",
    ),
    Fault(
        "spmd_core/sharding/mesh.py",
        "the global mesh wins over the one that the caller gives",
        "chosen = get_global_mesh() if mesh is None else mesh",
        "chosen = get_global_mesh() or mesh",
    ),
    Fault(
        "spmd_core/sharding/xla_text.py",
        "an iota's T(...) is read as the inverse transpose",
        "return numbers.transpose(tuple(order)).reshape(tuple(dims))",
        "return numbers.transpose(tuple(np.argsort(order))).reshape(tuple(dims))",
    ),
)
