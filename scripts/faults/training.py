"""Faults of what a training script calls: marks, modules, steps, data."""

from .fault import Fault

FAULTS = (
    # ---- auto ------------------------------------------------------------------------------------
    Fault(
        "spmd_core/auto/resharding.py",
        "an all-reduce is thought to cost as little as an all-gather",
        "return self.transfer(axes, 2 * num_bytes * (n - 1) / n)",
        "return self.transfer(axes, num_bytes * (n - 1) / n)",
    ),
    Fault(
        "spmd_core/auto/groups.py",
        "the minor part of a dim that a view joins may be split",
        "        return False  # the minor part of a dim\n",
        "        return True\n",
    ),
    Fault(
        "spmd_core/auto/recorded_step.py",
        "what a recorded step wrote stays pending",
        "                if storage.committed is not None:\n",
        "                if storage.committed is None:\n",
    ),
    Fault(
        "spmd_core/auto/marked_graph.py",
        "a candidate is compiled without the marks that gradients of modules' results get",
        "            for tensor in (call.result, call.gradient):\n",
        "            for tensor in (call.result,):\n",
    ),
    Fault(
        "spmd_core/auto/mode.py",
        "state that automatic sharding has split is not marked",
        "    leaves.set_sharding(storage, sharding)\n",
        "    pass\n",
    ),
    Fault(
        "spmd_core/auto/marked_graph.py",
        "stacks of numbers are marked, which their rows cannot be",
        "if sharding.ndim and i not in self.unmarked else whole",
        "if sharding.ndim else whole",
    ),
    Fault(
        "spmd_core/auto/read_step.py",
        "the body of a loop counts once in automatic sharding, however often it runs",
        "self._node(entry, given, values[first:], (*place, i), times * steps, line)",
        "self._node(entry, given, values[first:], (*place, i), times, line)",
    ),
    Fault(
        "spmd_core/auto/region_rules.py",
        "automatic sharding splits what is inside of a manual region over the region's axes",
        "found: dict[int, int | None] = dict.fromkeys(operation.manual.axes)",
        "found: dict[int, int | None] = {}",
    ),
    Fault(
        "spmd_core/auto/candidates.py",
        "the search overrides a mark of the user",
        "        {tie: (c,) for tie, c in of_axis.items()} for of_axis in marks\n",
        "        {} for of_axis in marks\n",
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
        "spmd_core/dtypes.py",
        "weights of 8 bits are loaded without their scale",
        "return min(source.itemsize, target.itemsize) > 1",
        "return True",
    ),
    Fault(
        "spmd_core/checkpoint/staging.py",
        "the next step takes over the buffers that a checkpoint is written from",
        "return (memory if is_cpu else Views()).array(",
        "return Views().array(",
    ),
    Fault(
        "spmd_core/checkpoint/entries.py",
        "all stages of a pipeline are saved as the first one",
        "Entry(tensor, stage)",
        "Entry(tensor, 0)",
    ),
    Fault(
        "spmd_core/checkpoint/blocks.py",
        "the first of the devices that hold a block writes it",
        "by_id[(start + number) % len(by_id)]",
        "by_id[0]",
    ),
    Fault(
        "spmd_core/checkpoint/manager.py",
        "steps that are to go stay",
        "            lock.remove_step(self._folder / str(step))",
        "            pass",
    ),
    Fault(
        "spmd_core/checkpoint/writer.py",
        "a run that lost its folder to another goes on writing there",
        "        self._lock.check()",
        "        pass",
    ),
    Fault(
        "spmd_core/checkpoint/store.py",
        "a chunk that several blocks need goes into the first one alone",
        "    for inside, into in parts:",
        "    for inside, into in parts[:1]:",
    ),
    Fault(
        "spmd_core/checkpoint/restoring.py",
        "a restore that fails has changed tensors",
        "            if check:",
        "            if False:",
    ),
    Fault(
        "spmd_core/steps/capture/guards.py",
        "a captured step does not see that a variable of a closure has changed",
        "and all(held(cell) is value for cell, value in self._cells)",
        "and True",
    ),
    Fault(
        "spmd_core/steps/capture/guards.py",
        "a captured step does not see that a parameter was frozen",
        "trained != self._parameters_trained or ",
        "",
    ),
    Fault(
        "spmd_core/steps/capture/guards.py",
        "a captured step does not see a hook at an AccumulateGrad node",
        " or self._accumulators.hooked() is not None:",
        ":",
    ),
    Fault(
        "spmd_core/steps/capture/dict_versions.py",
        "only the first half of a dict's version is compared",
        "        size = len(new) // len(self._dicts) if self._dicts else 1",
        "        size = max(len(new) // len(self._dicts) // 2, 1) if self._dicts else 1",
    ),
    Fault(
        "spmd_core/steps/capture/guards.py",
        "what a dict holds is not looked at though its version has changed",
        "            if not self._dicts[i].holds():",
        "            if False:",
    ),
    Fault(
        "spmd_core/steps/capture/versions.py",
        "a captured step overwrites state that a function has saved, unnoticed",
        "if sum(counts) == len(counts):",
        "if True:",
    ),
    # ---- dynamo, metrics -------------------------------------------------------------------------
    Fault(
        "spmd_core/dynamo/backend.py",
        "operations of a compiled graph have the line of the outermost function",
        "file, number, name = found[-1]",
        "file, number, name = found[0]",
    ),
    Fault(
        "spmd_core/metrics/utilisation.py",
        "frozen parameters count as trained ones in the model's FLOPs",
        "matrices = 4 * size.num_params + 2 * trained",
        "matrices = 6 * size.num_params",
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
    # ---- caches of layers, preemption ------------------------------------------------------------
    Fault(
        "spmd_core/modules/layer_caches.py",
        "a cache that a layer replaces in a loop is not refused",
        "        if tree != tree_before or any(a is not b for a, b in zip(leaves, before)):",
        "        if False:",
    ),
    Fault(
        "spmd_core/runtime/preemption.py",
        "a program that is asked to stop exits without a save",
        "            self._save()\n",
        "",
    ),
    Fault(
        "spmd_core/checkpoint/store.py",
        "a step's JSON is read whatever its checksum is",
        " or found.pop(_CHECKSUM, None) != _checksum(found)",
        " or found.pop(_CHECKSUM, None) is None",
    ),
)
