"""What a folder of checkpoints holds: its whole steps, and whose they are."""

import json
import os
from collections.abc import Mapping
from typing import Any

from spmd_core.checkpoint.remote import WHOLE, Folder, RemotePath
from spmd_core.errors import CheckpointError

IDENTITY_FILE = "run.json"


def whole_steps(folder: Folder) -> list[int]:
    """The whole steps that are on the disk now, ascending; none without the folder."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdecimal() and (path / WHOLE).is_file()
    )


def is_whole(folder: Folder, step: int) -> bool:
    """Whether a step is whole on the disk now."""
    if isinstance(folder, RemotePath):
        return (folder / str(step) / WHOLE).is_file()
    return os.path.isfile(os.path.join(folder, str(step), WHOLE))  # a save waits for it


def listed(folder: Folder) -> str:
    """The whole steps as a text."""
    return ", ".join(map(str, whole_steps(folder))) or "none"


def identity_of(folder: Folder) -> dict[str, Any] | None:
    """What tells a folder's run from others; None if it is nobody's.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / IDENTITY_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"a folder of checkpoints says whose they are; {path} cannot be read: {error}. "
            "Name another folder."
        ) from error
    return found


def check_identity(folder: Folder, identity: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if a folder is that of a run with another identity."""
    before = None if identity is None else identity_of(folder)
    if identity is None or before is None:
        return
    differing = [
        f"{name}: {before.get(name)!r} there, {identity.get(name)!r} here"
        for name in {**before, **identity}
        if before.get(name) != identity.get(name) or (name in before) != (name in identity)
    ]
    if differing:
        raise CheckpointError(
            f"a folder has the checkpoints of one run; {folder} has those of another: "
            f"{'; '.join(differing)}. Name another folder, or run with what is there."
        )
