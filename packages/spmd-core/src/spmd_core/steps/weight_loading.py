"""`load_safetensors`: a module's tensors from safetensors files, each device's block by itself."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd_core import dtypes, progress
from spmd_core.arguments import require_kind
from spmd_core.errors import DataError
from spmd_core.graph.storage import Storage
from spmd_core.steps import weight_checksums
from spmd_core.steps.weight_checksums import Checked
from spmd_core.steps.weight_saving import (
    DTYPE_NAMES,
    INDEX_FILE,
    MODEL_FILE,
    Tensors,
    identity,
    named_tensors,
)
from spmd_core.tensor import shards
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

try:
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError(
        "load_safetensors reads files with the package safetensors; got no such package. "
        "Run: pip install 'spmd-core[safetensors]'"
    ) from error

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Pages of a file that were read through a mapping stay in memory as long as the mapping. So a
# mapping reads at most this many bytes, or one row.
_MAPPED_BYTES = 1 << 25


class LoadedKeys(NamedTuple):
    """What did not match, as `nn.Module.load_state_dict` returns it.

    Attributes:
        missing_keys: names of the module's tensors that the files lack.
        unexpected_keys: names in the files that the module lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: the file.
        name: its name there.
        shape: its shape.
        dtype: torch's dtype, or the format's name of a dtype that is not supported here.
        offset: where its elements begin, in bytes.
        checked: the checksums in the file; None without any.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    offset: int
    checked: Checked | None = None

    def check(self, blocks: Iterable[Sequence[slice]]) -> None:
        """Compares the file's bytes around blocks with its checksums, if it has some.

        Raises:
            DataError: they differ.
        """
        if self.checked is None or not isinstance(self.dtype, torch.dtype):
            return
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        ranges = []
        for block in blocks:
            if all(s.start < s.stop for s in block):
                first = sum(s.start * stride for s, stride in zip(block, strides))
                last = sum((s.stop - 1) * stride for s, stride in zip(block, strides))
                size = self.dtype.itemsize
                ranges.append((self.offset + first * size, self.offset + (last + 1) * size))
        self.checked.check(ranges)

    def row_step(self) -> int:
        """How many rows one mapping may read: a multiple of whole rows, at least one."""
        itemsize = self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 1
        return max(1, _MAPPED_BYTES // max(1, math.prod(self.shape[1:]) * itemsize))

    def read(self, index: Sequence[slice], into: torch.Tensor) -> None:
        """Copies a block, given by a slice with bounds for each dim, into a CPU tensor."""
        if not into.numel():
            return
        if not index:
            into.copy_(self._mapped(()))
            return
        rows, *others = index
        for start in range(rows.start, rows.stop, self.row_step()):
            stop = min(start + self.row_step(), rows.stop)
            part = self._mapped((slice(start, stop), *others))
            into[start - rows.start : stop - rows.start].copy_(part)

    def _mapped(self, index: tuple[slice, ...]) -> torch.Tensor:
        """A copy of a block, through a mapping of its own.

        Not `get_slice` of the package: for torch it maps the file privately, which counts as memory
        of the process under a limit, and for numpy it lacks bfloat16.
        """
        assert isinstance(self.dtype, torch.dtype)
        whole = np.memmap(
            self.path, dtypes.to_jax(self.dtype), mode="r", offset=self.offset, shape=self.shape
        )
        return dtypes.tensor_view(np.array(whole[index], order="C"))


def load_safetensors(
    module: Tensors, path: str | os.PathLike[str], *, strict: bool = True
) -> LoadedKeys:
    """Reads a module's parameters and persistent buffers from safetensors files, in place.

    Of a marked tensor only the blocks that this process's devices hold are read, each once, and
    placed on their devices: mark first, then load. The host holds one block of one tensor at a
    time, and a split tensor is never assembled. A tensor without a mark goes to all devices. The
    recorded initialisation of a module that was created under `with torch.device("xla")` is then
    never computed. A tensor keeps its dtype, and gets the file's values in it. Of a tied weight,
    one of its names in the file is enough.

    Everything is checked before anything is read: also the bytes, where a file carries checksums,
    as those of `save_safetensors` do. Waits for the transfers to the devices. Several
    processes each read the files that they are given.

    Args:
        module: a module on device "xla" or "cpu", or its tensors by the names in the files.
        path: a file; or a folder with `model.safetensors`, or with `model.safetensors.index.json`
            and the parts that it names, as in Hugging Face's repositories.
        strict: whether a tensor may neither be missing in the files nor be there in addition.

    Returns:
        The names that are missing and that are there in addition; with `strict`, none.

    Raises:
        TypeError: `module` is neither a module nor a dict of tensors, or `path` is no path.
        DataError: the files are missing or damaged; or, all listed at once, tensors are missing,
            unexpected, or of other shapes or of dtypes that cannot be converted. Floating-point
            dtypes of 16 bits and more convert to each other, and integers to wider ones. Nothing
            was loaded.

    Example:
        >>> import tempfile, spmd_core as spmd
        >>> from torch import nn
        >>> right = nn.Linear(2, 3)
        >>> with torch.device("xla"):
        ...     model = nn.Linear(2, 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     spmd.save_safetensors(right, folder)
        ...     spmd.load_safetensors(model, folder)
        LoadedKeys(missing_keys=[], unexpected_keys=[])
        >>> torch.equal(model.weight.cpu(), right.weight)
        True
    """
    require_kind("path", path, str, os.PathLike, write="the path of a file or a folder")
    tensors = named_tensors(module)
    stored = contents(Path(path).expanduser())
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(identity(tensor), []).append(name)
    sources = {group[0]: [n for n in group if n in stored] for group in names.values()}

    unexpected = [name for name in stored if name not in tensors]
    missing = [name for name, found in sources.items() if not found]
    problems = _problems(tensors, stored, sources)
    if strict:
        problems += [f"missing: {name}, {_described(tensors[name])}" for name in missing]
        problems += [f"unexpected: {n}, {list(stored[n].shape)}" for n in unexpected]
    if problems:
        raise DataError(
            f"the tensors of {str(path)!r} must be those of the module; got "
            f"{len(problems)} that are not, and loaded nothing:\n  "
            + "\n  ".join(problems)
            + "\nLoad into the model that the files were saved from"
            + (", or pass strict=False for missing and unexpected ones." if strict else ".")
        )
    for name, found in sources.items():
        if found:
            stored[found[0]].check(_blocks(tensors[name]))
    total = sum(tensors[name].nbytes for name, found in sources.items() if found)
    with progress.shown(f"loading {path}", total_bytes=total) as advance:
        for name, found in sources.items():
            if found:
                _load(tensors[name], stored[found[0]])
                advance(tensors[name].nbytes)
    return LoadedKeys(missing, unexpected)


def _blocks(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """The blocks that `_load` will read."""
    if isinstance(tensor, XLAShardedTensor):
        assert isinstance(tensor._handle, Storage)
        return shards.local_blocks(tensor._handle)
    return [tuple(slice(0, n) for n in tensor.shape)]


def _load(tensor: torch.Tensor, stored: Stored) -> None:
    if isinstance(tensor, XLAShardedTensor):
        handle = tensor._handle
        assert isinstance(handle, Storage)
        shards.fill(handle, stored.read)
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            stored.read([slice(0, n) for n in tensor.shape], tensor)


# --- What must hold -------------------------------------------------------------------------------


def _problems(
    tensors: Mapping[str, torch.Tensor],
    stored: Mapping[str, Stored],
    sources: Mapping[str, Sequence[str]],
) -> list[str]:
    """The reasons why loading is impossible, whether or not all names match."""
    problems = []
    for first, found in sources.items():
        tensor = tensors[first]
        if tensor.is_meta:
            problems.append(f"without memory, on device meta: {first}; call module.to_empty first")
        elif isinstance(tensor, XLAShardedTensor) and not isinstance(tensor._handle, Storage):
            problems.append(
                f"a view of another tensor: {first}; load before what makes such views, as "
                "spmd.pipeline does"
            )
        fits = True
        for name in found:
            source = stored[name]
            if source.shape != tuple(tensor.shape):
                fits = False
                problems.append(
                    f"another shape: {name}, {list(source.shape)} for {list(tensor.shape)}"
                )
            elif isinstance(source.dtype, str) or not dtypes.converts(source.dtype, tensor.dtype):
                fits = False
                problems.append(f"another dtype: {name}, {source.dtype} for {tensor.dtype}")
        if fits and not _are_equal([stored[name] for name in found]):
            problems.append(f"one tensor here, and different ones there: {', '.join(found)}")
    return problems


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _are_equal(copies: Sequence[Stored]) -> bool:
    """Whether a file that has several names of one tensor has the same values for all of them."""
    for other in copies[1:]:
        first = copies[0]
        num_rows = first.shape[0] if first.shape else 1
        for start in range(0, num_rows, first.row_step()):
            index = [slice(0, n) for n in first.shape]
            if index:
                index[0] = slice(start, min(start + first.row_step(), num_rows))
            assert isinstance(first.dtype, torch.dtype)
            one, two = (
                torch.empty([s.stop - s.start for s in index], dtype=first.dtype, device="cpu")
                for _ in range(2)
            )
            first.read(index, one)
            other.read(index, two)
            # Bytes, so that a NaN equals itself.
            if dtypes.numpy_view(one).tobytes() != dtypes.numpy_view(two).tobytes():
                return False
    return True


# --- Files ----------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, Stored]:
    """The tensors of a file or a folder by name; the files' headers are read and checked.

    Raises:
        DataError: there are none, or a header is damaged.
    """
    if not path.is_dir():
        if path.suffix == ".json":
            return _indexed(path)
        if not path.is_file():
            raise DataError(
                f"weights are read from a file or a folder; got {str(path)!r}, which is neither. "
                "Check the path."
            )
        return _headers(path)
    if (path / MODEL_FILE).exists():
        return _headers(path / MODEL_FILE)
    if (path / INDEX_FILE).exists():
        return _indexed(path / INDEX_FILE)
    names = sorted(file.name for file in path.iterdir())
    raise DataError(
        f"a folder of weights has {MODEL_FILE}, or {INDEX_FILE} and the parts that it names; got "
        f"{str(path)!r} with {', '.join(names[:10]) or 'no file'}"
        f"{' and others' if len(names) > 10 else ''}. "
        "Name the file itself, or convert the weights to safetensors."
    )


def _indexed(index: Path) -> dict[str, Stored]:
    """The tensors of the parts that an index names."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        part_of = {str(name): index.parent / part for name, part in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "an index is JSON with a file for each tensor under 'weight_map'; "
            f"{str(index)!r} cannot be read: {type(error).__name__}: {error}. Copy it again."
        ) from error
    files = list(dict.fromkeys(part_of.values()))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise DataError(
            f"every part that an index names must lie beside it; {str(index)!r} names "
            f"{', '.join(absent)}, which {'are' if len(absent) > 1 else 'is'} not there. "
            "Copy all parts."
        )
    found = {name: stored for file in files for name, stored in _headers(file).items()}
    lost = [
        f"{name!r} in {file.name}"
        for name, file in part_of.items()
        if name not in found or found[name].path != file
    ]
    if lost:
        raise DataError(
            f"the parts must hold the tensors that the index names; {str(index)!r} names "
            f"{', '.join(lost)}, which cannot be found there. Copy the index and all parts again."
        )
    return found


def _headers(path: Path) -> dict[str, Stored]:
    """The tensors of one file by name."""
    try:
        with safe_open(path, "np"):
            pass  # checks the header, and that it covers the file
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(num_bytes)
            header = json.loads(text)
        checked = weight_checksums.found(path, text, header.pop("__metadata__", {}))
        return {
            name: Stored(
                path,
                name,
                tuple(entry["shape"]),
                _DTYPES.get(entry["dtype"], entry["dtype"]),
                8 + num_bytes + entry["data_offsets"][0],
                checked,
            )
            for name, entry in header.items()
        }
    except (SafetensorError, OSError) as error:
        raise DataError(
            "weights are read from whole safetensors files; "
            f"{str(path)!r} ({path.stat().st_size:,} bytes) cannot be read: {error}. "
            "Copy or download it again."
        ) from error
