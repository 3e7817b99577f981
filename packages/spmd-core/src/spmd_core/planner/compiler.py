"""Compiles one StableHLO module for a TPU topology, up to buffer assignment.

This is a script of its own, run by its path: it imports neither torch nor this package, so it
starts fast and takes little memory. XLA writes the optimised module and its buffer assignment after
about a fifth of a compilation. The rest generates machine code, which nobody runs, and takes most
of the memory; so the process ends before that, unless the size of the code was requested.

Input: a folder with `REQUEST` and `MODULE`. Output: XLA's texts in that folder, or `ERROR`, and
`CODE_BYTES` if requested.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

REQUEST, MODULE, ERROR = "request.json", "module.mlirbc", "error.txt"
CODE_BYTES = "code_bytes.txt"
# The file that XLA writes right after those that a plan reads. If a compiler does not write it,
# this waits for the end of the compilation.
_FURTHER = "*.after_optimizations_after_buffer_assignment.txt"
_POLL_S = 0.05
# With more arguments than this, jax passes those of a TPU's program as one tuple.
_MAX_ARGUMENTS = 2000


def main(folder: Path) -> int:
    """Compiles the module in the folder.

    Returns:
        0, also if the compiler refuses the module; its message is then in `ERROR`.
    """
    request = json.loads((folder / REQUEST).read_text())
    _in_background(_wait_for_the_end_of_the_parent)
    found: Any = topologies.get_topology_desc(**request["topology"]).devices
    by_id = {device.id: device for device in found}
    chosen = [by_id[number] for number in request["device_ids"]]
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / MODULE).read_bytes())
        options = _options(module, request)
        if not request["machine_code"]:
            _in_background(_wait_for_texts, folder)
        try:
            made = found[0].client.compile(
                module,
                executable_devices=xla_client.DeviceList(tuple(chosen)),
                compile_options=options,
            )
        except jax.errors.JaxRuntimeError as error:
            (folder / ERROR).write_text(str(error))
            return 0
    code_bytes = made.get_compiled_memory_stats().generated_code_size_in_bytes
    (folder / CODE_BYTES).write_text(str(code_bytes))
    return 0


def _options(module: ir.Module, request: dict[str, Any]) -> xla_client.CompileOptions:
    """The options with which `jax.jit` compiles a module whose arguments have shardings."""
    ids = request["device_ids"]
    function: Any = ir.SymbolTable(module.operation)["main"]
    num_arguments = len(function.arguments)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(ids)
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([ids], np.int32))
    options.parameter_is_tupled_arguments = num_arguments > _MAX_ARGUMENTS
    options.profile_version = -1  # no profile is given
    options.env_option_overrides = list(request["options"].items())
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = request["use_shardy"]
    build.allow_spmd_sharding_propagation_to_parameters = [False] * num_arguments
    build.allow_spmd_sharding_propagation_to_output = [
        len(ids) > 1 and "sdy.sharding" not in result and "mhlo.sharding" not in result
        for result in function.attributes["res_attrs"]
    ]
    return options


def _wait_for_texts(folder: Path) -> None:
    while not any(folder.glob(_FURTHER)):
        time.sleep(_POLL_S)
    _end(0)


def _wait_for_the_end_of_the_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent ends, which closes the pipe
    _end(1)


def _in_background(function: Callable[..., None], *arguments: Path) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _end(code: int) -> None:
    """Ends the process while the compiler's threads still run."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _end(main(Path(sys.argv[1])))
    except BaseException:  # Python's regular exit would wait for the threads, and crash
        traceback.print_exc()
        _end(1)
