"""What all layers of a loop have, and is sharded alike: modules, parameters, and their state."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from spmd_core.graph.storage import Storage

_Key = tuple[int, str]


def modules(loops: Sequence[Sequence[nn.Module]]) -> dict[nn.Module, _Key]:
    """For each module of the layers, the number of its loop and its name in its layer."""
    return {
        module: (number, name)
        for number, layers in enumerate(loops)
        for layer in layers
        for name, module in layer.named_modules()
    }


def leaves(
    loops: Sequence[Sequence[nn.Module]],
    names: Mapping[Storage, str],
    owners: Sequence[Storage | None],
) -> tuple[tuple[int, ...], ...]:
    """The leaves of a step that are one in all layers: parameters, buffers, optimizer state.

    Args:
        loops: the layers of each loop.
        names: the names of tensors (`program.tensor_names`).
        owners: for each leaf its storage; None if nothing holds it any more.
    """
    keys = dict(_named(loops, names))
    found: dict[tuple[str, _Key], list[int]] = {}
    for leaf, storage in enumerate(owners):
        name = None if storage is None else names.get(storage)
        if name is not None:
            what, _, owner = name.rpartition(" of ")  # as `exp_avg of GPT.h.0.weight`
            if owner in keys:
                found.setdefault((what, keys[owner]), []).append(leaf)
    return tuple(tuple(same) for same in found.values() if len(same) > 1)


def _named(
    loops: Sequence[Sequence[nn.Module]], names: Mapping[Storage, str]
) -> Iterator[tuple[str, _Key]]:
    """The names of the layers' tensors, each with its loop and its name in its layer."""
    for number, layers in enumerate(loops):
        for layer in layers:
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                handle = getattr(tensor, "_handle", None)
                if handle is not None and handle.storage in names:
                    yield names[handle.storage], (number, name)
