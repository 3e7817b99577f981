"""Compiles programs for absent TPUs, up to buffer assignment."""

import json
import os
import subprocess
import sys
import time
import types
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
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import replicated

# The script is not imported, as it runs in another process. The names are those that it uses.
_COMPILER = Path(__file__).with_name("compiler.py")
_REQUEST, _MODULE, _ERROR = "request.json", "module.mlirbc", "error.txt"
_CODE_BYTES = "code_bytes.txt"
_OPTIMISED = "*.after_optimizations.txt"


@dataclass(frozen=True)
class _Text:
    """Stands in for an executable: the optimised module that XLA wrote into a folder."""

    folder: Path

    def as_text(self) -> str:
        return next(self.folder.glob(_OPTIMISED)).read_text()


def compile_buffers(lowered: Lowered, topology: Topology, *, machine_code: bool) -> Program:
    """A program that cannot run, with its buffer assignment and its optimised module.

    Another process compiles it (`planner/compiler.py`), and ends after buffer assignment. The
    program's record has no FLOPs, and no bytes but those of machine code; `buffer_text.read` has
    the bytes of buffers.

    Args:
        lowered: the program. Each result has a mark or is a scalar.
        topology: the TPUs.
        machine_code: whether to generate machine code, for its size. It takes most of the time and
            memory of a compilation.

    Raises:
        JaxRuntimeError: the compiler refused the program, for instance because it does not fit.
        PlanError: the compiler's process ended without a result.
    """
    start = time.perf_counter()
    options = compile_options(lowered.graph)
    folder = Path(options.pop("xla_dump_to"))
    ids = [device.id for device in lowered.devices]
    record = new_record(lowered.graph, lowered.name)
    with counters.timed(counters.Activity.COMPILING):
        record.code_bytes = write_buffers(
            lowered.stage, folder, topology, ids, options, machine_code=machine_code
        )
    record.trace_s, record.compile_s = lowered.trace_s, time.perf_counter() - start
    record.loops, record.unfolded = lowered.loops, lowered.unfolded
    everywhere = Placement.of(replicated(lowered.graph.device_ids), None)
    placements = tuple(placement or everywhere for placement in lowered.out_placements)
    return Program(lowered, _Text(folder), placements, record, str(folder))


def write_buffers(
    lowered: Any,
    folder: Path,
    topology: Topology,
    device_ids: Sequence[int],
    options: Mapping[str, str | bool] = types.MappingProxyType({}),
    *,
    machine_code: bool = False,
) -> int:
    """Has XLA write a program's buffer assignment and its optimised module into a folder.

    Args:
        lowered: the program, by `jax.jit(...).lower(...)`. Each argument and result has a sharding.
        folder: created here. `buffer_text.read` reads it.
        topology: the TPUs.
        device_ids: the devices of the program, in the mesh's order.
        options: further XLA options.
        machine_code: whether to compile to the end, for the size of the machine code.

    Returns:
        The bytes of machine code; 0 without `machine_code`.

    Raises:
        JaxRuntimeError: the compiler refused the program, for instance because it does not fit.
        PlanError: the compiler's process ended without a result.
    """
    folder.mkdir(parents=True)
    request = {
        "topology": topology.request,
        "device_ids": list(device_ids),
        "use_shardy": jax.config.values["jax_use_shardy_partitioner"],
        "machine_code": machine_code,
        "options": {**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True},
    }
    (folder / _REQUEST).write_text(json.dumps(request))
    module = lowered.compiler_ir("stablehlo")
    with (folder / _MODULE).open("wb") as file:
        module.operation.write_bytecode(file)
    _run(folder)
    error = folder / _ERROR
    if error.exists():
        raise jax.errors.JaxRuntimeError(error.read_text())
    return int((folder / _CODE_BYTES).read_text()) if machine_code else 0


def _run(folder: Path) -> None:
    """Runs the compiler's process on a folder, to its end; an interruption ends it, too."""
    # -P keeps the script's folder off sys.path: it has modules with the names of other packages.
    words = [sys.executable, "-P", str(_COMPILER), str(folder)]
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    with (folder / "stderr.txt").open("w+b") as words_of_it:
        with devices.libtpu_without_tpus():
            # libtpu aborts for XLA_FLAGS that it does not know, such as those of the CPU backend.
            # Its own flags are in LIBTPU_INIT_ARGS.
            kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=words_of_it,
                env={**kept, "PYTHONPATH": search_path},
            )
        try:
            code = child.wait()
        finally:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        if code:
            words_of_it.seek(0)
            lines = words_of_it.read().decode(errors="replace").strip().splitlines()
            raise PlanError(
                "the compiler's process must end with a result or an error of XLA; it ended with "
                f"code {code} and {lines[-1] if lines else 'no message'!r}. Linux ends a process "
                "with code -9 when the host's memory is used up: plan on a host with more memory."
            )
