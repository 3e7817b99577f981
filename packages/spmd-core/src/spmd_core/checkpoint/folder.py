"""What a folder of checkpoints holds: its whole steps, and whose they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_core.errors import CheckpointError

IDENTITY_FILE = "run.json"
# What Orbax writes into a folder under its final name last of all; such a folder is a whole step.
_WHOLE = "_CHECKPOINT_METADATA"


def whole_steps(folder: Path) -> list[int]:
    """The whole steps that are on the disk now, ascending; none without the folder."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdecimal() and (path / _WHOLE).is_file()
    )


def listed(folder: Path) -> str:
    """The whole steps as a text."""
    return ", ".join(map(str, whole_steps(folder))) or "none"


def check_identity(folder: Path, identity: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if a folder is that of a run with another identity."""
    path = folder / IDENTITY_FILE
    if identity is None or not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"a folder of checkpoints says whose they are; {path} cannot be read: {error}. "
            "Name another folder."
        ) from error
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
