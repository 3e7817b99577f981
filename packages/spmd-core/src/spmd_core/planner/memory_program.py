"""Compiles programs for absent TPUs, up to buffer assignment."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmd_core import counters
from spmd_core.errors import PlanError
from spmd_core.graph.placement import Placement
from spmd_core.planner.topology import Topology
from spmd_core.program.compilation import compile_options
from spmd_core.program.lower import Lowered
from spmd_core.program.program import Program, new_record
from spmd_core.runtime import abstract, devices
from spmd_core.runtime.jax_sharding import replicated

# The script is not imported, as it runs in another process. The names are those that it uses.
_COMPILER = Path(__file__).with_name("compiler.py")
_REQUEST, _MODULE, _ERROR = "request.json", "module.mlirbc", "error.txt"
_CODE_BYTES = "code_bytes.txt"
_OPTIMISED = "*.after_optimizations.txt"
# With more operations than this, a compilation takes gigabytes of the host's memory: of a step of
# 80 layers, 18,700 operations, 6.7 GB. With one of glibc's arenas, to which all of the compiler's
# threads return what they have taken, it takes 4.7 GB, and up to 12% longer.
_MOST_OPERATIONS = 10_000


@dataclass(frozen=True)
class _Text:
    """Stands in for an executable: the optimised module that XLA wrote into a folder."""

    folder: Path

    def as_text(self) -> str:
        return next(self.folder.glob(_OPTIMISED)).read_text()


class Compilation:
    """A program for absent TPUs, which another process compiles (`planner/compiler.py`).

    It begins at once. The process ends after buffer assignment. A program whose texts a
    compilation of the same plan has left (`abstract.Run.texts`) needs no process.

    Args:
        lowered: the program. Each result has a mark or is a scalar.
        topology: the TPUs.
        machine_code: whether to generate machine code, for its size. It takes most of the time and
            memory of a compilation.

    Attributes:
        is_large: whether it takes gigabytes of the host's memory.
    """

    def __init__(self, lowered: Lowered, topology: Topology, *, machine_code: bool) -> None:
        self._lowered, self._started_s = lowered, time.perf_counter()
        self.is_large = len(lowered.graph.nodes) > _MOST_OPERATIONS
        options = compile_options(lowered.graph)
        self._folder = Path(options.pop("xla_dump_to"))
        ids = [device.id for device in lowered.devices]
        request = _request(topology, ids, options, machine_code=machine_code)
        plan = abstract.run()
        assert plan is not None
        self._texts, self._key = plan.texts, _key(request, lowered)
        known = self._texts.get(self._key)
        self._child: _Child | None = None
        if known is not None and known.exists():
            self._folder = known
        else:
            self._child = _begin(lowered.stage, self._folder, request, saves_memory=self.is_large)

    def is_done(self) -> bool:
        """Whether `result` need not wait."""
        return self._child is None or self._child.has_ended()

    def result(self) -> Program:
        """The program, which cannot run, with its buffer assignment and its optimised module.

        Its record has no FLOPs, and no bytes but those of machine code; `buffer_text.read` has the
        bytes of buffers. Waits for the compiler; an interruption ends its process.

        Raises:
            JaxRuntimeError: the compiler refused the program, for instance because it does not fit.
            PlanError: the compiler's process ended without a result.
        """
        lowered = self._lowered
        record = new_record(lowered.graph, lowered.name)
        with counters.timed(counters.Activity.COMPILING):
            if self._child is not None:
                self._child.wait()
            record.code_bytes = _code_bytes(self._folder)
        self._texts[self._key] = self._folder
        record.trace_s = lowered.trace_s
        record.compile_s = time.perf_counter() - self._started_s
        record.loops, record.unfolded = lowered.loops, lowered.unfolded
        everywhere = Placement.of(replicated(lowered.graph.device_ids), None)
        placements = tuple(placement or everywhere for placement in lowered.out_placements)
        return Program(lowered, _Text(self._folder), placements, record, str(self._folder))

    def end(self) -> None:
        """Ends the compiler's process, if it still runs."""
        if self._child is not None:
            self._child.end()


def compile_buffers(lowered: Lowered, topology: Topology, *, machine_code: bool) -> Program:
    """The result of a `Compilation`.

    Args:
        lowered, topology, machine_code: see `Compilation`.

    Raises:
        JaxRuntimeError, PlanError: as `Compilation.result`.
    """
    made = Compilation(lowered, topology, machine_code=machine_code)
    try:
        return made.result()
    finally:
        made.end()


def write_buffers(
    lowered: Any, folder: Path, topology: Topology, device_ids: Sequence[int]
) -> None:
    """Has XLA write a program's buffer assignment and its optimised module into a folder.

    Args:
        lowered: the program, by `jax.jit(...).lower(...)`. Each argument and result has a sharding.
        folder: created here. `buffer_text.read` reads it.
        topology: the TPUs.
        device_ids: the devices of the program, in the mesh's order.

    Raises:
        JaxRuntimeError: the compiler refused the program, for instance because it does not fit.
        PlanError: the compiler's process ended without a result.
    """
    child = _begin(lowered, folder, _request(topology, device_ids, {}, machine_code=False))
    try:
        child.wait()
        _code_bytes(folder)
    finally:
        child.end()


def _request(
    topology: Topology,
    device_ids: Sequence[int],
    options: Mapping[str, str | bool],
    *,
    machine_code: bool,
) -> dict[str, Any]:
    """What the compiler's process is asked for, beside the module."""
    return {
        "topology": topology.request,
        "device_ids": list(device_ids),
        "use_shardy": jax.config.values["jax_use_shardy_partitioner"],
        "machine_code": machine_code,
        "options": dict(options),
    }


def _key(request: Mapping[str, Any], lowered: Lowered) -> str:
    """What decides a compiler's texts, but for the program's name, and who had it lowered."""
    module: Any = lowered.stage.compiler_ir("stablehlo")
    text = module.operation.get_asm(enable_debug_info=False).replace(lowered.name, "")
    lines = [str(node.origin) for node in lowered.graph.nodes]  # they name the operations
    return hashlib.sha256("\n".join([json.dumps(request), *lines, text]).encode()).hexdigest()


def _begin(
    lowered: Any, folder: Path, request: Mapping[str, Any], *, saves_memory: bool = False
) -> "_Child":
    """Starts a process that compiles a program into a folder."""
    folder.mkdir(parents=True)
    dumps = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    whole = {**request, "options": {**request["options"], **dumps}}
    (folder / _REQUEST).write_text(json.dumps(whole))
    module = lowered.compiler_ir("stablehlo")
    with (folder / _MODULE).open("wb") as file:
        module.operation.write_bytecode(file)
    return _Child(folder, saves_memory=saves_memory)


def _code_bytes(folder: Path) -> int:
    """The bytes of machine code that were counted; 0 without.

    Raises:
        JaxRuntimeError: the compiler refused the program.
    """
    error, found = folder / _ERROR, folder / _CODE_BYTES
    if error.exists():
        raise jax.errors.JaxRuntimeError(error.read_text())
    return int(found.read_text()) if found.exists() else 0


class _Child:
    """The compiler's process on a folder.

    Args:
        folder: see `compiler.py`.
        saves_memory: whether all of its threads share one of glibc's arenas.
    """

    def __init__(self, folder: Path, *, saves_memory: bool = False) -> None:
        # -P keeps the script's folder off sys.path: it has modules with the names of other
        # packages.
        words = [sys.executable, "-P", str(_COMPILER), str(folder)]
        search_path = os.pathsep.join(entry for entry in sys.path if entry)
        self._words_of_it = folder / "stderr.txt"
        with self._words_of_it.open("wb") as file, devices.libtpu_without_tpus():
            # libtpu aborts for XLA_FLAGS that it does not know, such as those of the CPU backend.
            # Its own flags are in LIBTPU_INIT_ARGS.
            kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
            if saves_memory:
                kept.setdefault("MALLOC_ARENA_MAX", "1")
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env={**kept, "PYTHONPATH": search_path},
            )

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Waits for its end; an interruption ends it, too.

        Raises:
            PlanError: it ended without a result.
        """
        try:
            code = self._process.wait()
        finally:
            self.end()
        if code:
            lines = self._words_of_it.read_text(errors="replace").strip().splitlines()
            raise PlanError(
                "the compiler's process must end with a result or an error of XLA; it ended with "
                f"code {code} and {lines[-1] if lines else 'no message'!r}. Linux ends a process "
                "with code -9 when the host's memory is used up: plan on a host with more memory."
            )

    def end(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
