"""Reads the state of a step: what `CheckpointManager.restore` does, and what needs no manager."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core import progress
from spmd_core.arguments import require_int, require_kind
from spmd_core.checkpoint import folder as steps
from spmd_core.checkpoint import parts
from spmd_core.checkpoint.remote import Folder, folder_at
from spmd_core.checkpoint.restoring import Restoration
from spmd_core.checkpoint.store import Reader
from spmd_core.errors import CheckpointError
from spmd_core.steps.structures import raise_together

FORMAT = 1
"""Of what a step has beside its arrays."""


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        step: the step.
        state: the parts by name: an object is the one that was given; of anything else the saved
            value.
        missing: names in the state that the checkpoint lacks, which are as they were; with
            `strict`, none.
        extra: names in the checkpoint that the state lacks, which were left; with `strict`, none.
    """

    step: int
    state: dict[str, Any]
    missing: list[str]
    extra: list[str]


def load_checkpoint(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    convert: bool = False,
) -> Restored:
    """Gives some parts of a state the values of a saved one, in place. Waits for the transfers.

    For those who use what a run saved, such as an evaluation or a server: it needs no manager,
    writes nothing, and may read while the run goes on. Of each part, all must be there; parts that
    the state does not name are left, and torch's generator stays as it is. Under several processes,
    each must call it.

    Args:
        folder: of a `CheckpointManager`.
        state: parts by name, as for `CheckpointManager.save`, such as `{"model": model}`.
        step: None: the newest.
        convert: as for `CheckpointManager.restore`.

    Returns:
        As `CheckpointManager.restore`.

    Raises:
        CheckpointError: there is no such step; or a part differs, with all differences; or what is
            read is damaged. Then the state is as it was.
        SpmdError: another process could not read its part; the state is as it was.

    Example:
        >>> import tempfile
        >>> saved, model = (torch.nn.Linear(2, 3, device="xla") for _ in range(2))
        >>> from spmd_core.checkpoint import CheckpointManager, load_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with CheckpointManager(folder) as manager:
        ...         manager.save(7, {"model": saved, "epoch": 2})
        ...     load_checkpoint(folder, {"model": model}).step
        7
        >>> torch.equal(model.weight, saved.weight)
        True
    """
    require_kind("folder", folder, str, os.PathLike, write="the folder's path")
    path = folder_at(folder)
    with progress.shown(f"loading from {folder}"):
        return _loaded(path, state, step, convert=convert)


def _loaded(path: Folder, state: Mapping[str, Any], step: int | None, *, convert: bool) -> Restored:
    error: Exception | None = None
    try:
        step = found(path, None if step is None else require_int("step", step))
        restoration, restored = planned(
            path, step, state, strict=True, convert=convert, is_whole=False
        )
        restoration.read(check=True)
    except (OSError, CheckpointError) as raised:
        error = raised
    raise_together(error, action="read")
    assert step is not None
    restoration.run()
    return Restored(step, restored, restoration.missing, restoration.extra)


def found(folder: Folder, step: int | None) -> int:
    """The step that a folder has: this one, or with None the newest.

    Raises:
        CheckpointError: there is none.
    """
    there = steps.whole_steps(folder)
    if step in there:
        assert step is not None
        return step
    if step is not None or not there:
        wanted = "" if step is None else f" {step}"
        raise CheckpointError(
            f"a step is restored that is whole on the disk; {folder} has no step{wanted}. "
            f"Its steps are {steps.listed(folder)}. "
            + ("Save one first." if step is None else "Restore one of these.")
        )
    return max(there)


def planned(
    folder: Folder,
    step: int,
    state: Mapping[str, Any],
    *,
    strict: bool,
    convert: bool,
    is_whole: bool = True,
) -> tuple[Restoration, dict[str, Any]]:
    """What a restore is to do, and the parts that it returns. Changes nothing.

    Args:
        folder: of all steps.
        step: is there.
        state: the parts by name.
        strict, convert: see `CheckpointManager.restore`.
        is_whole: whether the state has all parts, and torch's generator gets its state.

    Raises:
        CheckpointError: the state differs, or the step is damaged.
    """
    reader = Reader(folder / str(step))
    about = reader.state()
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"this release reads checkpoints of format {FORMAT}; got format "
            f"{about.get('format')!r} of step {step} in {folder}. Restore it with the "
            "release that wrote it."
        )
    restoration = Restoration(reader, convert)
    restored = parts.plan(state, about["parts"], restoration)
    if not is_whole:
        left = {name for name in about["parts"] if name not in state}
        restoration.extra = [name for name in restoration.extra if name not in left]
    restoration.refuse(strict=strict)
    if is_whole:
        random = restoration.new(about["random"]["shape"], torch.uint8)
        restoration.fill("random", about["random"], parts.Entry(random))
        restoration.afterwards.append(lambda: torch.set_rng_state(random))
    others = [about["random"]] if is_whole else []
    restoration.check_arrays([*parts.nodes(about["parts"]), *others])
    return restoration, restored
