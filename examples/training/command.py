"""The command line of a recipe: its errors as one line each, and its exit codes."""

import os
import subprocess
import sys
from collections.abc import Callable

import spmd_core as spmd
from examples.training.compare import CompareError
from examples.training.knobs import KnobError
from examples.training.resume import ResumeError, SaveError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def exit_code(
    command: Callable[[], bool],
    *,
    usage: tuple[type[Exception], ...] = (),
    failed: tuple[type[Exception], ...] = (),
) -> int:
    """Runs a command, and prints an error that its user can mend as a line on stderr.

    Args:
        command: returns whether it was interrupted.
        usage: further errors of what the user gave.
        failed: further errors that end a run.

    Returns:
        0; 1 if a run failed or a file could not be written; 2 for options, data, a
        saved run or a mesh that cannot work; 130 after Ctrl-C.
    """
    try:
        interrupted = command()
    except (KnobError, ResumeError, spmd.MeshError, *usage) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (CompareError, SaveError, *failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if interrupted else 0


# How torchrun, scripts/launch.sh, srun and mpirun tell the number of processes.
_NUM_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def start_devices(num_emulated: int | None) -> None:
    """Joins the other processes of the run, if a launcher has started several, and SPMD mode.

    Args:
        num_emulated: CPU devices to emulate, in all processes together; None or 0 for real ones.

    Raises:
        KnobError: the processes cannot emulate equally many.
    """
    found = next((os.environ[name] for name in _NUM_PROCESSES if name in os.environ), "1")
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
        spmd.initialize()
    spmd.use_spmd()


def num_real_devices() -> int:
    """The number of devices, from a process that ends: the runs need the devices themselves."""
    script = "import spmd_core; print(spmd_core.global_runtime_device_count())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
