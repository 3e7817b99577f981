"""How fast a save goes on behind the steps of devices that compute on the cores that write.

What a save takes of the cores and of the memory's bandwidth, the steps lack. So its threads take a
small share of a core's time, until somebody waits for them: then they rest no more. A thread that
rests sleeps; one of the lowest priority would hold Python's lock where it is not let run.
"""

import threading
import time

# Of a core's time: a step has the rest, on machines with few cores too.
_SHARE = 0.04
# A save is whole after this part of the time that passed between the two saves before it, however
# large it is: the next one need not wait for it.
_PART = 0.75


class Pace:
    """The pace of one save. Of all threads that write it.

    Args:
        num_bytes: that it writes.
        interval_s: the time between the two saves before it, in seconds.
    """

    def __init__(self, num_bytes: int, interval_s: float) -> None:
        self._num_bytes, self._within_s = num_bytes, _PART * interval_s
        self._begun = time.monotonic()
        self._ended = threading.Event()
        # Guarded by the lock: what all threads have done.
        self._lock = threading.Lock()
        self._bytes, self._cpu_s = 0, 0.0

    def rest(self, num_bytes: int, cpu_s: float) -> None:
        """Waits as long as a thread should that has written something.

        Args:
            num_bytes: that it has written.
            cpu_s: the time that it took of a core, in seconds.
        """
        with self._lock:
            self._bytes += num_bytes
            self._cpu_s += cpu_s
            due_s = min(self._cpu_s / _SHARE, self._within_s * self._bytes / self._num_bytes)
        wait_s = self._begun + due_s - time.monotonic()
        if wait_s > 0:
            self._ended.wait(wait_s)

    def end(self) -> None:
        """Nobody rests any more, as somebody waits."""
        self._ended.set()
