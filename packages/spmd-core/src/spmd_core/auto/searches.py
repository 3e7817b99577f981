"""Searches that are made once: an equal one takes what was found, also in another process.

What was found is kept in memory, and with the compiled programs in `config.cache_dir`. Searches are
equal if the recorded steps are, with their marks, what is asked for, the devices, and the sources
and versions of all that decides (`planner.sources`). So a second run, and one that resumes, search
nothing. Of several processes process 0 searches, and the others take its result after comparing
their steps with its own.
"""

import base64
import hashlib
import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_core.auto.decide import decide, inputs_of
from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.recorded_step import Markable
from spmd_core.auto.tried import Progress, Tried
from spmd_core.config import config
from spmd_core.errors import AutoShardingError, ProcessError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.planner import sources
from spmd_core.planner.topology import Topology
from spmd_core.program import fingerprint
from spmd_core.runtime import agreement, interrupts, processes
from spmd_core.runtime.disk_cache import ProgramCache
from spmd_core.sharding.mesh import Mesh

_MOST_KEPT = 64
_TOPIC = "automatic sharding"
# By which processes compare what they search; empty before the first search of several processes.
# Guarded by: the graph lock. Cleared by: never: all processes count alike.
_series: list[agreement.Series] = []
# Guarded by: the GIL (one operation of a dict). Cleared by: never, a cache.
_kept: dict[str, list[Tried]] = {}


@interrupts.waits
def searched(
    groups: Groups,
    topology: Topology,
    *,
    mesh: Mesh | None,
    memory: int | None,
    most: int,
    objective: str,
    names: Mapping[Storage, str],
    markable: Markable | None = None,
    report: Callable[[str], None],
    progress: Progress | None = None,
    measure: Callable[[list[Tried]], list[Tried]] | None = None,
) -> list[Tried]:
    """What `decide` finds for these arguments, now or in an equal search before.

    Under several processes a collective call. An interruption leaves nothing behind.

    Args:
        groups, topology, mesh, memory, most, objective, names, markable, report, progress: see
            `decide`.
        measure: measures what was found (`measure.measured`), in all processes; None not to.

    Raises:
        AutoShardingError: as `decide`; in all processes.
        ProcessError: processes have recorded different steps, or process 0 did not answer within
            `config.process_timeout_s`.
    """
    asked = [
        f"mesh {None if mesh is None else mesh.text}",
        f"at most {memory} bytes, {most} compiled, for the least {objective}",
        f"devices {topology.name} {Machine.of(topology.devices)}",
        *(str(getattr(device, "coords", "")) for device in topology.devices),
        f"marks of {markable}, fold_layers {config.fold_layers}",
    ]
    lines = [*asked, *_lines(groups, inputs_of(groups, names))]

    def decided() -> list[Tried]:
        found = _read(key)
        if found is None:
            found = decide(
                groups,
                topology,
                mesh=mesh,
                memory=memory,
                most=most,
                objective=objective,
                names=names,
                markable=markable,
                report=report,
                progress=progress,
            )
            _keep(key, found)
        else:
            report("an equal step was searched before")
        return found

    key = hashlib.sha256("\n".join([sources.digest(), *lines]).encode()).hexdigest()
    found = decided() if agreement.client() is None else _of_process_0(lines, decided)
    if measure is not None and found[0].measured_s is None:
        found = measure(found)
        _keep(key, found)
    return found


def _lines(groups: Groups, inputs: Sequence[int]) -> list[str]:
    """All of a step that a search reads: tensors, operations with their dims, results."""
    step = groups.step
    graph = step.recorded
    found = [f"{graph.options} {graph.checks_indices} {graph.fold_layers} inputs {inputs}"]
    for tensor in step.tensors:
        mark = "" if tensor.fixed is None else fingerprint.mark_text(tensor.fixed)
        found.append(f"tensor {tensor.spec!r} {tensor.leaf} {mark} {tensor.manual}")
    found += [f"{fingerprint.entry_text(node.entry)} of {node.inputs}" for node in graph.nodes]
    for operation in step.operations:
        rule = operation.rule
        reduced = [sorted(factors) for factors in rule.reduced]
        found.append(
            f"operation {operation.node} {operation.part} {operation.dims} {rule.sizes} {reduced} "
            f"{sorted(rule.halos)} {sorted(rule.replicated)} {operation.flops} {operation.times} "
            f"{operation.manual}"
        )
    found += [f"result {output.value} {output.placement is None}" for output in graph.outputs]
    found.append(f"updates {sorted(step.updated.items())} ties {groups.tie}")
    return found


def _of_process_0(lines: Sequence[str], decided: Callable[[], list[Tried]]) -> list[Tried]:
    """Process 0's result, in every process; or its error.

    Args:
        lines: what this process searches.
        decided: gives this process's result.
    """
    _compare(lines)
    if processes.process_index():
        answer = json.loads(agreement.of_process_0(_TOPIC, ""))
        if "error" in answer:
            raise AutoShardingError(f"process 0 found no shardings: {answer['error']}")
        taken: list[Tried] = _unpacked(answer["found"])
        return taken
    try:
        found = decided()
    except BaseException as error:
        agreement.of_process_0(_TOPIC, json.dumps({"error": str(error) or repr(error)}))
        raise
    agreement.of_process_0(_TOPIC, json.dumps({"found": _packed(found)}))
    return found


def _compare(lines: Sequence[str]) -> None:
    """Checks that all processes search the same.

    Raises:
        ProcessError: they do not, in all processes; those other than process 0 say what differs.
    """
    with lock:
        if not _series:
            _series.append(agreement.Series(_TOPIC, range(processes.process_count())))
        (series,) = _series
    series.add(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    texts = series.disagreement()
    if not texts:
        return
    own = processes.process_index()
    theirs: list[str] = _unpacked(agreement.of_process_0(f"{_TOPIC}: step", _packed(list(lines))))
    others = [i for i, text in texts.items() if text != texts[0]]
    place = next((i for i, (a, b) in enumerate(zip(theirs, lines)) if a != b), None)
    if own not in others:
        what = f"{', '.join(map(str, others))}, whose errors say where"
    elif place is None:
        what = f"{own}, with {len(lines)} lines and not {len(theirs)}"
    else:
        what = f"{own}, with {lines[place]!r} and not {theirs[place]!r}"
    raise ProcessError(
        "all processes must record the same step for automatic sharding; got another one than that "
        f"of process 0 in process {what}. Build the same model in all of them, and let each read "
        "batches of the same shape."
    )


def _packed(what: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(what))).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))


def _read(key: str) -> list[Tried] | None:
    """What an equal search has found; None if there was none."""
    if key in _kept:
        return _kept[key]
    folder = _folder()
    data = None if folder is None else folder.get(_entry(key))
    if data is None:
        return None
    found: list[Tried] = pickle.loads(data)
    _keep_in_memory(key, found)
    return found


def _keep(key: str, found: list[Tried]) -> None:
    _keep_in_memory(key, found)
    folder = _folder()
    if folder is not None:
        try:
            folder.put(_entry(key), pickle.dumps(found))
        except OSError as error:
            warnings.warn(
                f"shardings that were found are not kept on disk: {error}. Set SPMD_CACHE_DIR to "
                "a folder that can be written, or to nothing.",
                stacklevel=2,
            )


def _keep_in_memory(key: str, found: list[Tried]) -> None:
    _kept[key] = found
    while len(_kept) > _MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)


def _folder() -> ProgramCache | None:
    """The cache on disk; None without one."""
    if config.cache_dir is None:
        return None
    try:
        return ProgramCache(Path(config.cache_dir))
    except OSError:  # the cache of programs warns about it
        return None


def _entry(key: str) -> str:
    return f"shardings-{key}"
