"""Between a step of a folder of checkpoints and a safetensors or a torch file, chunk by chunk.

A file is mapped into memory and read or written through the mapping, so what is held of it is the
system's to drop. What a torch file has is read by torch's loader of weights alone.
"""

import json
import math
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from spmd_core import dtypes, files
from spmd_core.checkpoint import plain
from spmd_core.checkpoint.entries import OPTIMIZER
from spmd_core.checkpoint.manager import CheckpointManager
from spmd_core.checkpoint.plain import KIND, TENSOR, joined
from spmd_core.checkpoint.remote import Folder
from spmd_core.checkpoint.restoring import Node, check_array
from spmd_core.checkpoint.staging import Views
from spmd_core.checkpoint.store import Reader
from spmd_core.errors import CheckpointError
from spmd_core.steps.weight_saving import DTYPE_NAMES

SAFETENSORS, TORCH = (".safetensors", ".json"), (".pt", ".pth", ".bin")
"""The ends of the names of files."""

# Told how many of so many tensors are done.
Progress = Callable[[int, int], object]
# What stands for an array, and the memory that gets it.
Places = list[tuple[Node, torch.Tensor]]


def to_file(step: Folder, target: Path, *, part: str | None, progress: Progress) -> None:
    """Writes a step into a file, which replaces an earlier one when it is whole.

    Args:
        step: its folder.
        target: `.safetensors` for the tensors of one part by name; `.pt`, `.pth` or `.bin` for a
            dict of parts, which `torch.load` reads.
        part: of the state; None: `"model"` for safetensors, and all for a torch file.
        progress: called after each tensor.

    Raises:
        CheckpointError: the step is damaged, or has no such part, or what the file cannot hold.
        OSError: the file cannot be written.
    """
    reader = Reader(step)
    parts = reader.state()["parts"]
    is_torch = target.suffix in TORCH
    chosen = part if part is not None or is_torch else "model"
    if chosen is not None and chosen not in parts:
        raise CheckpointError(
            f"a part of a state goes by its name; step {step.name} in {step.parent} has no part "
            f"{chosen!r}, but {', '.join(parts)}. Name one of these by --part."
        )
    with files.replacing(target) as scratch:
        if is_torch:
            places = _torch_file(scratch, parts, [*parts] if chosen is None else [chosen])
        else:
            assert chosen is not None
            places = _safetensors_file(scratch, parts[chosen], chosen)
        for number, (node, memory) in enumerate(places, start=1):
            check_array(reader, node)
            if memory.numel():
                index = tuple(slice(0, n) for n in memory.shape)
                reader.fill(node["name"], [(index, memory)])
            progress(number, len(places))


def from_file(
    source: Path, folder: Folder, step: int, *, part: str | None, progress: Progress
) -> None:
    """Writes what a file has as a step of a folder of checkpoints.

    Args:
        source: a safetensors file, a folder or an index of these; or a torch file.
        folder: of all steps; is made if it is missing.
        step: the new one.
        part: the name that a file of tensors alone gets in the state; None: `"model"`. A torch file
            of several parts keeps their names.
        progress: called after each tensor.

    Raises:
        CheckpointError: the file cannot be read, or holds what a checkpoint cannot hold; or the
            folder has the step, or another run writes there.
        DataError: a safetensors file is missing or damaged.
        OSError: the folder cannot be written.
    """
    state = _read_torch(source) if source.suffix in TORCH else _read_safetensors(source, progress)
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        state = {part or "model": state}
    with CheckpointManager(str(folder), async_=False) as manager:
        manager._memory = Views()  # nobody changes what is mapped
        manager.save(step, state)


# --- Files that are written: everything but the tensors -------------------------------------------


def _safetensors_file(path: Path, saved: Any, part: str) -> Places:
    named: dict[str, tuple[str, Node]] = {}
    for name, node in _named("", saved):
        named.setdefault(node["name"], (name, node))  # a tied one by its first name
    if not named:
        raise CheckpointError(
            f"a safetensors file holds tensors; the part {part!r} has none by name. Name another "
            "one by --part, or convert to a torch file."
        )
    # The format allows no holes: by falling size of an element, each lies at a multiple of it.
    ordered = sorted(named.values(), key=lambda one: -_dtype(one[1]).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, node in ordered:
        dtype, start = _dtype(node), end
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"safetensors holds {', '.join(DTYPE_NAMES.values())}; got {dtype} of {name!r}. "
                "Convert to a torch file."
            )
        end += math.prod(node["shape"]) * dtype.itemsize
        offsets = [start, end]
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": node["shape"],
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
    return [
        (node, _mapped(path, node, 8 + len(text) + header[name]["data_offsets"][0]))
        for name, node in ordered
    ]


def _torch_file(path: Path, parts: Mapping[str, Any], chosen: list[str]) -> Places:
    nodes: dict[str, tuple[Node, torch.Tensor]] = {}

    def reserve(_: str, node: Node) -> torch.Tensor:
        # Memory that nothing touches takes none. A tied tensor stays one.
        made = torch.empty(node["shape"], dtype=_dtype(node))
        return nodes.setdefault(node["name"], (node, made))[1]

    state = {name: _plain(name, parts[name], parts, reserve) for name in chosen}
    with torch.serialization.skip_data():
        torch.save(state, path)
    with path.open("r+b") as file:  # else a disk that is full ends the process
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        # What was written a moment ago; it may have more than tensors.
        mapped = torch.load(path, mmap=True, weights_only=False)
    memory = {
        id(before): after
        for before, after in zip(_pytree.tree_leaves(state), _pytree.tree_leaves(mapped))
    }
    return [(node, memory[id(tensor)]) for node, tensor in nodes.values()]


def _plain(path: str, saved: Any, parts: Mapping[str, Any], unpack: plain.Unpack) -> Any:
    """A part as the `state_dict()` of a plain model or optimizer has it."""
    if not isinstance(saved, Mapping) or saved.get(KIND) != OPTIMIZER:
        return plain.decode(path, saved, unpack)
    names = [name for group in saved["groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = []
    for group in saved["groups"]:
        made = plain.decode(path, group["options"], unpack)
        made["params"] = [number[name] for name in group["params"]]
        if not all(name.isdecimal() for name in group["params"]):
            made["param_names"] = [_without_part(name, parts) for name in group["params"]]
        groups.append(made)
    state = {
        number[name]: {
            slot: plain.decode(f"{path}.{name}.{slot}", value, unpack)
            for slot, value in values.items()
        }
        for name, values in saved["state"].items()
    }
    for key, values in saved["others"]:
        state[plain.decode(path, key, unpack)] = plain.decode(path, values, unpack)
    return {"state": state, "param_groups": groups, **plain.decode(path, saved["top"], unpack)}


def _without_part(name: str, parts: Mapping[str, Any]) -> str:
    """A parameter's name in its own module."""
    part, _, rest = name.partition(".")
    return rest if part in parts and rest else name


def _named(path: str, saved: Any) -> Iterator[tuple[str, Node]]:
    """The tensors of a part of dicts by name."""
    if isinstance(saved, Mapping) and saved.get(KIND) == TENSOR:
        yield path, saved
    elif isinstance(saved, Mapping) and KIND not in saved:
        for key, value in saved.items():
            yield from _named(joined(path, key), value)


# --- Files that are read --------------------------------------------------------------------------


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            "a torch file is read if it was written by torch.save as a zip, and has tensors and "
            f"plain values alone; got {path}: {str(error).partition(chr(10))[0]} Save its "
            "state_dict() again."
        ) from error
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            "a torch file has a state_dict, or a dict of parts by name; got "
            f"{type(state).__name__} in {path}. Save a dict."
        )
    return dict(state)


def _read_safetensors(path: Path, progress: Progress) -> dict[str, Any]:
    from spmd_core.steps import weight_loading  # noqa: PLC0415 - needs an extra

    found = {}
    contents = weight_loading.contents(path)
    for number, (name, stored) in enumerate(contents.items(), start=1):
        if isinstance(stored.dtype, str):
            raise CheckpointError(
                f"dtypes are torch's; got {stored.dtype} of {name!r} in {path}. Convert it first."
            )
        stored.check([[slice(0, n) for n in stored.shape]])
        node = {"dtype": str(stored.dtype).removeprefix("torch."), "shape": stored.shape}
        found[name] = _mapped(stored.path, node, stored.offset, mode="c")
        progress(number, len(contents))
    return found


def _mapped(path: Path, node: Node, offset: int, mode: Any = "r+") -> torch.Tensor:
    """A file's bytes as a tensor, without reading them; with mode `c`, it may not be written."""
    dtype, shape = _dtype(node), tuple(node["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return dtypes.tensor_view(np.memmap(path, dtypes.to_jax(dtype), mode, offset, shape))


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = getattr(torch, node["dtype"])
    return found
