"""`save_safetensors`: a module's tensors as safetensors files, one tensor in host memory at a time.

The files are written here, and not by the package safetensors, which takes all tensors of a file
at once. The format: https://huggingface.co/docs/safetensors
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from spmd_core import dtypes, files, progress
from spmd_core.arguments import require_int, require_kind
from spmd_core.errors import DataError
from spmd_core.files import Unfinished
from spmd_core.runtime import processes
from spmd_core.steps import weight_checksums
from spmd_core.steps.structures import raise_together
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# The names that transformers looks for in a folder.
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PART_FILE = "model-{:05d}-of-{:05d}.safetensors"
_PART_FILES = "model-*-of-*.safetensors"

# The format's names of dtypes.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

Tensors = nn.Module | Mapping[str, torch.Tensor]


def save_safetensors(
    module: Tensors,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 2**30,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a module's parameters and persistent buffers to a folder, in Hugging Face's layout.

    The folder gets `model.safetensors`, or, if that would be larger than `max_shard_bytes`, parts
    `model-00001-of-0000N.safetensors` and their index, `model.safetensors.index.json`. The files
    hold whole tensors, whatever the mesh. The host holds one tensor at a time. A tensor with
    several names, such as a tied weight, is written once, under its first name.

    All files are written under temporary names first, so that a save that fails leaves an earlier
    one as it was; one that succeeds replaces it, and is on the disk. Each file carries checksums in
    its header's metadata, which `load_safetensors` compares. Cuts, and waits for the device. Each
    of several processes must call this function, as all take part in gathering; process 0 writes,
    and all return when the files are in place.

    Args:
        module: a module on any device, or a state dict: tensors of any shape by name.
        folder: is made if it is missing.
        max_shard_bytes: the largest part, in bytes; a tensor that is larger is a part of its own.
        metadata: text by name for each file's header; None: `{"format": "pt"}`, which transformers
            asks for.

    Raises:
        TypeError: `module` is neither a module nor a state dict, or `folder` is no path.
        OSError: a file could not be written, for instance as the disk is full.
        DataError: something in the state dict is no tensor, or has a dtype that the format lacks.
        ValueError: `max_shard_bytes` is less than 1.
        SpmdError: process 0 could not write; in the other processes.

    Example:
        >>> import tempfile, spmd_core as spmd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     spmd.save_safetensors(nn.Linear(2, 3), folder)
        ...     sorted(os.listdir(folder))
        ['model.safetensors']
    """
    if require_int("max_shard_bytes", max_shard_bytes) < 1:
        raise ValueError(
            f"a part holds at least a byte; got max_shard_bytes={max_shard_bytes}. "
            "Leave it out, or pass for instance 2**30."
        )
    require_kind("folder", folder, str, os.PathLike, write="the folder's path")
    tensors = _first_names(named_tensors(module))
    _check_dtypes(tensors)
    parts = _parts(tensors, max_shard_bytes)
    header_text = {"format": "pt"} if metadata is None else dict(metadata)
    target, writes = Path(folder).expanduser(), processes.is_master()
    unfinished: list[Unfinished] = []  # the files that are written so far
    error = _made(target) if writes else None
    total = sum(tensor.nbytes for tensor in tensors.values())
    with progress.shown(f"saving {target}", total_bytes=total) as advance:
        for number, part in enumerate(parts, start=1):
            name = MODEL_FILE if len(parts) == 1 else _PART_FILE.format(number, len(parts))
            if writes and error is None:
                error = _write(target / name, part, header_text, unfinished)
            elif processes.process_count() > 1:
                # The process that writes needs the others to gather, and they need it, if it
                # failed.
                _gather(_on_host(part))
            advance(sum(tensor.nbytes for tensor in part.values()))
    if writes and error is None:
        index = _index(parts) if len(parts) > 1 else None
        with files.one_at_a_time(target):  # else the parts of two saves could be mixed
            error = _put_in_place(target, unfinished, index)
    if error is not None:
        for file in unfinished:
            file.discard()
        failed = OSError(
            f"weights must fit on the disk, in a folder that may be written; {target} could not be "
            f"written: {error}. An earlier save there is as it was. Free space, or name another "
            "folder."
        )
        failed.__cause__ = error
        raise_together(failed)
    raise_together(None)


def named_tensors(module: Tensors) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers by the names of its state dict.

    Raises:
        TypeError: neither a module nor a state dict.
        DataError: the state dict has something else, such as a module's extra state.
    """
    require_kind("module", module, nn.Module, Mapping, write="a module, or its state dict")
    found: dict[str, Any] = (
        module.state_dict(keep_vars=True) if isinstance(module, nn.Module) else dict(module)
    )
    others = {n: type(t).__name__ for n, t in found.items() if not isinstance(t, torch.Tensor)}
    if others:
        raise DataError(
            f"safetensors holds tensors alone; got {_listed(others)}. "
            "Leave these out, and keep them in a file of their own."
        )
    return found


def identity(tensor: torch.Tensor) -> Any:
    """What two names of one tensor have in common."""
    if isinstance(tensor, XLAShardedTensor):
        return id(tensor._handle)
    if not tensor.numel():
        return id(tensor)  # has no memory that others could share
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(identity(tensor), name)
    return {name: tensors[name] for name in first.values()}


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    unknown = {name: t.dtype for name, t in tensors.items() if t.dtype not in DTYPE_NAMES}
    if unknown:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise DataError(
            f"safetensors holds tensors of the dtypes {known}; got {_listed(unknown)}. "
            "Convert them first with .to(dtype)."
        )


def _listed(items: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!r} ({what})" for name, what in items.items())


def _parts(
    tensors: Mapping[str, torch.Tensor], max_shard_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """The tensors in parts of at most so many bytes, in their order."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    free = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > free and parts[-1]:
            parts.append({})
            free = max_shard_bytes
        parts[-1][name] = tensor
        free -= tensor.nbytes
    return parts


def _made(folder: Path) -> OSError | None:
    """Makes the folder; returns the error if it could not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return None


def _write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    unfinished: list[Unfinished],
) -> OSError | None:
    """Writes one file under another name, and adds it to `unfinished`.

    Returns the error if it could not, having gathered every tensor.
    """
    # Wide elements first: each tensor then begins at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    remaining = _on_host(ordered)
    try:
        unfinished.append(Unfinished(path))
        sums = weight_checksums.Sums()
        with unfinished[-1].path.open("wb") as file:
            header = _header(ordered, metadata)
            file.write(len(header).to_bytes(8, "little") + header)
            for host in remaining:
                data = dtypes.numpy_view(host.reshape(-1)).view(np.uint8).data
                sums.add(data)
                file.write(data)
                del host, data  # before the next one is gathered
            file.seek(8 + _place_of_checksums(header))
            file.write(sums.text(header).encode())
        unfinished[-1].sync()
    except OSError as error:
        if processes.process_count() > 1:
            _gather(remaining)
        return error
    return None


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header, with room for the checksums, which are known when the data is written."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    checksums = {weight_checksums.NAME: weight_checksums.placeholder(num_bytes)}
    header: dict[str, Any] = {
        "__metadata__": checksums | dict(metadata) | checksums | weight_checksums.WITNESS
    }
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _place_of_checksums(header: bytes) -> int:
    """Where the text of the checksums begins: the first one in the header."""
    return header.index(b'":"') + 3


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each tensor on the CPU, contiguous. All processes must take all of them."""
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous()


def _gather(remaining: Iterator[torch.Tensor]) -> None:
    """Takes part in gathering tensors that another process writes, or that nobody can write."""
    for _ in remaining:
        pass


def _index(parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Which part holds which tensor, as transformers reads it."""
    return {
        "metadata": {"total_size": sum(t.nbytes for part in parts for t in part.values())},
        "weight_map": {
            name: _PART_FILE.format(number, len(parts))
            for number, part in enumerate(parts, start=1)
            for name in part
        },
    }


def _put_in_place(
    folder: Path, written: list[Unfinished], index: Mapping[str, Any] | None
) -> OSError | None:
    """Gives complete files their names, and removes an earlier save's other files.

    Returns the error if it could not.
    """
    others: list[Unfinished] = []
    try:
        obsolete = {folder / INDEX_FILE, *folder.glob(_PART_FILES)}
        obsolete -= {folder / file.target.name for file in written}
        if index is not None:
            others.append(Unfinished(folder / INDEX_FILE))
            others[0].path.write_text(json.dumps(index, indent=2) + "\n")
            others[0].sync()
            # What names the earlier files goes first: parts of two saves must not be read as one.
            (folder / INDEX_FILE).unlink(missing_ok=True)
            (folder / MODEL_FILE).unlink(missing_ok=True)
            files.sync_folder(folder)
        for file in (*written, *others):
            file.put_in_place()
        if index is not None:
            obsolete.discard(folder / INDEX_FILE)
        for other in obsolete:
            other.unlink(missing_ok=True)
        files.sync_folder(folder)
    except OSError as error:
        for file in others:
            file.discard()
        return error
    return None
