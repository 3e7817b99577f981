"""A cache of trained tokenizers: a file that is damaged is trained again."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from spmd_core import files


def cached_tokenizer(
    train: Callable[[], Tokenizer], *, key: Mapping[str, Any], cache_dir: str | Path
) -> Tokenizer:
    """The tokenizer of a key, from its file; it is trained and written if there is none.

    Each call compares the file with its digest: one that is damaged is written again, with a
    warning.

    Args:
        train: makes the tokenizer.
        key: what decides the tokenizer, as JSON can write it.
        cache_dir: the folder of the files; made where it is missing.

    Raises:
        OSError: the file could not be written.
    """
    digest = _sha256(json.dumps(key, sort_keys=True))
    path = Path(cache_dir).expanduser() / f"{digest[:20]}.json"
    try:
        return Tokenizer.from_str(_read(path))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the cached tokenizer in {path} is damaged, so it is trained again: {error}. If it "
            "happens again, check the disk, or name another folder with --cache-dir.",
            stacklevel=2,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    text = train().to_str()
    content = {"key": key, "sha256": _sha256(text), "tokenizer": text}
    files.write_text(path, json.dumps(content, indent=1))
    return Tokenizer.from_str(text)


def _read(path: Path) -> str:
    """The tokenizer as its library writes it; raises ValueError if it differs from its digest."""
    content = json.loads(path.read_bytes())
    try:
        text, digest = content["tokenizer"], content["sha256"]
        is_whole = digest == _sha256(text)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("it has no tokenizer and digest") from error
    if not is_whole:
        raise ValueError("it differs from its digest")
    return str(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
