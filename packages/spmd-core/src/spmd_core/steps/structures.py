"""Maps nested structures of tensors: to the device, to the host, and to a file."""

import copy
import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import IO, Any

import numpy as np
import torch

from spmd_core import files, releases, source_lines
from spmd_core.arguments import checked, require_kind
from spmd_core.errors import SpmdError
from spmd_core.marks import process_data
from spmd_core.marks.marking import mark_sharding, start_upload
from spmd_core.runtime import processes, watch
from spmd_core.sharding.partition_spec import ShardingSpec
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_multihost_utils = releases.jax_module("jax.experimental.multihost_utils", "process_allgather")


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in it.

    Looks into mappings, lists, tuples, named tuples, sets and dataclasses, and rebuilds each as its
    own type; returns everything else unchanged.

    Example:
        >>> map_tensors({"x": [torch.ones(2), "name"]}, lambda tensor: tensor.sum().item())
        {'x': [2.0, 'name']}
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return with_values(value, {key: map_tensors(item, function) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not dataclasses.replace, which runs __init__: it may take other arguments.
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, map_tensors(getattr(value, field.name), function))
        return clone
    return value


def refuse_iterator(name: str, data: object) -> None:
    """Raises TypeError for an iterator, whose tensors `map_tensors` would not see."""
    if isinstance(data, Iterator):
        raise TypeError(
            f"{name} is a tensor, or tensors in lists, tuples, dicts and dataclasses; got an "
            f"iterator of type {type(data).__name__}. Write list({name})."
        )


def with_values(mapping: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other items; `items` itself if the type is not mutable."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    # Copied, to keep a subclass's attributes, such as the `_metadata` of a state dict.
    clone = copy.copy(mapping)
    clone.update(items)
    return clone


def to_cpu(data: Any) -> Any:
    """The same structure with every device tensor as a CPU tensor. Cuts, and waits for the device.

    A tensor that occurs several times stays one tensor: tied weights are read, and saved, once.
    Parameters stay parameters, and leaves keep `requires_grad`. Each of several processes must call
    this function, as all take part in gathering; all get the whole values. TypeError for an
    iterator.
    """
    refuse_iterator("data", data)
    moved: dict[tuple[int, type, bool], torch.Tensor] = {}

    def down(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, XLAShardedTensor):
            return t
        # By handle: for each name of a tied weight, a state dict holds another tensor object over
        # the same handle.
        wants_grad = t.requires_grad and t.is_leaf
        key = (
            id(t._handle),
            torch.nn.Parameter if isinstance(t, torch.nn.Parameter) else torch.Tensor,
            wants_grad,
        )
        if key not in moved:
            host = t.detach().cpu()
            moved[key] = (
                torch.nn.Parameter(host, t.requires_grad)
                if key[1] is torch.nn.Parameter
                else host.requires_grad_(wants_grad)
            )
        return moved[key]

    return map_tensors(data, down)


def send_to_device(data: Any, input_sharding: ShardingSpec | None = None) -> Any:
    """The same structure with every tensor on the device, sharded as `input_sharding` says.

    A tensor with fewer dims than the spec takes the spec's first entries (1-D labels beside 4-D
    images take the entry of the batch dim); one with more dims is not split along the others; one
    without dims is not marked. Starts the upload of marked tensors; others are uploaded when a
    program needs them. Does not wait for the device.

    With `input_sharding.minibatch` under several processes, each gives its part of the same
    tensors, those with dims: see `from_process_local`. A tensor that is on the device already is
    returned unchanged.

    Raises:
        NotInSpmdModeError: a sharding is given outside of SPMD mode.
        TypeError: `input_sharding` is no ShardingSpec, or `data` an iterator.
        DataError, MeshError, ProcessError: see `from_process_local`.
    """
    refuse_iterator("data", data)
    if input_sharding is not None:
        write = "ShardingSpec(mesh, partition_spec)"
        require_kind("input_sharding", input_sharding, ShardingSpec, write=write)
    if input_sharding is not None and input_sharding.minibatch and processes.process_count() > 1:
        return _send_parts(data, input_sharding)

    def up(t: torch.Tensor) -> torch.Tensor:
        moved = t.to(XLA_DEVICE)
        if input_sharding is None or t.dim() == 0:
            return moved
        return start_upload(mark_sharding(moved, _fitted(input_sharding, t)))

    return map_tensors(data, up)


def _send_parts(data: Any, spec: ShardingSpec) -> Any:
    parts: list[tuple[str, torch.Tensor, ShardingSpec]] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.dim() and t.device.type == "cpu":
            parts.append((f"tensor {len(parts)}", t, _fitted(spec, t)))
        return t

    map_tensors(data, note)
    process_data.check_alike(parts)

    def up(t: torch.Tensor) -> torch.Tensor:
        if t.dim() and t.device.type == "cpu":
            return process_data.global_tensor(t, _fitted(spec, t))
        return t.to(XLA_DEVICE)

    return map_tensors(data, up)


def _fitted(spec: ShardingSpec, t: torch.Tensor) -> ShardingSpec:
    """The spec without the entries for which the tensor has no dims."""
    return dataclasses.replace(spec, partition_spec=tuple(spec.partition_spec)[: t.dim()])


@checked()
def save(data: Any, path: str | os.PathLike[str] | IO[bytes], *, master_only: bool = True) -> None:
    """`torch.save` of the structure with every device tensor on the CPU.

    `torch.load(path, weights_only=True)` reads the file in any process. Each of several processes
    must call this function, as all take part in gathering; it returns when the file is written.
    It is written under another name first: at any moment, `path` is the earlier file or the whole
    new one, and the new one is on the disk when this returns.

    Args:
        data: any structure that `map_tensors` looks into.
        path: a path or a binary file.
        master_only: whether only process 0 writes; else each process writes to its own `path`.

    Raises:
        TypeError: `path` is neither a path nor a file, or the data holds what has no pickle.
        OSError: the path is no regular file, or cannot be written; the earlier file stays.
        SpmdError: another process could not write its file. The process that could not write raises
            its own error.
    """
    require_target("path", path)
    host = to_cpu(data)
    error: Exception | None = None
    if processes.is_master() or not master_only:
        try:
            write(host, path)
        except Exception as raised:
            error = raised
    raise_together(error)


def require_target(name: str, path: object) -> None:
    """Raises TypeError for an argument that is neither a path nor a binary file."""
    if not hasattr(path, "write") or isinstance(path, io.TextIOBase):
        require_kind(name, path, str, os.PathLike, write="a path, or a file opened with 'wb'")


def write(host: Any, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """`torch.save` of tensors on the CPU: into a file that is complete or unchanged; see `save`."""
    try:
        if isinstance(path, str | os.PathLike):
            with files.replacing(path) as scratch:
                torch.save(host, scratch)
        else:
            torch.save(host, path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle raises them
        raise TypeError(
            "what is saved has a pickle: tensors, numbers, texts, and dicts, lists and objects of "
            f"them; got something else: {error}. Save a module's and an optimizer's state_dict()."
        ) from error


def raise_together(error: Exception | None, *, action: str = "write") -> None:
    """Ends an action of several processes: none returns before all have called this.

    Args:
        error: this process's own error, which is raised here; None if it has none.
        action: what they did with files, for the message: a verb.

    Raises:
        SpmdError: another process has an error, and this one has none.
    """
    if processes.process_count() > 1:
        everyone = tuple(range(processes.process_count()))
        watch.note_transfer(f"end of a {action}", source_lines.user_line(), everyone)
        # Also in a process that failed, as the others wait here.
        failed = np.flatnonzero(_multihost_utils.process_allgather(np.array(error is not None)))
        if failed.size and error is None:
            raise SpmdError(
                f"every process that {action}s must succeed; process {failed.tolist()} could not "
                f"{action} its file. Look at its own error."
            )
    if error is not None:
        raise error
