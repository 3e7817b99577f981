"""What processes tell each other on the host: texts that must be equal in all of them.

They go through the store of jax's coordination service, in process 0, and not over the devices: no
program has to run, and a process that does not come is named after a time.
"""

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from spmd_core import releases
from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.runtime import devices

_distributed = releases.jax_module("jax._src.distributed", "global_state")
# How often each group of processes has agreed on each topic.
_count: dict[tuple[str, tuple[int, ...]], int] = {}
_lock = threading.Lock()


def client() -> Any:
    """jax's client of the coordination service; None in a program of one process."""
    return _distributed.global_state.client if devices.num_processes() > 1 else None


def of_process_0(topic: str, text: str) -> str:
    """Process 0's text, in all processes; all must call this, as often as the others.

    For what is measured, such as a time, before the program depends on it. Waits for process 0.

    Raises:
        ProcessError: process 0 did not come within `config.process_timeout_s`.
    """
    service = client()
    if service is None:
        return text
    with _lock:
        count = _count[topic, ()] = _count.get((topic, ()), 0) + 1
    key = f"spmd/{topic}/{count}"
    if _distributed.global_state.process_id == 0:
        service.key_value_set(key, text)
        return text
    try:
        found: str = service.blocking_key_value_get(key, round(config.process_timeout_s * 1000))
        return found
    except Exception as error:
        raise ProcessError(
            f"process 0 decides on the {topic} for all processes; got nothing from it within "
            f"{config.process_timeout_s:g} s. Look at its output; raise config.process_timeout_s "
            "if it is only slow."
        ) from error


def disagreement(topic: str, text: str, processes: Sequence[int]) -> dict[int, str]:
    """Waits until all of these processes call this, and compares what they have.

    Each of them must call it, as often as the others.

    Args:
        topic: what is compared; calls about different topics may come in any order.
        text: what must be equal.
        processes: those that take part, this one among them.

    Returns:
        Each process's text, if they differ; else nothing.

    Raises:
        ProcessError: a process did not come within `config.process_timeout_s`.
    """
    service = client()
    group = tuple(processes)
    if service is None or len(group) < 2:
        return {}
    with _lock:
        count = _count[topic, group] = _count.get((topic, group), 0) + 1
    # The name of a group may be long; keys are not.
    members = hashlib.sha256(repr(group).encode()).hexdigest()[:12]
    folder = f"spmd/{topic}/{members}/{count}/"
    service.key_value_set(f"{folder}{_distributed.global_state.process_id}", text)
    try:
        service.wait_at_barrier(
            folder.replace("/", ":"), round(config.process_timeout_s * 1000), list(group)
        )
    except Exception as error:
        came = {int(key.rpartition("/")[2]) for key, _ in service.key_value_dir_get(folder)}
        missing = sorted(set(group) - came)
        raise ProcessError(
            f"all processes must agree on the {topic} (comparison {count}); got nothing from "
            f"process {', '.join(map(str, missing)) or '(none)'} within "
            f"{config.process_timeout_s:g} s: it failed, or is in another part of the program. "
            "Look at its output; raise config.process_timeout_s if it is only slow."
        ) from error
    texts = {int(key.rpartition("/")[2]): value for key, value in service.key_value_dir_get(folder)}
    return texts if len(set(texts.values())) > 1 else {}
