"""Faults of calls on their way into the graph: tensors, recording, dispatch, manual regions."""

from .fault import Fault

FAULTS = (
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
)
