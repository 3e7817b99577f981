"""A recipe's command: its errors as one line each, its exit codes, and its devices."""

import os
import sys
from collections.abc import Callable

import torch

import spmd_core as spmd
from examples.training.collector import end_imports
from examples.training.knobs import EXIT_USAGE, KnobError, UsageError
from examples.training.mesh_sizes import mesh_sizes, wrong_product
from examples.training.resume import SaveError
from examples.training.run_config import RunConfig

EXIT_FAILED = 1


def exit_code(
    command: Callable[[], int | None],
    *,
    usage: tuple[type[Exception], ...] = (),
    failed: tuple[type[Exception], ...] = (),
) -> int:
    """Runs a command, and prints an error that its user can correct as a line on stderr.

    Args:
        command: returns the exit code of a run without an error; None for 0.
        usage: further errors of what the user gave, beside `UsageError`.
        failed: further errors that end a run.

    Returns:
        0; 1 if a run failed or a file could not be written; 2 for options, data, a
        saved run or a mesh that cannot work; 130 after Ctrl-C; 75 after SIGTERM, which asks to be
        started again.
    """
    end_imports()
    refused: tuple[type[Exception], ...] = (UsageError, spmd.errors.MeshError, *usage)
    broken: tuple[type[Exception], ...] = (SaveError, *failed)
    try:
        code = command()
    except refused as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except broken as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return code or 0


# Where torchrun, scripts/launch.sh, srun and mpirun put the number of processes.
_NUM_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def start_devices(num_emulated: int | None, *, auto: bool = False) -> None:
    """Joins the other processes of the run, if a launcher has started several, and SPMD mode.

    Args:
        num_emulated: CPU devices to emulate, in all processes together; None or 0 for real ones.
        auto: whether the mesh and the shardings are found when a program is first compiled.

    Raises:
        KnobError: the processes cannot emulate equally many, or their number is none.
    """
    name = next((name for name in _NUM_PROCESSES if name in os.environ), "")
    found = os.environ.get(name, "1")
    if not found.isdecimal() or int(found) < 1:
        raise KnobError(
            f"{name} is the number of processes, which a launcher sets, at least 1; got {found!r}. "
            "Correct it, or unset it."
        )
    num_processes = int(found)
    if num_emulated:
        if num_emulated % num_processes:
            raise KnobError(
                "each process emulates equally many devices; "
                f"got --devices {num_emulated} for {num_processes} processes. "
                f"Pass a multiple of {num_processes}."
            )
        spmd.simulate(num_emulated // num_processes)
    if num_processes > 1:
        spmd.distributed.initialize()
    spmd.use_spmd(auto=auto)


def device_of(config: RunConfig) -> torch.device:
    """The device that a recipe's options name; for `xla`, after `start_devices`."""
    if config.device == "cpu":
        return torch.device("cpu")
    start_devices(config.devices, auto=config.finds_mesh)
    return spmd.device()


def mesh_of(text: str, num_devices: int, *, num_emulated: int) -> spmd.Mesh:
    """The mesh that --mesh describes, over all devices.

    Args:
        text: see `spmd.parse_mesh`.
        num_devices: how many there are.
        num_emulated: what --devices said; 0: nothing.

    Raises:
        KnobError: the text is not a mesh, or one of another number of devices, which the CPU can
            emulate.
        spmd.errors.MeshError: the mesh does not fit devices that are not emulated.
    """
    try:
        return spmd.parse_mesh(text, num_devices)
    except spmd.errors.MeshError as error:
        if spmd.debugging.is_planning() or spmd.distributed.device_type() != "CPU":
            raise
        raise wrong_product(
            text, mesh_sizes(text), num_devices, is_emulated=num_emulated > 0
        ) from error
