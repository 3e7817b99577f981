"""What processes tell each other on the host: texts that must be equal in all of them.

They go through the store of jax's coordination service, in process 0, and not over the devices: no
program has to run, and a process that does not come is named after a time.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spmd_core import releases
from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.runtime import devices

_distributed = releases.jax_module("jax._src.distributed", "global_state")
# How often each group of processes has agreed on each topic.
_count: dict[tuple[str, tuple[int, ...]], int] = {}
_lock = threading.Lock()
# How often a process that waits for another's word asks whether it is still wanted.
_LOOK_S = 0.2


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


class Abandoned(Exception):
    """A wait for other processes ended because nobody wants its result any more."""


def disagreement(
    topic: str,
    text: str,
    processes: Sequence[int],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> dict[int, str]:
    """Waits until all of these processes call this, and compares what they have.

    Each of them must call it, as often as the others. The first of them reads the texts of all; the
    others wait for what it found.

    Args:
        topic: what is compared; calls about different topics may come in any order.
        text: what must be equal.
        processes: those that take part, this one among them.
        is_wanted: asked while this waits; another thread may change the answer to False.

    Returns:
        Each process's text, if they differ; else nothing.

    Raises:
        ProcessError: a process did not come within `config.process_timeout_s`.
        Abandoned: `is_wanted` said no.
    """
    service = client()
    group = tuple(processes)
    if service is None or len(group) < 2:
        return {}
    with _lock:
        count = _count[topic, group] = _count.get((topic, group), 0) + 1
    # The name of a group may be long; keys are not.
    members = hashlib.sha256(repr(group).encode()).hexdigest()[:12]
    folder = f"spmd/{topic}/{members}/{count}"
    own = _distributed.global_state.process_id
    service.key_value_set(f"{folder}/text/{own}", text)
    deadline = time.monotonic() + config.process_timeout_s
    texts: dict[int, str] | None
    if own == group[0]:
        texts = _all_texts(service, folder, group, deadline, is_wanted)
        if texts is not None:
            texts = texts if len(set(texts.values())) > 1 else {}
            service.key_value_set(f"{folder}/result", json.dumps(list(texts.items())))
    else:
        texts = _result(service, folder, deadline, is_wanted)
    if texts is None:
        missing = sorted(set(group) - set(_texts(service, folder)))
        raise ProcessError(
            f"all processes must agree on the {topic} (comparison {count}); got nothing from "
            f"process {', '.join(map(str, missing or group[:1]))} within "
            f"{config.process_timeout_s:g} s: it failed, or is in another part of the program. "
            "Look at its output; raise config.process_timeout_s if it is only slow."
        )
    return texts


def _texts(service: Any, folder: str) -> dict[int, str]:
    """What has come so far, by process."""
    found = service.key_value_dir_get(f"{folder}/text/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def _all_texts(
    service: Any,
    folder: str,
    group: tuple[int, ...],
    deadline: float,
    is_wanted: Callable[[], bool],
) -> dict[int, str] | None:
    """The texts of all; None if they do not come in time."""
    pause_s = 0.0005
    while len(texts := _texts(service, folder)) < len(group):
        if not is_wanted():
            raise Abandoned
        if time.monotonic() > deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return texts


def _result(
    service: Any, folder: str, deadline: float, is_wanted: Callable[[], bool]
) -> dict[int, str] | None:
    """What the first process of the group found; None if it does not come in time."""
    while is_wanted():
        left_s = min(deadline - time.monotonic(), _LOOK_S)
        if left_s <= 0:
            return None
        try:
            found = service.blocking_key_value_get(f"{folder}/result", 1 + round(left_s * 1000))
            return {int(process): text for process, text in json.loads(found)}
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    raise Abandoned
