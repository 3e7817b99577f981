"""The tensors of a step that are in memory at its peak, and at its end."""

from spmd_core.auto.groups import Groups


def alive(groups: Groups) -> list[list[int]]:
    """The stored tensors at the peak of bytes, and at the end of the step."""
    step = groups.step
    stored = list(range(len(step.tensors)))  # views are stored as what they view
    for operation in step.operations:
        if operation.viewed is not None:
            stored[operation.results[0][0]] = stored[operation.viewed]
    last: dict[int, int] = {}
    for i, operation in enumerate(step.operations):
        for t, _ in operation.dims:
            last[stored[t]] = i
    end = len(step.operations)
    replaced = {step.outputs[o]: leaf for leaf, o in step.updated.items()}
    for t in step.outputs:
        if t not in replaced:
            last[stored[t]] = end
    kept = [t for t, x in enumerate(step.tensors) if x.leaf is not None]
    made = {stored[t]: i for i, o in enumerate(step.operations) for t, _ in o.results}
    born: dict[int, list[int]] = {}
    for t, i in made.items():
        # What replaces a leaf takes over its buffer; what is read at once is fused.
        if t not in replaced and step.tensors[t].leaf is None and last.get(t, i) - i > 2:
            born.setdefault(i, []).append(t)
    now: dict[int, None] = {}
    best: tuple[int, list[int]] = (0, [])
    size = 0
    for i in range(end):
        for t in born.get(i, ()):
            now[t] = None
            size += step.tensors[t].num_bytes
        if size >= best[0]:
            best = (size, list(now))
        for t in [t for t in now if last[t] == i]:
            del now[t]
            size -= step.tensors[t].num_bytes
    return [[*kept, *best[1]], [*kept, *now]]
