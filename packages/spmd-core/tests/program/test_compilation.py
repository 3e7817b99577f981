"""The stages from a graph to a program, and what is lowered again. Nothing is compiled here."""

import jax
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from recorded_graphs import graph_of, target_of

import spmd_core as spmd
from spmd_core.graph.placement import Placement
from spmd_core.program.compilation import build
from spmd_core.program.lower import lower
from spmd_core.program.program import Program, new_record
from spmd_core.program.target import Replicated
from spmd_core.runtime.jax_sharding import replicated

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() == 1, reason="one device has no partitioner"
)
INVALID = "INTERNAL: error of the [hlo verifier] {}"


class Compiler:
    """Notes what it gets, refuses it once for each of `errors`, then places results as told.

    Attributes:
        lowered: what it got.
    """

    def __init__(self, *errors, placements=()):
        self.lowered = []
        self._errors, self._placements = [*errors], [*placements]

    def __call__(self, lowered):
        self.lowered.append(lowered)
        if self._errors:
            raise jax.errors.JaxRuntimeError(self._errors.pop(0))
        everywhere = Placement.of(replicated(lowered.graph.device_ids), None)
        chosen = self._placements.pop(0) if self._placements else everywhere
        placements = tuple(placement or chosen for placement in lowered.out_placements)
        return Program(lowered, None, placements, new_record(lowered.graph, lowered.name))

    @property
    def replicated(self):
        return [lowered.target.replicated_part for lowered in self.lowered]


@pytest.fixture
def graph(mesh_1d, num_devices):
    """Of a product of a split tensor and an unmarked one, times 3, whose place is free."""
    x = spmd.mark_sharding(torch.ones(16, 4).to("xla"), mesh_1d, ("x",))
    return graph_of((x @ torch.ones(4, num_devices + 1).to("xla")) * 3)


def test_a_lowered_graph_says_what_it_takes_and_returns(graph):
    lowered = lower(graph, target_of(graph), "three_times")
    text = lowered.stage.as_text()
    assert "module @jit_three_times" in text and text.count("stablehlo.dot_general") == 1
    assert lowered.graph is graph.recorded
    assert lowered.num_packed == 1 and len(lowered.stage.in_avals[0]) == 3
    assert lowered.out_placements == (None,)
    assert tuple(device.id for device in lowered.devices) == graph.device_ids


def test_what_the_partitioner_makes_invalid_is_lowered_with_more_replicated(graph):
    compiler = Compiler(INVALID, INVALID)
    before = spmd.metrics.counter("compiles")
    with pytest.warns(
        RuntimeWarning, match=r"made program once .* invalid.*its tensors replicated"
    ):
        program = build(graph.recorded, "once", compiler=compiler)
    assert compiler.replicated == [Replicated.NOTHING, Replicated.INDICES, Replicated.EVERYTHING]
    assert program.lowered is compiler.lowered[-1]
    assert spmd.metrics.counter("programs_with_whole_everything") == 1
    assert spmd.metrics.counter("compiles") == before + 1
    assert spmd.metrics.programs()[-1] is program.record


def test_the_first_refusal_is_raised_where_nothing_helps(graph):
    compiler = Compiler(INVALID.format(1), INVALID.format(2), INVALID.format(3))
    with pytest.raises(spmd.errors.ProgramError, match=r"program p .*hlo verifier\] 1"):
        build(graph.recorded, "p", compiler=compiler)
    assert len(compiler.lowered) == len(Replicated)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("INTERNAL: another error", spmd.errors.ProgramError),
        ("RESOURCE_EXHAUSTED: no memory", spmd.errors.DeviceMemoryError),
    ],
)
def test_other_errors_are_raised_at_once(graph, words, error):
    compiler = Compiler(words)
    with pytest.raises(error, match=words):
        build(graph.recorded, "p", compiler=compiler, names=dict)
    assert compiler.replicated == [Replicated.NOTHING]


def test_one_device_has_no_partitioner():
    x = spmd.mark_sharding(torch.ones(3).to("xla"), spmd.Mesh((0,), (1,), ("x",)), ("x",))
    graph = graph_of(x * 3)
    compiler = Compiler(INVALID)
    with pytest.raises(spmd.errors.ProgramError, match="hlo verifier"):
        build(graph.recorded, "p", compiler=compiler)
    assert compiler.replicated == [Replicated.NOTHING]


def test_results_that_are_split_unevenly_are_replicated(graph):
    mesh = target_of(graph).jax_mesh
    uneven = Placement.of(NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)), None)
    even = Placement.of(NamedSharding(mesh, PartitionSpec(mesh.axis_names)), None)
    compiler = Compiler(placements=[even])
    assert build(graph.recorded, "p", compiler=compiler).out_placements == (even,)
    assert len(compiler.lowered) == 1
    # What had to be replicated stays so.
    compiler = Compiler(INVALID, placements=[uneven])
    with pytest.warns(RuntimeWarning, match="the indices of its gathers"):
        program = build(graph.recorded, "p", compiler=compiler)
    assert compiler.replicated == [Replicated.NOTHING, Replicated.INDICES, Replicated.INDICES]
    (placement,) = program.lowered.out_placements
    assert placement.device_sharding.is_fully_replicated
    assert program.out_placements == (placement,)
