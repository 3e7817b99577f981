"""Where the processes that write a step meet: all go on, or all learn that one has failed.

A barrier alone knows nothing of failures: those who wait for a process that gave up would wait
until a deadline of many minutes.
"""

import time
from typing import Any

from spmd_core import releases
from spmd_core.errors import CheckpointError
from spmd_core.runtime import processes

_distributed = releases.jax_module("jax._src.distributed", "global_state")
_PAUSE_S = 0.02


class Meetings:
    """The meetings of one step after the other, by jax's coordination service.

    Each process makes the same calls for the same steps, but for those that fail.

    Args:
        name: tells the managers of a program apart.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_steps = self._num_meetings = 0

    def begin(self) -> None:
        """Another step, in which nobody has failed."""
        self._num_steps += 1
        self._num_meetings = 0

    def meet(self, key: str, timeout_ms: int) -> None:
        """Waits for all processes, at a meeting that a text names.

        Raises:
            CheckpointError: one of them has failed.
            TimeoutError: one of them did not come.
        """
        if processes.process_count() == 1:
            return
        self._num_meetings += 1
        here = f"{self._folder()}/met/{self._num_meetings}"
        client, everyone = _client(), processes.process_count()
        client.key_value_set(f"{here}/{processes.process_index()}", "here")
        deadline = time.monotonic() + timeout_ms / 1000
        while len(client.key_value_dir_get(f"{here}/")) < everyone:
            if failed := client.key_value_dir_get(f"{self._folder()}/failed/"):
                told = "; ".join(f"process {k.rpartition('/')[2]}: {text}" for k, text in failed)
                raise CheckpointError(
                    f"every process must write its part of a step; got a failure of {told}. Look "
                    "at its own error."
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"all {everyone} processes meet when each has written its part; one did not "
                    f"come to {key!r} within {timeout_ms / 1000:.0f} s. Look whether it is alive."
                )
            time.sleep(_PAUSE_S)

    def fail(self, error: BaseException) -> None:
        """Tells the others, once, that this process has failed."""
        if processes.process_count() > 1:
            _client().key_value_set(
                f"{self._folder()}/failed/{processes.process_index()}",
                " ".join(str(error).split())[:1000] or type(error).__name__,
                allow_overwrite=True,
            )

    def _folder(self) -> str:
        return f"spmd/checkpoint/{self._name}/{self._num_steps}"


def _client() -> Any:
    return _distributed.global_state.client
