"""How fast is this machine at the moment? A fixed job, timed again and again.

The job is what the timed rows do: a compiled program over emulated devices, whose threads share the
cores, with products, memory that is read and written once, and sums over the devices. A process of
its own holds it, and sleeps between two probes.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NUM_DEVICES, LAYERS, ROWS, WIDTH = 4, 8, 512, 512
REPEATS = 9


class Probe:
    """The process that holds the job. Starting it takes some seconds, and waits.

    Raises:
        RuntimeError: at any time, the process has ended; its words are on stderr.

    Example:
        >>> with Probe() as probe:
        ...     seconds = probe.seconds()
    """

    def __enter__(self) -> "Probe":
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C is the runner's
        )
        self.seconds()  # the first ones are slower
        return self

    def seconds(self) -> float:
        """Seconds of the job, the median of some. Takes about half a second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return float(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(
                "the process that times a fixed job must answer; it ended with exit code "
                f"{self._process.wait()}. Run the command again: it goes on where it was."
            ) from error

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `seconds` told
            self._process.stdin.close()  # ends it
        self._process.stdout.close()
        self._process.wait()


def _job() -> Callable[[], Any]:
    """The job; a call runs it, and waits."""
    import jax  # noqa: PLC0415  (only the process of the job needs it)
    import jax.numpy as jnp  # noqa: PLC0415

    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    rows, whole = jax.P("data"), jax.P()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = jnp.tanh(x @ weight)
            x = x - jax.lax.pmean(x, "data")
        return x

    x = jax.device_put(
        np.ones((NUM_DEVICES * ROWS, WIDTH), np.float32), jax.NamedSharding(mesh, rows)
    )
    weight = np.full((WIDTH, WIDTH), 1e-3, np.float32)
    return lambda: run(x, weight).block_until_ready()


def _serve() -> None:
    """Times the job for each line of the input, until it ends."""
    job = _job()
    job()
    for _ in sys.stdin:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            job()
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def drift(probes_s: Sequence[float]) -> float:
    """How much the machine's speed moves: a standard deviation of probes.

    Half the range of the middle 68% of them, which one that was disturbed does not decide.

    Args:
        probes_s: of `Probe.seconds`, over a while.

    Returns:
        A share of their median; 0 for less than two.
    """
    if len(probes_s) < 2:
        return 0.0
    low, high = np.quantile(probes_s, (0.16, 0.84))
    return float((high - low) / 2 / statistics.median(probes_s))


if __name__ == "__main__":
    _serve()
