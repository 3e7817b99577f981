"""A slice of the random programs under random layouts, with those that were once wrong."""

import copy
from typing import Any

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from benchmarks.opinfo import samples
from benchmarks.partitioner import programs, searched
from benchmarks.partitioner.chain_draws import MAKERS, Step
from benchmarks.partitioner.chains import Chain, Chains
from benchmarks.partitioner.examination import examine
from benchmarks.partitioner.programs import MESHES, Entry
from benchmarks.partitioner.table_steps import PARTS, TableSteps
from spmd_core.auto import mode

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 8, reason="the meshes are over 8 devices"
)
ENTRIES = {op.formatted_name: op for op in samples.entries()}
# Entry, mesh and number of programs whose values were wrong, or which XLA refused, or which ended
# the process, before a rule or a lowering was changed.
ONCE_WRONG = [
    ("nn_functional_conv3d", 0, 1000),
    ("nn_functional_conv3d", 6, 5012),
    ("nn_functional_conv1d", 2, 5009),
    ("nn_functional_conv1d", 5, 5008),
    ("nn_functional_conv_transpose1d", 6, 1001),
    ("nn_functional_conv_transpose2d", 2, 5008),
    ("nn_functional_conv_transpose3d", 0, 1001),
    ("nn_functional_conv_transpose3d", 6, 1000),
    ("nn_functional_max_pool1d", 1, 2000),
    ("nn_functional_max_pool1d", 1, 2002),
    ("nn_functional_upsample_nearest", 5, 2001),
    ("scatter_reduce_prod", 1, 1000),
    ("nn_functional_unfold", 1, 5),
]
# The same for chains: mesh and number.
CHAINS_ONCE_WRONG = [(0, 46), (6, 46), (7, 61), (1, 1031), (5, 1257), (0, 20065), (2, 20101)]
# Every 240th entry on one mesh after the other, and every fourth for the last tier.
SPREAD = [
    (name, number // 4 % len(MESHES), 1)
    if number % 240 == 0
    else exhaustive(name, number // 4 % len(MESHES), 1, id=f"{name}-{number // 4 % len(MESHES)}-1")
    for number, name in enumerate(ENTRIES)
    if number % 4 == 0
]


@pytest.mark.parametrize(("name", "mesh", "seed"), [*ONCE_WRONG, *SPREAD])
def test_the_values_are_eager_torchs(name: str, mesh: int, seed: int) -> None:
    entry = Entry(ENTRIES[name])
    answer = examine(entry, mesh, [seed] if entry.samples else [])
    assert answer.failures == []
    # What was once wrong is still drawn.
    assert (name, mesh, seed) not in ONCE_WRONG or answer.num_programs == 1


def test_a_wrong_value_is_found_and_reduced() -> None:
    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.exp(x) + (x.device.type == "xla")

    op = copy.copy(ENTRIES["exp"])
    op.op = wrong
    found = examine(Entry(op), 0, list(range(12))).failures
    wrong_forward = [f for f in found if f.kind == "wrong"]
    assert wrong_forward and "read by nothing" in wrong_forward[0].layout


def test_an_error_is_found() -> None:
    def failing(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.device.type == "xla":
            raise RuntimeError("does not compute")
        return torch.exp(x)

    op = copy.copy(ENTRIES["exp"])
    op.op = op.inplace_variant = failing
    found = examine(Entry(op), 0, [1]).failures
    assert found and found[0].kind == "error" and "does not compute" in found[0].detail


@pytest.mark.parametrize(("mesh", "seed"), [*CHAINS_ONCE_WRONG, *((m, 9000) for m in (1, 3, 6))])
def test_the_values_of_chains_are_eager_torchs(mesh: int, seed: int) -> None:
    answer = examine(Chains(), mesh, [seed])
    assert answer.num_programs == 1 and answer.failures == []


def test_chains_have_every_kind_of_step_and_marks_anywhere() -> None:
    chains = [Chains().draw(seed % len(MESHES), seed) for seed in range(120)]
    assert {step.name for chain in chains for step in chain.steps} == set(MAKERS)
    assert {len(chain.steps) for chain in chains} >= {3, 7, 12}
    marked = [number < len(chain.leaves) for chain in chains for number, _ in chain.marks]
    assert 0.2 < sum(marked) / len(marked) < 0.8


class _WrongAtOneStep(Chains):
    """Four steps; the second one is wrong on the device."""

    def draw(self, mesh: int, seed: int) -> Chain:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            return x * (2 + (x.device.type == "xla"))

        computes: dict[str, Any] = {
            "sin": torch.sin,
            "twice": wrong,
            "cos": torch.cos,
            "neg": torch.neg,
        }
        steps = [
            Step(name, (number,), compute, (4, 4))
            for number, (name, compute) in enumerate(computes.items())
        ]
        marks = ((0, ("x",)), (1, (None, "x")), (4, ("x", None)))
        return Chain(seed, ((4, 4),), tuple(steps), marks, (2, 3, 4))


def test_a_wrong_chain_is_found_and_reduced() -> None:
    (found,) = examine(_WrongAtOneStep(), 0, [1]).failures
    assert found.entry == "chain" and found.kind == "wrong"
    assert found.layout == "0: leaf (4, 4); 1: sin of 0, (4, 4); 2: twice of 1, (4, 4); (2,)"


def test_chains_without_gradients_are_read_as_they_are() -> None:
    step = Step("argmax", (0,), lambda x: x.argmax(0).to(torch.float64), (3,))
    chain = Chain(0, ((4, 3),), (step,), (), (1,))
    with pytest.raises(programs.Skip):
        Chains().run(chain, None)


@pytest.mark.parametrize("mesh", [1, 2, 5])
def test_the_values_of_steps_around_tables_are_eager_torchs(mesh: int) -> None:
    answer = examine(TableSteps(), mesh, [*range(4)])
    assert answer.num_programs == 4 and answer.failures == []


def test_steps_around_tables_have_every_part_and_pairs_with_an_uneven_table() -> None:
    steps = [TableSteps().draw(1, seed) for seed in range(60)]
    assert {part for step in steps for part in step.parts} == {*PARTS}
    pairs = [step for step in steps if {"table", "ids"} <= {*dict(step.marks)} and step.rows % 4]
    assert len(pairs) > 20


class _WrongBias(TableSteps):
    """What it computes with a bias is wrong on the device."""

    def run(self, step: Any, mesh: spmd.Mesh | None) -> list[Any]:
        wrong = mesh is not None and "bias" in step.parts
        return [2 * x if wrong else x for x in super().run(step, mesh)]


def test_a_wrong_step_around_a_table_is_found_and_reduced() -> None:
    steps = _WrongBias()
    seed = next(s for s in range(99) if "bias" in steps.draw(1, s).parts)
    (found,) = examine(steps, 1, [seed]).failures
    assert found.kind == "wrong" and found.layout.endswith("with bias; marked: nothing")


def test_values_with_shardings_that_a_search_finds_are_eager_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []

    def sharded(planned: Any, chosen: Any) -> Any:
        found.extend(leaf.is_replicated for leaf in chosen.leaves)
        found.extend(mark.is_replicated for _, mark in chosen.marks)
        return mode.sharded(planned, chosen)

    monkeypatch.setattr(searched, "sharded", sharded)
    # 1005 has a reshape whose operand and result have no dim in common.
    for source, mesh, seeds in (
        (Chains(), 1, [0, 4]),
        (TableSteps(), 1, [0, 4]),
        (Chains(), 7, [1005]),
    ):
        answer = examine(searched.Searched(source), mesh, seeds)
        assert answer.num_programs == len(seeds) and answer.failures == []
    assert not all(found)
