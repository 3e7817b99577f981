"""The command `python -m spmd_core.checkpoint`: what a folder of checkpoints holds."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import torch

from spmd_core.checkpoint import parts
from spmd_core.checkpoint.folder import listed, whole_steps
from spmd_core.checkpoint.remote import Folder, folder_at
from spmd_core.checkpoint.restoring import check_array
from spmd_core.checkpoint.store import Reader, damaged
from spmd_core.checkpoint_options import parser
from spmd_core.errors import CheckpointError, DataError

EXIT_RIGHT, EXIT_WRONG = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; starts no device.

    Returns:
        0; or 1 if there is no such folder or step, or one cannot be read or is damaged, or a file
        cannot be converted. Invalid arguments end the process with 2.
    """
    options = parser().parse_args(argv)
    try:
        if options.command == "convert":
            return _convert(options)
        folder = folder_at(options.folder)
        steps = _chosen(folder, getattr(options, "step", None))
        if options.command == "ls":
            return _list(folder, steps)
        if options.command == "show":
            return _show(folder / str(steps[-1]))
        return _verify(folder, steps)
    except (OSError, CheckpointError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG


def _chosen(folder: Folder, step: int | None) -> list[int]:
    if not folder.is_dir():
        raise CheckpointError(f"checkpoints lie in a folder; there is none at {folder}. Name it.")
    steps = whole_steps(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(
            f"a step is read that is whole on the disk; {folder} has no step"
            f"{'' if step is None else f' {step}'}. Its steps are {listed(folder)}. Name another "
            f"{'folder' if not steps else 'one'}."
        )
    return steps if step is None else [step]


def _nodes(reader: Reader) -> Iterator[Mapping[str, Any]]:
    """What stands for each array of a step, once, by name."""
    about = reader.state()
    try:
        every = [*parts.nodes(about["parts"]), about["random"]]
        found = {node["name"]: node for node in every}
    except (KeyError, TypeError) as error:
        raise damaged(reader.folder, f"its state lacks {error}") from error
    for name in sorted(found):
        yield found[name]


def _list(folder: Folder, steps: Sequence[int]) -> int:
    code = EXIT_RIGHT
    for step in steps:
        path = folder / str(step)
        size = ""  # a store of objects does not list it
        if isinstance(path, Path):
            found = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            size = f"{found:,} bytes"
        try:
            saved = datetime.fromtimestamp(Reader(path).state()["time_s"]).astimezone()
            when = saved.isoformat(sep=" ", timespec="seconds")
        except (CheckpointError, KeyError, TypeError) as error:
            when, code = f"cannot be read: {error}", EXIT_WRONG
        print(f"{step:>10}  {size:>22}  {when}")
    return code


def _show(path: Folder) -> int:
    rows = []
    for node in _nodes(Reader(path)):
        size = math.prod(node["shape"]) * getattr(torch, node["dtype"]).itemsize
        sharding = node.get("sharding") or node["device"]
        rows.append((node["name"], f"{node['dtype']}{node['shape']}", sharding, f"{size:,} bytes"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for *texts, size in rows:
        padded = [text.ljust(width) for text, width in zip(texts, widths)]
        print(*padded, size.rjust(widths[3]), sep="  ")
    return EXIT_RIGHT


def _verify(folder: Folder, steps: Sequence[int]) -> int:
    code = EXIT_RIGHT
    for step in steps:
        reader, count, wrong = Reader(folder / str(step)), 0, []
        try:
            for node in _nodes(reader):
                count += 1
                try:
                    check_array(reader, node)
                    index = tuple(slice(0, n) for n in node["shape"])
                    reader.check(node["name"], [(index, torch.empty(node["shape"], device="meta"))])
                except CheckpointError as error:
                    wrong.append(str(error))
        except CheckpointError as error:
            wrong.append(str(error))
        print(f"{step:>10}  {count} arrays: {'as written' if not wrong else 'WRONG'}")
        for text in wrong:
            print(f"error: {text}", file=sys.stderr)
            code = EXIT_WRONG
    return code


def _convert(options: argparse.Namespace) -> int:
    from spmd_core.checkpoint import convert  # noqa: PLC0415 - imports what writes

    source, target = folder_at(options.source), folder_at(options.target)
    ends = convert.SAFETENSORS + convert.TORCH
    if isinstance(target, Path) and target.suffix in ends and not target.is_dir():
        step = _chosen(source, options.step)[-1]
        convert.to_file(source / str(step), target, part=options.part, progress=_show_progress)
    elif isinstance(source, Path) and (source.suffix in ends or source.is_dir()):
        jax.config.update("jax_platforms", "cpu")  # leaves accelerators to those who use them
        step = options.step or 0
        convert.from_file(source, target, step, part=options.part, progress=_show_progress)
    else:
        raise CheckpointError(
            f"one of the two is a file whose name ends with one of {', '.join(ends)}; got "
            f"{options.source!r} and {options.target!r}. Name the target for instance "
            "model.safetensors."
        )
    print(f"step {step}: {source} -> {target}")
    return EXIT_RIGHT


def _show_progress(number: int, count: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == count else ""
        print(f"\r{number:,} of {count:,} tensors", end=end, file=sys.stderr, flush=True)
