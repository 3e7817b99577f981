"""The text of a program that processes compare: equal for equal programs, and without addresses."""

import re

import torch

import spmd_core as spmd
from spmd_core.graph import storage
from spmd_core.graph.recorders import lock
from spmd_core.program import fingerprint
from spmd_core.program.planning import plan
from spmd_core.runtime.processes import get_1d_mesh


def text_of(*tensors):
    with lock:
        return fingerprint.lines(plan([t._handle for t in tensors]).key)


def test_it_has_operations_inputs_and_results():
    mesh = get_1d_mesh("x")
    x = spmd.mark_sharding(torch.ones(8, 4).to("xla"), mesh, ("x", None))

    def lines(dtype, dim):
        return text_of((x @ torch.ones(4, 2).to("xla")).sum(dim).to(dtype))

    found = lines(torch.float64, 0)
    assert found == lines(torch.float64, 0) and not re.search("0x[0-9a-f]{6}", "\n".join(found))
    assert found[0].startswith("aten::mm -> float32[8, 2]")
    assert any(line.startswith("input float32[8, 4] ('x', None)") for line in found)
    assert found != lines(torch.float32, 0) and found != lines(torch.float64, 1)
    storage.take_pending()


def test_functions_of_jax_have_no_addresses():
    y = spmd.call_jax(lambda a: a * 2, torch.ones(2).to("xla"))
    assert not re.search("0x[0-9a-f]{6}", "\n".join(text_of(y)))


def test_one_process_tells_nobody():
    before = spmd.metrics.counter("cuts")
    assert torch.ones(3, device="xla").sum().item() == 3
    assert spmd.metrics.counter("cuts") == before + 1 and not fingerprint._known


def test_numbers_are_told_apart_at_any_size(monkeypatch):
    told = []

    class Watch:
        def note(self, group, what, line, describe, *, compares):
            told.append(what)

    monkeypatch.setattr(fingerprint.watching, "watch", Watch())
    monkeypatch.setattr(fingerprint, "processes_of", lambda ids: (0, 1))
    with lock:
        key = plan([torch.ones(3, device="xla")._handle]).key
    for ints in ([2**63], [2**63 + 1], [-1], [-1, 2]):
        fingerprint.note(key, None, ([0.5], ints, [1j]))
    fingerprint.note(key, None, ([0.25], [-1], [1j]))
    fingerprint.note(key, None, ([0.5], [-1], [2j]))
    assert len(set(told)) == len(told) == 6
    storage.take_pending()
