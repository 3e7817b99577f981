"""Tokenised documents on disk: written once, in one Arrow file, and mapped into memory by all.

One process writes while the others that ask for the same tokens wait. A cache is renamed to its
final name when it is complete, so an interrupted write leaves none. It contains a digest, so a
cache that was damaged later is written again.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spmd_core.arguments import checked, require_callable, require_kind
from spmd_core.errors import DataError

_FORMAT = 2
_TOKENS, _KEY = "tokens.arrow", "key.json"
_COLUMN = "tokens"
_BATCH = 1000  # documents that are encoded and written at once
_FIRST_WAIT_S = 5.0
_MADE = "cached_tokens(...), which makes a cache, or the folder of one that it made"
_log = logging.getLogger(__name__)


class TokenCache:
    """The documents of a cache, read from the file when they are asked for; see `cached_tokens`.

    A pickle names the folder, so workers of a `DataLoader` map the same file.

    Args:
        folder: of one cache.

    Attributes:
        folder: as above.

    Raises:
        TypeError: `folder` is no path.
        DataError: there is no cache in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_kind("folder", folder, str, os.PathLike, write=_MADE)
        self.folder = Path(folder)
        if not (self.folder / _TOKENS).is_file():
            raise DataError(
                f"a cache of tokens is a folder with the file {_TOKENS}; got {str(folder)!r}, "
                f"which has none. Write {_MADE}."
            )

    @cached_property
    def dataset(self) -> Any:
        """The cache as a `datasets.Dataset` with the column `tokens`, lists of int32."""
        return _library().Dataset.from_file(str(self.folder / _TOKENS))

    @cached_property
    def all_tokens(self) -> np.ndarray:
        """The tokens of all documents, one document after the other: int32 of shape (tokens,)."""
        return np.concatenate([values for _, values in self._chunks])

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document: int64 of shape (documents,)."""
        return np.concatenate([np.diff(offsets) for offsets, _ in self._chunks]).astype(np.int64)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest token of all documents; (0, 0) without any."""
        values = [values for _, values in self._chunks if len(values)]
        if not values:
            return 0, 0
        return min(int(v.min()) for v in values), max(int(v.max()) for v in values)

    def tokens(self, document: int) -> np.ndarray:
        """The tokens of a document: a read-only view of the file, int32 of shape (length,)."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} is out of range for {len(self)} documents")
        chunk = int(np.searchsorted(self._first, document, side="right")) - 1
        offsets, values = self._chunks[chunk]
        place = document - int(self._first[chunk])
        return values[offsets[place] : offsets[place + 1]]

    def __len__(self) -> int:
        return int(self._first[-1])

    def __reduce__(self) -> tuple[type["TokenCache"], tuple[Path]]:
        return TokenCache, (self.folder,)

    @cached_property
    def _chunks(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each record batch of the file, its documents' offsets and all their tokens."""
        return [
            (chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=True))
            for chunk in _table(self.folder / _TOKENS).column(_COLUMN).chunks
        ]

    @cached_property
    def _first(self) -> np.ndarray:
        """The first document of each record batch, and the number of all."""
        return np.cumsum([0, *(len(offsets) - 1 for offsets, _ in self._chunks)])


@checked(num_documents=0)
def cached_tokens(
    documents: Iterable[str],
    encode: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]],
    *,
    key: Mapping[str, Any],
    cache_dir: str | os.PathLike[str],
    num_documents: int | None = None,
    progress: bool = True,
) -> TokenCache:
    """The documents' tokens, from the cache; they are encoded and written if it has none.

    Of several processes that call this at once, on one host or over a file system with locks, one
    writes and the others wait. If it dies, another one writes. Each call reads the whole file once
    and compares it with its digest: a cache that is damaged is removed and written again, with a
    warning.

    Args:
        documents: the texts; they are read only if there is no cache for this key.
        encode: gives the tokens of each text of a list, as integers from 0 to 2**31 - 1.
        key: what determines the tokens, in JSON's types: the texts' source and its version, the
            tokenizer. Each key has a cache of its own.
        cache_dir: the folder that holds caches; created if it is missing.
        num_documents: how many documents there are, for the progress bar.
        progress: whether a bar on stderr shows the writing, if stderr is a terminal.

    Raises:
        TypeError: `documents` are no list of texts, `encode` is no function, `key` has other types
            than JSON's, or `cache_dir` is no path.
        DataError: there are no documents, `encode` gives something else than one list of tokens for
            each text, `cache_dir` cannot be made, or the package `datasets` is missing.
    """
    if isinstance(documents, str | bytes | Mapping) or not isinstance(documents, Iterable):
        raise TypeError(
            f"documents are a list of texts, or another iterable of them; got {_shown(documents)}, "
            f"of type {type(documents).__name__}. Write [text] for a single one."
        )
    require_callable("encode", encode)
    require_kind("cache_dir", cache_dir, str, os.PathLike, write="the path of a folder for caches")
    text = _key_text(key)
    root = Path(cache_dir).expanduser()
    name = hashlib.sha256(text.encode()).hexdigest()[:20]
    folder = root / name
    if _damage(folder) is not None:
        _library()
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cache_dir is a folder, or a path where one can be made; got {str(root)!r}: "
                f"{error.strerror}. Pass another path."
            ) from error
        with _lock(root / f"{name}.lock"):
            damage = _damage(folder)  # another process may have written by now
            if damage is not None:
                # A unique name, and only leftovers of this host's killed processes are removed: not
                # every shared file system has locks.
                own = f"{name}.{socket.gethostname()}"
                for left in root.glob(f"{own}.*.part"):
                    shutil.rmtree(left, ignore_errors=True)
                scratch = root / f"{own}.{secrets.token_hex(8)}.part"
                if damage:
                    warnings.warn(
                        f"the cached tokens in {folder} are damaged, so they are written again: "
                        f"{damage}. If it happens again, check the disk, or pass another folder.",
                        stacklevel=3,
                    )
                    _remove(folder, scratch)
                scratch.mkdir()
                try:
                    _write(scratch / _TOKENS, documents, encode, num_documents, progress)
                    about = {"key": json.loads(text), "sha256": _sha256(scratch / _TOKENS)}
                    (scratch / _KEY).write_text(json.dumps(about, indent=1))
                    with contextlib.suppress(FileExistsError):
                        scratch.rename(folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    return TokenCache(folder)


def _key_text(key: Mapping[str, Any]) -> str:
    """A key as JSON. Raises TypeError for what JSON has no form of its own for."""
    rule = "key maps names to values of JSON's types: text, numbers, True, None, lists, dicts"
    advice = "Write for instance key={'source': 'corpus-2', 'tokenizer': 'gpt2'}."
    if not isinstance(key, Mapping) or any(not isinstance(name, str) for name in key):
        raise TypeError(f"{rule}; got {_shown(key)}, of type {type(key).__name__}. {advice}")
    try:
        return json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{rule}; got {_shown(key)}: {error}. {advice}") from error


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]


def _damage(folder: Path) -> str | None:
    """What is wrong with a cache: None if nothing is, an empty text if there is none."""
    if not folder.exists():
        return ""
    try:
        digest = json.loads((folder / _KEY).read_bytes())["sha256"]
        if digest == _sha256(folder / _TOKENS):
            return None
    except OSError as error:
        return str(error)
    except (ValueError, LookupError, TypeError):
        return f"{_KEY} has no digest"
    return f"{_TOKENS} differs from its digest"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path, scratch: Path) -> None:
    """Removes a cache at once: no other process sees a part of it."""
    folder.rename(scratch)
    if scratch.is_dir():
        shutil.rmtree(scratch)
    else:
        scratch.unlink()


def _write(
    path: Path,
    documents: Iterable[str],
    encode: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]],
    num_documents: int | None,
    progress: bool,
) -> None:
    # Optional dependencies, needed only to write.
    from datasets.arrow_writer import ArrowWriter  # noqa: PLC0415
    from tqdm import tqdm  # noqa: PLC0415

    datasets = _library()
    features = datasets.Features({_COLUMN: datasets.List(datasets.Value("int32"))})
    bar = tqdm(
        total=num_documents,
        unit=" documents",
        desc="tokenizing",
        disable=None if progress else True,  # None: where stderr is no terminal
        leave=False,
    )
    num_written = 0
    with bar, ArrowWriter(path=str(path), features=features) as writer:
        rest = iter(documents)
        while texts := list(islice(rest, _BATCH)):
            if not all(isinstance(text, str) for text in texts):
                kinds = sorted({type(text).__name__ for text in texts})
                raise DataError(
                    f"documents are texts; got some of type {', '.join(kinds)}. Pass their texts."
                )
            found = encode(texts)
            is_list = hasattr(found, "__len__") and not isinstance(found, str | bytes | Mapping)
            if not is_list or len(found) != len(texts):
                got = len(found) if is_list else f"a {type(found).__name__}"
                raise DataError(
                    "encode() gives one list of tokens for each text; got "
                    f"{got} for {len(texts)} texts. Return a list of lists."
                )
            writer.write_batch({_COLUMN: [_as_tokens(tokens) for tokens in found]})
            num_written += len(texts)
            bar.update(len(texts))
        if num_written == 0:
            raise DataError(
                "a cache of tokens needs documents; got none. Pass texts, or look at what the "
                "iterable reads."
            )
        writer.finalize()


def _as_tokens(found: Any) -> np.ndarray:
    """What `encode` gave for one text, as int32."""
    try:
        values = np.asarray(found)
    except ValueError:  # lists of several lengths
        values = np.asarray(None)
    if values.ndim == 1 and not len(values):
        return np.zeros(0, np.int32)
    is_list = values.ndim == 1 and values.dtype.kind in "iu"
    if not is_list or values.min() < 0 or values.max() >= 2**31:
        raise DataError(
            "encode() gives for each text a list of integers from 0 to 2**31 - 1; got "
            f"{_shown(found)}. Return the tokens' numbers."
        )
    return values.astype(np.int32)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # An optional dependency, which `datasets` brings.
    from filelock import FileLock, Timeout  # noqa: PLC0415

    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=_FIRST_WAIT_S)
    except Timeout:
        _log.info("waiting for the process that tokenizes; it holds %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _table(path: Path) -> Any:
    """The Arrow file, mapped into memory, without the seconds that importing `datasets` takes."""
    arrow = _library("pyarrow")
    return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()


def _library(name: str = "datasets") -> Any:
    """An optional package, which only text needs; `datasets` brings pyarrow."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"a cache of tokens is an Arrow file of the package datasets; got no package {name}. "
            "Run: pip install 'spmd-data[text]'"
        ) from error
