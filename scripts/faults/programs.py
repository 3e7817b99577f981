"""Faults of values, devices and programs: graphs, passes, the partitioner's rules."""

from .fault import Fault

FAULTS = (
    # ---- control_flow ----------------------------------------------------------------------------
    Fault(
        "spmd_core/control_flow/scans.py",
        "the loop of a scan's gradients runs in the scan's own direction",
        '"length": self.length, "reverse": not self.reverse}',
        '"length": self.length, "reverse": self.reverse}',
    ),
    Fault(
        "spmd_core/control_flow/derivatives.py",
        "after its backward a loop keeps what it has read, for as long as a loss lives",
        "        ctx.plan = None\n",
        "        pass\n",
    ),
    Fault(
        "spmd_core/control_flow/scan_loops.py",
        "a value that changes from run to run is computed from the last one",
        "                x in changing or not same",
        "                not same",
    ),
    Fault(
        "spmd_core/control_flow/operands.py",
        "random operations of nested loops draw the same numbers",
        "return around() if index is None else around() * _MIX + index",
        "return around() if index is None else index",
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
        "spmd_core/program/shared_kernels.py",
        "operations whose operands have other layouts share a kernel",
        "return entry, op.hint, op.manuals",
        "return entry, op.manuals",
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
        "spmd_core/program/passes/costly_values.py",
        "cosines are computed again in each value that reads them",
        "                if result.spec.num_elements > size:",
        "                if result.spec.num_elements < 0:",
    ),
    Fault(
        "spmd_core/program/passes/class_orders.py",
        "a loss of values of any order computes in that of transposed logits",
        "    return spec.strides[_DIM] == source.strides[-1] and others == source.strides[:-1]",
        "    return bool(others)",
    ),
    Fault(
        "spmd_core/program/passes/class_orders.py",
        "dims of one size that are exchanged count as a view in the same order",
        "view = op.source_of_elements(Elements.RESHAPED)",
        "view = op.source_of_elements(Elements.PERMUTED)",
    ),
    Fault(
        "spmd_core/program/passes/column_gathers.py",
        "columns that the major axis splits are gathered as adjacent blocks",
        "not before[1] or before[1][:-1] != after[1]",
        "not before[1] or len(before[1]) != len(after[1]) + 1",
    ),
    Fault(
        "spmd_core/program/passes/column_gathers.py",
        "a table's columns lie behind each other as whole shards",
        "return shards.swapaxes(0, 1).reshape(shard.shape[0], -1)",
        "return shards.reshape(shard.shape[0], -1)",
    ),
    Fault(
        "spmd_core/program/reductions.py",
        "a table's gradient is cut by rows where devices have its columns",
        "blocks = total.reshape(len(total), mesh.mesh_shape[axis], -1).swapaxes(0, 1)",
        "blocks = total.reshape(mesh.mesh_shape[axis], len(total), -1)",
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
        "spmd_core/program/passes/stacked_operations.py",
        "all rows of stacks take the number that is the first row's",
        "scalars.append(positions[0] if len({*positions}) == 1 else positions)",
        "scalars.append(positions[0])",
    ),
    Fault(
        "spmd_core/program/alike_operations.py",
        "operations on rows of different indices count as alike",
        "if index >= 0 and (index, count) != (own, stack.count):",
        "if index >= 0 and count != stack.count:",
    ),
    Fault(
        "spmd_core/program/repeated_runs.py",
        "an iteration that reads another value than the others is in the loop",
        "            self._keep([x == value for x in values])\n",
        "",
    ),
    Fault(
        "spmd_core/program/repeated_runs.py",
        "rows of a stack that are read in another order count as following each other",
        "if place is None or place[0] is not first[0] or place[1] != first[1] + i * step:",
        "if place is None or place[0] is not first[0]:",
    ),
    Fault(
        "spmd_core/program/repeated_loops.py",
        "a loop that goes over the layers from the last one on reads their rows from the first on",
        "index = (first + step * (self._run.length - 1), -step)",
        "index = (first, step)",
    ),
    Fault(
        "spmd_core/program/repeated_loops.py",
        "each layer of a loop has the numbers and seeds of the first one",
        "                self._scalars.append(positions)\n",
        "                self._scalars.append((positions[0],) * len(positions))\n",
    ),
    Fault(
        "spmd_core/program/kept_values.py",
        "what a loop computes with other random numbers in each layer is computed once",
        "op.scalars or op.entry.random or op.bodies",
        "op.bodies",
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
        "spmd_core/program/passes/fused_projections.py",
        "the gradient of a fused projection's weight keeps the order of devices",
        "        if value in self._ordered:\n            sections, dim = self._ordered.pop(value)",
        "        if value in self._ordered and value.op is None:\n"
        "            sections, dim = self._ordered.pop(value)",
    ),
    Fault(
        "spmd_core/program/sections.py",
        "devices that exchange sections keep what they receive in the order in which it comes",
        "return _arranged(jnp.concatenate(received, dim), self.placed, device, dim)",
        "return jnp.concatenate(received, dim)",
    ),
    Fault(
        "spmd_core/program/moved_dims.py",
        "of a stack of partial sums, the dim of the parts counts as one of the gradient",
        "before = len(entry.spec.shape) - len(part.spec.shape)",
        "before = 0",
    ),
    Fault(
        "spmd_core/program/passes/image_layouts.py",
        "convolutions do not know how their images are split",
        "return graph.with_hints(hints)",
        "return graph",
    ),
    Fault(
        "spmd_core/program/passes/attention_layouts.py",
        "attentions are left to the partitioner",
        "return graph.with_hints(hints)",
        "return graph",
    ),
    Fault(
        "spmd_core/program/passes/attention_layouts.py",
        "split sequences do not count for the layout of an attention",
        "        axes = spec[rank - 2] or ()\n",
        "        axes = ()\n",
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
    Fault(
        "spmd_core/program/initial_state.py",
        "a scale that the first step reads before its update stays a constant",
        "is_input = value not in read or is_scalar",
        "is_input = value not in read",
    ),
    Fault(
        "spmd_core/program/initial_state.py",
        "a copy of what the step only reads counts as state",
        "return owner is None or (owner in live and owner.value is not source)",
        "return True",
    ),
    Fault(
        "spmd_core/program/small_state.py",
        "a captured step keeps a stack of which it does not reach all rows",
        "                and all(s in call.reached for s in rows)\n",
        "",
    ),
    Fault(
        "spmd_core/program/small_state.py",
        "gradients and arguments of a captured step become rows",
        "if owner in call.apart or owner.committed",
        "if owner.committed",
    ),
    Fault(
        "spmd_core/program/growing_sizes.py",
        "cuts that differ in their layout count as one whose size grows",
        "len(spec.shape), None if is_free else placement))",
        "len(spec.shape), None))",
    ),
    Fault(
        "spmd_core/program/partitioner_rules.py",
        "a start out of bounds is left to the partitioner",
        "    return lax.clamp(np.zeros((), dtype), start, bound)",
        "    return start",
    ),
    Fault(
        "spmd_core/program/partitioner_rules.py",
        "what is padded with a value is padded with zeros",
        "return [jnp.where(inside, result, value)]",
        "return [result]",
    ),
    # ---- writes to rows of stacks ----------------------------------------------------------------
    Fault(
        "spmd_core/program/passes/row_writes.py",
        "a write to a row is merged also where the stack as it was is read",
        "            and users[stack] == [reader, end]\n",
        "",
    ),
    Fault(
        "spmd_core/ops/kernels/stacks.py",
        "values for indices behind a whole dim stay in the order of the row",
        "    if at == [*range(at[0], at[-1] + 1)]:",
        "    if False:",
    ),
)
