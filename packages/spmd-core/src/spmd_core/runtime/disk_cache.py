"""The persistent cache of compiled programs: private, bounded, and damaged entries are replaced.

jax keeps compiled programs in a folder, and executes what it finds there. It never replaces an
entry that it cannot read, and bounds the folder only under a lock for each read. So `ProgramCache`
replaces jax's cache: each entry ends with a digest, and the time of its file says when it was last
used. Entries without a digest, of earlier releases or of jax itself, are read if they unpack.

Processes of one host that need the same program at once take turns (`compile_turns`).
"""

import functools
import hashlib
import os
import platform
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_core import releases
from spmd_core.config import config, user_cache
from spmd_core.runtime import compile_turns
from spmd_core.runtime.compile_turns import Turn

_jax_cache = releases.jax_module("jax._src.compilation_cache", "get_file_cache")
_jax_cache_key = releases.jax_module("jax._src.cache_key", "_hash_accelerator_config")

_SUFFIX, _UNFINISHED = "-cache", ".part"
_MARK = b"spmd-sha256:"
_NUM_BEHIND = len(_MARK) + hashlib.sha256().digest_size
_KEPT = 0.9  # entries are dropped down to this part of the limit, so that not every write drops one
_LEFTOVER_S = 3600.0  # an unfinished file that is older is left from a killed process


class ProgramCache:
    """Compiled programs by key, in a folder; has the interface of jax's cache.

    Args:
        folder: is made, for its owner alone, if it is missing.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _warn_of_others(folder)
        self._lock = threading.Lock()
        self._num_bytes: int | None = None  # in the folder; counted at the first write
        self._has_warned = False

    def get(self, key: str) -> bytes | None:
        """The entry; None if there is none, and this process is to compile.

        Waits for another process of this host that is compiling it. A damaged entry is removed,
        with one warning.
        """
        found, turn = self._read(key), compile_turns.this_thread.turn
        if found is None and turn is not None:
            found = turn.after_miss(self._path, key, lambda: self._read(key))
        return found

    def _read(self, key: str) -> bytes | None:
        path = self._file(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        value, digest = data[:-_NUM_BEHIND], data[-_NUM_BEHIND:]
        if digest.startswith(_MARK):
            is_whole = hashlib.sha256(value).digest() == digest[len(_MARK) :]
        else:
            value, is_whole = data, _unpacks(data)
        if is_whole:
            with suppress(OSError):  # of another user's folder
                os.utime(path)
            return value
        with suppress(OSError):
            path.unlink()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{path} is damaged: it is removed, and made again. "
                f"Further damaged entries are, too, without a warning. If it happens again, "
                f"check the disk of {self._path}, or set SPMD_CACHE_DIR to another folder.",
                stacklevel=2,
            )
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry, in place of an earlier one, and drops old ones beyond the limit.

        Raises:
            OSError: it cannot be written.
        """
        size = len(value) + _NUM_BEHIND
        if size > config.max_cache_bytes:
            return
        # Not `files.replacing`, which lists the folder and waits for the disk. A loss of power
        # costs a compile here.
        scratch = self._path / f"{key[:100]}.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            scratch.write_bytes(value + _MARK + hashlib.sha256(value).digest())
            scratch.replace(self._file(key))
            if compile_turns.this_thread.turn is not None:
                compile_turns.this_thread.turn.is_written(key)
        except BaseException:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        with self._lock:
            if self._num_bytes is None:
                self._num_bytes = sum(size for _, size, _ in self._entries())
            else:
                self._num_bytes += size
            if self._num_bytes > config.max_cache_bytes:
                self._num_bytes = self._drop()

    def clear(self) -> None:
        """Does nothing: the entries stay in the folder."""

    def _file(self, key: str) -> Path:
        return self._path / f"{key}{_SUFFIX}"

    def _entries(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its size and its path; other processes may remove some."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        found.append((about.st_mtime, about.st_size, Path(entry.path)))
        return found

    def _drop(self) -> int:
        """Removes what was used longest ago, and leftovers; returns the bytes that stay."""
        entries = sorted(self._entries())
        num_bytes = sum(size for _, size, _ in entries)
        for used_s, size, path in entries:
            is_old = used_s < time.time() - _LEFTOVER_S
            is_leftover = is_old and path.suffix in (_UNFINISHED, compile_turns.SUFFIX)
            is_entry = path.name.endswith(_SUFFIX)
            if is_leftover or (is_entry and num_bytes > _KEPT * config.max_cache_bytes):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    num_bytes -= size
        return num_bytes


def install() -> None:
    """Has jax keep the programs of `config.cache_dir` by a `ProgramCache`.

    Other folders, which the user has given to jax, are left to jax's own cache.
    """
    try:
        made_by_jax = _jax_cache.get_file_cache
    except ImportError:  # this jax has no such function; `releases.versions` says so
        return
    if hasattr(made_by_jax, "is_of_spmd_core"):
        return

    def made(path: str) -> Any:
        if path != config.cache_dir:
            return made_by_jax(path)
        try:
            return ProgramCache(Path(path)), path
        except OSError as error:
            warnings.warn(
                f"compiled programs are not kept: the folder {path} cannot be made: {error}. Set "
                "SPMD_CACHE_DIR to another folder, or to nothing.",
                stacklevel=2,
            )
            return None

    made.is_of_spmd_core = True  # type: ignore[attr-defined]
    _jax_cache.get_file_cache = made
    _share_keys()


def _share_keys() -> None:
    """Has all processes of a program on CPUs compute the same keys.

    jax's keys have a number of the devices that differs in each of the processes. Only process 0
    writes entries, so all others compiled in every run. This can go once XLA's topology of CPU
    devices has the same fingerprint in all processes.
    """
    try:
        of_jax = _jax_cache_key._hash_accelerator_config
    except ImportError:
        return

    def hashed(hash_object: Any, accelerators: np.ndarray) -> None:
        found = [*accelerators.flat]
        if found[0].platform != "cpu" or len({device.process_index for device in found}) < 2:
            of_jax(hash_object, accelerators)
            return
        places = [(device.id, device.process_index) for device in found]
        hash_object.update(repr((places, _processor())).encode())

    _jax_cache_key._hash_accelerator_config = hashed


@functools.cache
def _processor() -> str:
    """The processor and its features, for which XLA generates code."""
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in names}))


def stores() -> bool:
    """Whether jax stores each program that this process compiles, or leaves it to `store`."""
    return jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0.0


def store(turn: Turn, compiled: jax.stages.Compiled, text: Callable[[], str]) -> None:
    """Stores a program that jax does not store, as this is not process 0.

    Args:
        turn: the turn in which it was compiled.
        compiled: the program.
        text: returns its StableHLO. A program that calls functions of this process is not stored.
    """
    if turn.key is None or jax.process_index() == 0 or "callback" in text():
        return
    executable: Any = compiled.runtime_executable()
    try:
        _jax_cache.put_executable_and_time(
            turn.key, turn.key.partition("-")[0], executable, executable.client, 0
        )
    except Exception as error:  # of the serialization, or ImportError: the others compile
        warnings.warn(
            f"program {turn.key[:40]} is not stored for the other processes: {error}. They compile "
            "it as well.",
            stacklevel=2,
        )


def _unpacks(data: bytes) -> bool:
    try:
        _jax_cache.decompress_executable(data)
    except Exception:  # the type depends on the package that unpacks it
        return False
    return True


def _warn_of_others(folder: Path) -> None:
    """Warns if other users can write what this process will execute; fixes the mode of its own."""
    about = folder.stat()
    mine = about.st_uid == os.geteuid()
    if mine and about.st_mode & 0o022 and _is_default(folder):
        folder.chmod(0o700)
        about = folder.stat()
    if about.st_mode & 0o022 or not (mine or about.st_uid == 0):
        warnings.warn(
            f"programs in {folder} are executed, and other users can write there (mode "
            f"{stat.S_IMODE(about.st_mode):o}, owner {about.st_uid}). Run chmod go-w on a folder "
            "of yours, or set SPMD_CACHE_DIR to one.",
            stacklevel=2,
        )


def _is_default(folder: Path) -> bool:
    return folder == user_cache() / "xla"
