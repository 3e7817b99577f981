"""The command line of a recipe: its errors as one line each, and its exit codes."""

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


def num_real_devices() -> int:
    """The number of devices, from a process that ends: the runs need the devices themselves."""
    script = "import spmd_core; print(spmd_core.global_runtime_device_count())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
