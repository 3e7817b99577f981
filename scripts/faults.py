"""The faults that `scripts/mutation.py` plants, one at a time: what a tired programmer writes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong edit.

    Attributes:
        file: below the sources, such as `spmd_core/graph/storage.py`.
        what: what is wrong then, in at most 70 characters.
        old: a text that occurs exactly once in the file.
        new: what stands in its place.
    """

    file: str
    what: str
    old: str
    new: str


# By folder, from the lowest layer up; the folders of one layer in the order of their names.
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
        "jnp.sum(grad * output, axis=reduced_dims(dim, grad.ndim), keepdims=True)",
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
        "jnp.sqrt(1 - b2**count)",
        "jnp.sqrt(1 - b2)",
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
    # ---- graph -----------------------------------------------------------------------------------
    Fault(
        "spmd_core/graph/storage.py",
        "a view that was read once never sees a later write",
        "        if self.version == version:",
        "        if self.version >= 0:",
    ),
    Fault(
        "spmd_core/graph/storage.py",
        "a write of computed or host data does not raise the version",
        "        self.version += 1",
        "        self.version += value.data is None",
    ),
    Fault(
        "spmd_core/graph/repetition.py",
        "sums over the microsteps of a step are taken for steps of a loop",
        "if readers[earlier, index] > 1 and",
        "if readers[earlier, index] > 0 and",
    ),
    Fault(
        "spmd_core/graph/storage.py",
        "a cut's result does not become the committed value",
        "            self.committed = value\n            self.recorder = None\n",
        "            self.recorder = None\n",
    ),
    Fault(
        "spmd_core/graph/storage.py",
        "the offset of a dtype view of a view scales the wrong way",
        "base_offset * self.scale[0] // self.scale[1]",
        "base_offset * self.scale[1] // self.scale[0]",
    ),
    Fault(
        "spmd_core/graph/values.py",
        "computed values keep their inputs, so their memory is not freed",
        "self.entry, self.inputs, self.numbers = None, (), ()",
        "self.entry, self.numbers = None, ()",
    ),
    # ---- runtime ---------------------------------------------------------------------------------
    Fault(
        "spmd_core/runtime/buffers.py",
        "an uneven tensor's last block is padded at its beginning",
        "np.pad(block, [(0, (b - a) - have) for",
        "np.pad(block, [((b - a) - have, 0) for",
    ),
    Fault(
        "spmd_core/runtime/in_flight.py",
        "beyond the in-flight limit nothing waits for the oldest program",
        "        while len(self._queue) > limit:\n            self._wait_for_oldest()",
        "        while len(self._queue) > limit:\n            self._queue.popleft()",
    ),
    Fault(
        "spmd_core/runtime/jax_sharding.py",
        "jax's mesh has the devices in ascending order, not the mesh's",
        "np.array([all_devices[i] for i in device_ids], dtype=object)",
        "np.array([all_devices[i] for i in sorted(device_ids)], dtype=object)",
    ),
    Fault(
        "spmd_core/runtime/jax_sharding.py",
        "two meshes in one program: parts of an axis in the wrong order",
        "sorted(self._axis_at.items(), reverse=True)",
        "sorted(self._axis_at.items())",
    ),
    Fault(
        "spmd_core/runtime/hybrid_mesh.py",
        "simulated slices take every n-th device, not consecutive ones",
        "devices[i * size : (i + 1) * size]",
        "devices[i::num_slices]",
    ),
    # ---- program ---------------------------------------------------------------------------------
    Fault(
        "spmd_core/program/index_ranges.py",
        "a check of a wider range counts for a narrower one",
        "wanted.low <= known.low\n        and known.high <= wanted.high",
        "known.low <= wanted.low\n        and wanted.high <= known.high",
    ),
    Fault(
        "spmd_core/program/lower.py",
        "nothing is donated: updates in place need twice the memory",
        "donate_argnums=tuple(i + 1 for i in recorded.donated)",
        "donate_argnums=()",
    ),
    Fault(
        "spmd_core/program/planning.py",
        "the cache's key lacks the donated inputs: it frees held buffers",
        "return compile_cache.get(self.key, self",
        "return compile_cache.get(self.key._replace(donated=()), self",
    ),
    Fault(
        "spmd_core/program/fold.py",
        "inputs keep the padding of their shards inside the program",
        "        array = jax.lax.slice(array, (0,) * array.ndim, shape)\n        return self",
        "        return self",
    ),
    Fault(
        "spmd_core/program/lower.py",
        "results lie where the partitioner likes, not as they are marked",
        "out_shardings=(out_shardings, fold.flag.out_sharding)",
        "out_shardings=(None, fold.flag.out_sharding)",
    ),
    Fault(
        "spmd_core/program/execution.py",
        "a failed program's tensors are not left to whoever reads them",
        "        for storage in live:\n            storage.fail()\n        raise error",
        "        raise error",
    ),
    Fault(
        "spmd_core/program/execution.py",
        "an interrupted cut loses the pending updates in place",
        "            except BaseException:  # an interruption: everything stays pending\n"
        "                _request(live)\n"
        "                raise",
        "            except BaseException:  # an interruption: everything stays pending\n"
        "                raise",
    ),
    Fault(
        "spmd_core/program/execution.py",
        "sync() swallows the error of a failed program",
        "        raise error\n    counters.count",
        "        return\n    counters.count",
    ),
    Fault(
        "spmd_core/program/regions.py",
        "in a manual region every device draws the same random numbers",
        "folded = [jax.random.fold_in(k, lax.axis_index(_axes(manual))) for k in keys]",
        "folded = list(keys)",
    ),
    Fault(
        "spmd_core/program/passes/batch_sums.py",
        "gradients are summed over the batch, and not over split sequences",
        "return [((*given, *sequence), sequence)]",
        "return [(given, ())]",
    ),
    Fault(
        "spmd_core/program/ir.py",
        "a rewriter's replacement counts for nothing: passes add what nobody reads",
        "self._now[value] = by",
        "pass",
    ),
    Fault(
        "spmd_core/program/passes/recorded_order.py",
        "products wait for what an earlier one has waited for",
        "        self._made = []\n        if not late",
        "        if not late",
    ),
    Fault(
        "spmd_core/program/passes/paced_gradients.py",
        "the second run of a block waits for all gradients",
        "half = len(self._made) // 2",
        "half = len(self._made)",
    ),
    Fault(
        "spmd_core/program/passes/exact_values.py",
        "what is compared by way of a view is stored behind the view alone",
        "elif source is not None:",
        "elif False:",
    ),
    Fault(
        "spmd_core/program/dim_rules.py",
        "a product with what was reduced over its dim counts as a sum of parts",
        "value.reduced = before | (",
        "value.reduced = set() | (",
    ),
    Fault(
        "spmd_core/program/passes/refined_marks.py",
        "a mark goes that a coarser one follows",
        "axes[: len(first)] == first",
        "first[: len(axes)] == axes",
    ),
    Fault(
        "spmd_core/program/passes/image_layouts.py",
        "convolutions do not know how their images are split",
        "return graph.with_hints(hints)",
        "return graph",
    ),
    Fault(
        "spmd_core/program/passes/lookups.py",
        "lookups are left to the partitioner",
        "return graph.with_hints(hints)",
        "return graph",
    ),
    Fault(
        "spmd_core/program/passes/late_copies.py",
        "what comes back from the host waits for nothing",
        "                operands = [copied]\n",
        "                pass\n",
    ),
    Fault(
        "spmd_core/program/passes/index_checks.py",
        "the programs check no index",
        "    if not checks:\n",
        "    if checks:\n",
    ),
    Fault(
        "spmd_core/program/passes/replicated_values.py",
        "a program that the partitioner makes invalid keeps its marks",
        "if target.replicated_part is not Replicated.EVERYTHING:",
        "if True:",
    ),
    # ---- tensor ----------------------------------------------------------------------------------
    Fault(
        "spmd_core/tensor/shards.py",
        "local_shards takes a device's number for its place in the mesh",
        "        where = positions[device]",
        "        where = device",
    ),
    Fault(
        "spmd_core/tensor/sharded_tensor.py",
        "a frozen parameter comes back from an older file trainable",
        "    return torch.nn.Parameter(data.to(XLA_DEVICE), requires_grad)",
        "    return torch.nn.Parameter(data.to(XLA_DEVICE), True)",
    ),
    # ---- recording -------------------------------------------------------------------------------
    Fault(
        "spmd_core/recording/calls.py",
        "a number is part of the key too: each new value compiles again",
        "                key.append(kind)\n",
        "                key.append((kind, a))\n",
    ),
    Fault(
        "spmd_core/recording/calls.py",
        "the default dtype is missing from the key of a call",
        "key: list[Any] = [call, _default_dtype()]",
        "key: list[Any] = [call, torch.float32]",
    ),
    Fault(
        "spmd_core/recording/writes.py",
        "a write through x.expand(...)[i] goes through the repeated elements",
        "overlaps(v.spec.shape, v.spec.strides) for v in handle.chain()",
        "overlaps(v.spec.shape, v.spec.strides) for v in (handle,)",
    ),
    Fault(
        "spmd_core/recording/in_place.py",
        "partially overlapping operands of an update in place are accepted",
        "                        refuse_overlap(func, args, kwargs)\n"
        "                elif a.__class__ is list",
        "                        pass\n                elif a.__class__ is list",
    ),
    Fault(
        "spmd_core/recording/in_place.py",
        "no lock: two threads that update one tensor lose updates",
        "        with lock:\n            is_input = False",
        "        if handle is not None:\n            is_input = False",
    ),
    Fault(
        "spmd_core/recording/cpu_kernels.py",
        "the first random call of a shape also draws for its check",
        "stack.enter_context(torch.random.fork_rng(devices=[]))",
        "pass",
    ),
    # ---- debugging -------------------------------------------------------------------------------
    Fault(
        "spmd_core/debugging/hlo_text.py",
        "a collective in a loop counts once",
        'return None if length is None else length + (role == "condition")',
        "return 1",
    ),
    Fault(
        "spmd_core/debugging/communication.py",
        "groups name positions in the program, not device ids",
        "tuple(tuple(ids[i] for i in g) for g in positions)",
        "positions",
    ),
    Fault(
        "spmd_core/debugging/slices.py",
        "groups inside of a slice name positions in the slice",
        "            tuple(positions[number] for number in group)",
        "            group",
    ),
    Fault(
        "spmd_core/debugging/programs.py",
        "showing what is pending keeps the next sync() from computing it",
        "    live = pending()\n    if not live:",
        "    live = pending()\n    for s in live:\n        s.fail()\n    if not live:",
    ),
    # ---- dispatch --------------------------------------------------------------------------------
    Fault(
        "spmd_core/dispatch/transfer.py",
        "copy_ from the host shares the source's memory",
        "if host.data_ptr() == source.data_ptr()",
        "if not host.is_contiguous()",
    ),
    Fault(
        "spmd_core/dispatch/transfer.py",
        "zeros_like and to(dtype) do not inherit the sharding",
        'inherits = func._schema.name.split("::")[1] in _INHERITS_SHARDING',
        "inherits = func is aten.clone.default",
    ),
    Fault(
        "spmd_core/dispatch/special.py",
        "batch norm's running variance is not updated",
        "    store(mean, new_mean)\n    store(var, new_var)\n",
        "    store(mean, new_mean)\n",
    ),
    Fault(
        "spmd_core/dispatch/linalg_checks.py",
        "a determinant is negative for any number of row exchanges",
        "return 1 - 2 * (exchanges % 2)",
        "return 1 - 2 * (exchanges > 0)",
    ),
    # ---- manual ----------------------------------------------------------------------------------
    Fault(
        "spmd_core/manual/collectives.py",
        "a permute's gradient goes on along the pairs instead of back",
        '("collective_permute", (name, targets, sources)),',
        '("collective_permute", (name, sources, targets)),',
    ),
    Fault(
        "spmd_core/manual/shard_map.py",
        "the gradient of a replicated result is not divided by its copies",
        "return (grad if copies == 1 else grad / copies), None, None",
        "return grad, None, None",
    ),
    Fault(
        "spmd_core/manual/shard_map.py",
        "axis_index over several axes: the first one runs fastest",
        "return enter(positions, manual, (numbers,)).reshape(())",
        "return enter(positions, manual, (numbers[::-1],)).reshape(())",
    ),
    # ---- marks -----------------------------------------------------------------------------------
    Fault(
        "spmd_core/marks/marking.py",
        "gradients do not follow the sharding of their parameter",
        "return marked_gradient(gradient, sharding) if is_leaf else",
        "return None if is_leaf else",
    ),
    Fault(
        "spmd_core/marks/placements.py",
        "two Shard placements of one dim split it in the reverse order",
        "for axes, factor in reversed(sharding):",
        "for axes, factor in sharding:",
    ),
    Fault(
        "spmd_core/marks/module_rules.py",
        "a rule's expression matches at the beginning of a name only",
        "if rule.search(name)",
        "if rule.match(name)",
    ),
    # ---- torch_backend ---------------------------------------------------------------------------
    Fault(
        "spmd_core/torch_backend/autocast.py",
        "autocast also narrows float64 tensors",
        "\n            and tree.dtype is not torch.float64\n",
        "\n",
    ),
    Fault(
        "spmd_core/torch_backend/registration.py",
        "a loaded optimizer state is replicated",
        "                and handle.sharding is None\n",
        "                and handle.sharding is not None\n",
    ),
    # ---- modules ---------------------------------------------------------------------------------
    Fault(
        "spmd_core/program/reductions.py",
        "gradients are not summed over the other axes of the batch",
        "return lax.psum(total, over) if over else total",
        "return total",
    ),
    Fault(
        "spmd_core/program/passes/batch_sums.py",
        "of gradients that are added up, only the last part is reduced",
        "terms = [found.pop(key) for key in [*found] if set(key) <= set(marks)]",
        "terms = [found.pop(key) for key in [*found] if set(key) <= set(marks)][-1:]",
    ),
    Fault(
        "spmd_core/program/partial_sums.py",
        "each device adds the bias of a row-parallel layer",
        "jnp.where(_part(reduction) == 0, own",
        "jnp.where(_part(reduction) >= 0, own",
    ),
    Fault(
        "spmd_core/program/partial_sums.py",
        "each device looks all rows of a split table up",
        "found = (own >= 0) & (own < table.shape[0])",
        "found = own < table.shape[0]",
    ),
    Fault(
        "spmd_core/program/passes/narrow_gathers.py",
        "what a block uses in two dtypes is gathered in both",
        "if len(uses) > 1 or",
        "if",
    ),
    Fault(
        "spmd_core/modules/parallel_styles.py",
        "what is gathered for a layer is kept from forward to backward",
        "if over.reshards and not isinstance",
        "if not over.reshards and not isinstance",
    ),
    Fault(
        "spmd_core/modules/parallel_styles.py",
        "gradients of a column-parallel layer's input are not reduced as a sum",
        "of_input = over.layout(style.input_layouts[0], is_sum=True)",
        "of_input = over.layout(style.input_layouts[0])",
    ),
    Fault(
        "spmd_core/modules/fsdp_unit.py",
        "by default gathered parameters are kept from forward to backward",
        "not self.reshard_after_forward or self.inside_checkpoint",
        "self.reshard_after_forward or self.inside_checkpoint",
    ),
    Fault(
        "spmd_core/modules/regather.py",
        "backward after an update of the parameters is silently wrong",
        "if tensor._version != version:",
        "if tensor._version < version:",
    ),
    Fault(
        "spmd_core/modules/wrap_policies.py",
        "parameters of inner units count for the outer one again",
        "and self.policy(module, False, num_params - num_wrapped)",
        "and self.policy(module, False, num_params)",
    ),
    Fault(
        "spmd_core/modules/checkpointing.py",
        "a checkpoint's second run attends to whole sequences",
        "self._split = split_sequences.current.get()",
        "self._split = None",
    ),
    Fault(
        "spmd_core/modules/linear_cross_entropy.py",
        "targets other than ignore_index are ignored",
        "used = labels != ignore_index",
        "used = labels != -100",
    ),
    # ---- steps -----------------------------------------------------------------------------------
    Fault(
        "spmd_core/steps/closures.py",
        "asynchronous closures see values of later steps",
        "    copied = t.detach().clone()",
        "    copied = t.detach()",
    ),
    Fault(
        "spmd_core/steps/structures.py",
        "to_cpu reads tied weights of a state dict once per name",
        "            id(t._handle),",
        "            id(t),",
    ),
    Fault(
        "spmd_core/steps/weight_loading.py",
        "weights of 8 bits are loaded without their scale",
        "return min(source.itemsize, target.itemsize) > 1",
        "return True",
    ),
    # ---- spmd_data -------------------------------------------------------------------------------
    Fault(
        "spmd_data/loader.py",
        "batches_per_execution=2: an odd last batch's step is not sent",
        "            if self._num_unsynced and self._batches_per_execution is not None:\n"
        "                self._sync()\n"
        "            self._position.end()\n",
        "            self._position.end()\n",
    ),
    Fault(
        "spmd_data/matching.py",
        "a tensor with fewer dims than the spec takes its last entries",
        "entries = tuple(spec.partition_spec)[:ndim]",
        "entries = tuple(spec.partition_spec)[-ndim:]",
    ),
    Fault(
        "spmd_data/sources.py",
        "a resumed epoch passes over one batch too few",
        'self._stream.num_skipped = state["batches"]',
        'self._stream.num_skipped = max(0, state["batches"] - 1)',
    ),
    Fault(
        "spmd_data/pipeline.py",
        "a generator is asked for the next batch while its last one is being copied",
        "if self._reuses_memory and not all(slot.is_ready for slot in self._slots):",
        "if False:",
    ),
)
