"""A text's tokenizer and tokens on the disk: as they were written, or made anew.

Files are renamed to their place when they are whole, and carry a digest that every run compares.
"""

import contextlib
import hashlib
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

TOKENS, TOKENIZER, KEY = "tokens.npy", "tokenizer.json", "key.json"


class DamagedError(ValueError):
    """A cached file is not as it was written."""


def read(folder: Path) -> tuple[Tokenizer, np.ndarray] | None:
    """The tokenizer and the tokens, int32 of shape (tokens,); None if they must be made.

    A cache that is damaged is removed, with a warning that says so.
    """
    if not folder.exists():
        return None
    try:
        return _checked(folder)
    except (DamagedError, OSError) as error:
        warnings.warn(
            f"the cached tokens in {folder} are damaged, so they are made anew: {error}. If it "
            "happens again, check the disk, or name another folder with --cache-dir.",
            stacklevel=2,
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, contextlib.suppress(OSError):
        folder.rename(Path(scratch) / "damaged")  # so that no other run sees a part of it
    return None


def _checked(folder: Path) -> tuple[Tokenizer, np.ndarray]:
    try:
        digests = json.loads((folder / KEY).read_bytes())["sha256"]
        wanted = {name: digests[name] for name in (TOKENS, TOKENIZER)}
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"{KEY} has no digests of the others") from error
    for name, digest in wanted.items():
        if digest != _sha256(folder / name):
            raise DamagedError(f"{name} differs from its digest")
    return Tokenizer.from_file(str(folder / TOKENIZER)), np.load(folder / TOKENS)


def write(folder: Path, tokenizer: Tokenizer, tokens: np.ndarray, key: dict[str, Any]) -> None:
    """Writes all files to a scratch folder and renames it, so that no run reads a partial cache.

    Args:
        folder: of this text alone; it may be there by now, with the same content.
        tokenizer, tokens: what `read` gives.
        key: what decided them, for people who look into the folder.

    Raises:
        OSError: a file could not be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        written = Path(scratch) / "cache"
        written.mkdir()
        tokenizer.save(str(written / TOKENIZER))
        np.save(written / TOKENS, tokens)
        digests = {name: _sha256(written / name) for name in (TOKENS, TOKENIZER)}
        (written / KEY).write_text(json.dumps({"key": key, "sha256": digests}, indent=1))
        with contextlib.suppress(OSError):
            if folder.is_file():  # nothing that a run has written
                folder.unlink()
        try:
            written.rename(folder)
        except OSError:
            # If the folder exists, another run wrote the same content first.
            if not (folder / TOKENS).exists():
                raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
