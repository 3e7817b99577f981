"""Is every restore whole, whatever ends a save: kills, a full disk, damaged and deleted files?

    python -m benchmarks.checkpoint_faults
        100 kills of 1 process with 8 devices, 100 of 2 with 4 each, and the faults of files
    python -m benchmarks.checkpoint_faults --kills 10 --trials 10
        less of it

A run saves every step, and a SIGKILL ends it at a random moment; another one goes on in its folder,
and first compares all steps that are there with what they must be. None may be wrong, and none be
lost that `wait()` had returned for. Then a small file system fills up and becomes read-only (which
needs the right to mount one). At last, of a step that is whole, a random byte of a file is changed,
or half of a file or all of it is removed: each restore is refused and changes nothing, or gives the
right values; and the step before restores.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.checkpoint_faults"
    parser.add_argument("--kills", type=whole(0), default=100, help="for each form (default 100)")
    parser.add_argument("--trials", type=whole(0), default=100, help="of files (default 100)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the moments and places")
    args = parser.parse_args()

import torch
from tqdm import tqdm

import spmd_core as spmd
from spmd_core.checkpoint import folder as steps
from spmd_core.checkpoint import lock
from spmd_core.errors import CheckpointError

NUM_DEVICES = 8
_WAIT_S = 60.0  # for a process to begin, or to end by itself
_FULL_BYTES = 4 << 20
_MOST_STEPS = 1900  # half precision counts exactly up to 2048


class State:
    """Tensors of several kinds whose values say the step: each grows by 1 in one.

    Args:
        device: xla, or cpu.
    """

    def __init__(self, device: str = "xla") -> None:
        mesh = spmd.Mesh(range(NUM_DEVICES), (4, 2), ("x", "y"))
        specs: dict[str, tuple[Any, ...]] = {
            "both": ("x", "y"), "rows": ("x",), "uneven": (None, "y"), "whole": (), "half": ("y",),
            "numbers": ("x",),
        }  # fmt: skip
        self.tensors = {name: first(name).to(device) for name in specs}
        if device == "xla":
            for name, spec in specs.items():
                spmd.mark_sharding(self.tensors[name], mesh, spec)

    def advance(self) -> None:
        """To the next step."""
        for tensor in self.tensors.values():
            tensor += 1

    def check(self, step: int) -> None:
        """Raises AssertionError if a value is not that of a step."""
        for name, tensor in self.tensors.items():
            expected = first(name) + step
            assert torch.equal(tensor.cpu(), expected), f"{name} is not that of step {step}"

    def parts(self, step: int) -> dict[str, Any]:
        """What is saved."""
        return {"tensors": self.tensors, "step": step}


def first(name: str) -> torch.Tensor:
    """The values of step 0, small whole numbers."""
    size, dtype = {
        "both": ((64, 64), torch.float32),
        "rows": ((63, 5), torch.float32),
        "uneven": ((3, 7), torch.float64),
        "whole": ((), torch.float32),
        "half": ((40, 30), torch.float16),
        "numbers": ((1001,), torch.int64),
    }[name]
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(64, size, generator=generator).to(dtype)


# --- Kills ----------------------------------------------------------------------------------------


def train(folder: str, log: str, rank: int, count: int, port: int, last: int) -> None:
    """One process of a run that saves every step; what it knows to be whole is in its log."""
    with open(f"{log}.errors", "a", buffering=1) as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    spmd.simulate(NUM_DEVICES // count)
    if count > 1:
        spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    spmd.use_spmd()
    state, done = State(), 0
    with open(log, "a", buffering=1) as said, spmd.CheckpointManager(folder, keep=3) as manager:
        for done in manager.all_steps():
            assert manager.restore(state.parts(0), done).state["step"] == done
            state.check(done)
            print("right", done, file=said)
        print("from", done, file=said)
        for step in range(done + 1, last + 1):
            state.advance()
            manager.save(step, state.parts(step))
            print("whole", step - 1, file=said)  # one save is in flight
            if step % 3 == 0:
                manager.wait()
                print("whole", step, file=said)
        manager.wait()
        print("whole", last, file=said)


def kills(count: int, number: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Kills a run of `count` processes so often; returns what came of it.

    Raises:
        RuntimeError: a restore was wrong, a step was lost, or a process did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spmd_core.checkpoint"])
    draw, found = random.Random(seed), Counter[str]()
    folder = scratch / f"{count}"
    promised = 0
    # In one run more, nothing is killed: it ends by itself.
    desc = f"kills of {count} x {NUM_DEVICES // count}"
    for round_ in tqdm(range(number + 1), desc=desc, disable=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs = [scratch / f"{count}.{round_}.{rank}" for rank in range(count)]
        last = _MOST_STEPS if round_ < number else promised + 5
        every = [
            context.Process(target=train, args=(str(folder), str(log), rank, count, port, last))
            for rank, log in enumerate(logs)
        ]
        for process in every:
            process.start()
        if round_ < number:
            if draw.random() < 0.8:
                _until_all_have_saved(logs, every)
                time.sleep(draw.uniform(0, 0.5))
            else:  # perhaps while it starts, restores, or saves for the first time
                time.sleep(draw.uniform(0, 5))
            victim, *others = draw.sample(every, count)
            victim.kill()
            for other in others:  # which ends by itself, but for what is killed with its host
                other.join(draw.uniform(0, 0.2))
                other.kill()
            found["in the middle of a save"] += folder.exists() and any(
                lock.UNFINISHED in path.name for path in folder.iterdir()
            )
        for process in every:
            process.join(_WAIT_S)
        codes = [process.exitcode for process in every]
        errors = [Path(f"{log}.errors") for log in logs]
        text = "".join(path.read_text()[-3000:] for path in errors if path.exists())
        if round_ == number and codes != [0] * count:
            raise RuntimeError(f"the last run must end well; got {codes}: {text}")
        if "AssertionError" in text or "CheckpointError" in text:
            raise RuntimeError(f"round {round_}: a restore was wrong or refused: {text}")
        lines = [
            line.split() for log in logs if log.exists() for line in log.read_text().splitlines()
        ]
        for step in (int(step) for what, step in lines if what == "from"):
            found["restores"] += step > 0
            if step < promised:
                raise RuntimeError(f"step {promised} was whole; the run is at {step}")
        found["steps compared"] += sum(what == "right" for what, _ in lines)
        promised = max([promised, *(int(step) for what, step in lines if what == "whole")])
        there = max(steps.whole_steps(folder), default=0)
        if there < promised:
            raise RuntimeError(f"step {promised} was whole, and is lost: the newest is {there}")
    return {"kills": number, "steps": promised, **found}


def _until_all_have_saved(logs: list[Path], every: list[Any]) -> None:
    """Waits until all processes have saved a step, or one has ended."""
    deadline = time.monotonic() + _WAIT_S
    while not all(log.exists() and log.read_text().count("whole") > 1 for log in logs):
        if time.monotonic() > deadline or any(one.exitcode is not None for one in every):
            return
        time.sleep(0.005)


# --- Files ----------------------------------------------------------------------------------------


def file_faults(folder: Path, trials: int, seed: int) -> dict[str, dict[str, int]]:
    """Changes and removes files of a step that is whole, one at a time."""
    draw, state = random.Random(seed), State()
    found: dict[str, dict[str, int]] = {}
    with spmd.CheckpointManager(folder, async_=False) as manager:
        for step in (1, 2):
            state.advance()
            manager.save(step, state.parts(step))
        files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
        for fault in ("a byte changed", "half of a file gone", "a file removed"):
            counted = Counter[str]()
            for trial in tqdm(range(trials), desc=fault, disable=None):
                path = files[trial % len(files)]
                content = path.read_bytes()
                if not content and fault != "a file removed":
                    continue
                if fault == "a byte changed":
                    changed, place = bytearray(content), draw.randrange(len(content))
                    changed[place] ^= 1 << draw.randrange(8)
                    path.write_bytes(changed)
                elif fault == "half of a file gone":
                    path.write_bytes(content[: len(content) // 2])
                else:
                    path.unlink()
                counted[_restored(manager, state)] += 1
                path.write_bytes(content)
            found[fault] = dict(counted)
    return found


def _restored(manager: Any, state: State) -> str:
    """What a restore of the damaged step 2 does: of a state whose values are of step 1."""
    assert manager.restore(state.parts(0), 1).step == 1
    state.check(1)
    try:
        manager.restore(state.parts(0), 2)
    except CheckpointError as error:
        state.check(1)  # as it was
        told = "step=1" in str(error) or "Its steps are 1" in str(error)
        return "refused" if told else f"refused without advice: {error}"
    state.check(2)
    return "right"


def full_and_read_only(folder: Path) -> dict[str, str]:
    """Saves to a small file system until it is full, and when it can only be read.

    Returns:
        What was said of each.
    """
    said, state = {}, State()
    with mounted(folder), spmd.CheckpointManager(folder / "run") as manager:
        step = 0
        while step < 1000:
            step += 1
            state.advance()
            try:
                manager.save(step, state.parts(step))
                manager.wait()
            except CheckpointError as error:
                said["a full disk"] = str(error)
                break
        whole_ones = manager.all_steps()
        assert "No space left" in said["a full disk"] and whole_ones == [*range(1, step)]
        manager.restore(state.parts(0))
        state.check(step - 1)
        # There is room again.
        manager.remove_after(1)
        state.advance()
        manager.save(step, state.parts(step))
        manager.wait()
        with read_only(folder):
            try:
                manager.save(step + 1, state.parts(step))
                manager.wait()
            except CheckpointError as error:
                said["a read-only folder"] = str(error)
            assert "Read-only" in said["a read-only folder"]
            assert manager.restore(state.parts(0)).step == step
        manager.save(step + 1, state.parts(step))
    return said


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A file system in memory of `_FULL_BYTES` at a folder."""
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={_FULL_BYTES}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", str(folder))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, what is opened by the folder's name can only be read."""
    _run("mount", "--bind", str(folder), str(folder))
    try:
        _run("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        _run("umount", str(folder))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def may_mount(scratch: Path) -> bool:
    """Whether this process may mount a file system."""
    try:
        with mounted(scratch / "tried"):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def main(args: argparse.Namespace) -> int:
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-faults-"))
    rows, result = [], {}
    try:
        for count in (1, 2) if args.kills else ():
            name = f"{args.kills} kills, {count} x {NUM_DEVICES // count}"
            found = kills(count, args.kills, args.seed, scratch)
            result[name] = found
            rows.append(
                [
                    name,
                    f"{found['steps']} steps saved, none lost; {found['steps compared']} restored "
                    "and compared, all right; "
                    f"{found['in the middle of a save']} kills in the middle of a save",
                ]
            )
        spmd.simulate(NUM_DEVICES)
        spmd.use_spmd()
        for fault, counted in file_faults(scratch / "files", args.trials, args.seed).items():
            result[fault] = counted
            rows.append([fault, ", ".join(f"{n} {what}" for what, n in sorted(counted.items()))])
        if may_mount(scratch):
            result["disk"] = full_and_read_only(scratch / "disk")
            rows += [[fault, "told, and the step before restored"] for fault in result["disk"]]
        else:
            rows.append(["a full disk, a read-only folder", "not tried: mount is not allowed"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = Table(
        "Saves that something ended",
        ("fault", "what came of it"),
        rows,
        ["Of a changed file, a restore is refused, or right: not every byte is read."],
    )
    publish("checkpoint_faults", table, result, folder=args.out)
    is_told = all("without advice" not in row[1] for row in rows)
    return 0 if is_told else 1


if __name__ == "__main__":
    sys.exit(main(args))
