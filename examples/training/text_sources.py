"""Where texts come from: files, folders, Python's own sources, a dataset of the hub."""

import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from examples.training.choices import PYTHON_STDLIB
from examples.training.knobs import UsageError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # of the files that are read in a folder
# Documents are shuffled before the split, so that the validation part resembles the training part.
# The seed is fixed, so that the split does not depend on --seed.
_SHUFFLE_SEED = 0


class TextError(UsageError):
    """The text cannot be read, or there is too little of it."""


@dataclass(frozen=True)
class _LocalFiles:
    """UTF-8 files on this machine, in their order of use; each file is one document."""

    paths: tuple[Path, ...]

    def key(self) -> dict[str, Any]:
        return {
            "files": [
                [str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in self.paths
            ]
        }

    def name(self) -> str:
        return f"{len(self.paths):,} files"

    def read(self) -> list[str]:
        return [_text_of(path) for path in self.paths]


@dataclass(frozen=True)
class _HubDataset:
    """The training split of a dataset of the Hugging Face hub; each row is one document."""

    source: str

    def key(self) -> dict[str, Any]:
        return {"hub": self.source}

    def name(self) -> str:
        return self.source

    def read(self) -> Iterator[str]:
        datasets = _datasets_library()
        name, _, configuration = self.source.partition(":")
        try:
            rows = datasets.load_dataset(name, configuration or None, split="train")
        # Without a network, and for an unknown name or configuration, the library raises another
        # type each.
        except Exception as error:
            raise TextError(
                f"--data must be files, folders, {PYTHON_STDLIB!r} or a dataset that the hub can "
                f"give; got {self.source!r}, which is no file here, and the hub said: "
                f"{type(error).__name__}: {error}. Check the name and the network, or pass a file."
            ) from error
        if "text" not in rows.column_names:
            raise TextError(
                f"a dataset must have a column called 'text'; got {self.source!r} with the columns "
                f"{rows.column_names}. Pass another one."
            )
        for row in rows.shuffle(seed=_SHUFFLE_SEED):
            yield row["text"]


Source: TypeAlias = _LocalFiles | _HubDataset


def source_of(sources: Sequence[str], max_mb: float) -> Source:
    """Where the documents come from; raises TextError for a source that is not there."""
    return _hub_source(sources) or _LocalFiles(_chosen_files(_listed_files(sources), max_mb))


def _hub_source(sources: Sequence[str]) -> _HubDataset | None:
    """The hub dataset that `sources` names, or None if the sources are local."""
    only = sources[0] if len(sources) == 1 else ""
    looks_local = (
        only == PYTHON_STDLIB
        or only.startswith((".", "/", "~"))
        or only.endswith(TEXT_SUFFIXES)
        or Path(only).exists()
    )
    return _HubDataset(only) if only and not looks_local else None


def _listed_files(sources: Sequence[str]) -> list[Path]:
    """All files of the local sources, in a fixed order."""
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == PYTHON_STDLIB:
            files += _stdlib_files()
        elif path.is_dir():
            files += sorted(
                file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file()
            )
        elif path.is_file():
            files.append(path)
        else:
            raise TextError(
                f"every source of --data must exist; got {source!r}, which is neither a file nor a "
                "folder. Check the path."
            )
    if not files:
        raise TextError(
            f"--data must lead to text; got {', '.join(sources)}, with no "
            f"{', '.join(TEXT_SUFFIXES)} file inside. Pass other folders or files."
        )
    return files


def _stdlib_files() -> list[Path]:
    """The standard library's files, without installed packages and without its tests.

    Some of the tests are invalid text on purpose.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in left_out]  # what stays is walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _chosen_files(files: list[Path], max_mb: float) -> tuple[Path, ...]:
    """The files, shuffled, up to the one that reaches `max_mb` (0: all).

    The shuffle gives a small part varied text; a part is faster to read than all files.
    """
    random.Random(_SHUFFLE_SEED).shuffle(files)
    chosen, num_bytes = [], 0
    for path in files:
        chosen.append(path)
        num_bytes += path.stat().st_size
        if max_mb and num_bytes >= max_mb * 1e6:
            break
    if num_bytes == 0:
        raise TextError(f"--data must hold text; got {len(files)} empty files. Pass others.")
    return tuple(chosen)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"every file of --data must be readable UTF-8 text; got {str(path)!r}: {error}. "
            "Convert it, or leave it out."
        ) from error


def _within(texts: Iterable[str], max_mb: float) -> list[str]:
    """The first texts, up to `max_mb` in total (0: all); the last one is cut at the limit."""
    kept: list[str] = []
    num_left = int(max_mb * 1e6) if max_mb else None
    for text in texts:
        data = text.encode() if num_left is not None else b""
        kept.append(
            text
            if num_left is None or len(data) <= num_left
            else data[:num_left].decode(errors="ignore")
        )
        if num_left is not None:
            num_left -= len(data)
            if num_left <= 0:
                break
    if not any(kept):
        raise TextError(
            f"--data must hold text; got {len(kept)} empty documents. Pass another source."
        )
    return kept


def read_texts(source: Source, max_mb: float) -> list[str]:
    """The documents of a source, up to `max_mb` in total (0: all).

    Raises:
        TextError: they cannot be read, or hold no text.
    """
    try:
        return _within(source.read(), max_mb)
    except OSError as error:
        raise TextError(
            f"the text of --data must be readable; got {source.name()}: {error}. Check the disk "
            "and the network, or pass other sources."
        ) from error


def _datasets_library() -> Any:
    try:
        # Needed only without a cache: later runs, and machines with a copy of the cache, do not
        # import it.
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise TextError(
            "reading a dataset of the hub needs the datasets library; got no such package, and no "
            "cached tokens. Run: pip install datasets"
        ) from error
    return datasets
