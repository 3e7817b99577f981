"""auto/mode.py and auto/registration.py: programs are searched when they are compiled."""

import copy
import functools

import pytest
import torch
from auto_steps import Words, losses, pictures, training, words
from tiers import exhaustive
from torch import nn

import spmd_core as spmd
from spmd_core.auto import mode, registration, searches
from spmd_core.auto.candidates import Kind
from spmd_core.errors import AutoShardingError
from spmd_core.marks import dtensor
from spmd_core.metrics import utilisation
from spmd_core.ops.barrier import BARRIER
from spmd_core.planner.planned import values
from spmd_core.program import automatic, execution, initial_state

CLOSE = {"rel": 2e-5}


@pytest.fixture(autouse=True)
def _without_compilation(monkeypatch):
    """The model decides; what compilation decides is tested with `auto_shard`."""
    monkeypatch.setattr(mode, "_MOST_COMPILED", 0)


def num_steps(least_ops=60):
    """How many programs with products, and so with many operations, ran, and how often."""
    return [x.executions for x in spmd.metrics.programs() if x.num_ops > least_ops and x.executions]


@pytest.mark.one_device
@pytest.mark.parametrize("fused", [False, exhaustive(True)])
def test_a_loop_runs_one_program_with_shardings_that_are_found(fused):
    model, batch = words(vocabulary=64, width=32, inner=128, batch=16)
    expected = losses(training(copy.deepcopy(model), fused=fused).step, batch)
    spmd.use_spmd(auto=True)
    own = training(model.to("xla"), fused=fused)
    seen = []
    for _ in range(3):  # a new batch at each step, as a loader gives
        loss = own.step(*(x.to("xla") for x in batch))
        spmd.sync()
        seen.append(loss.item())
    assert seen == pytest.approx(expected, **CLOSE)
    assert num_steps() == [3]
    assert all(p.sharding is not None for p in model.parameters())


class Scaled(nn.Linear):
    """A linear layer whose result is scaled by a learned number."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * super().forward(x)


@pytest.mark.one_device
@pytest.mark.parametrize("marks", [False, True])
def test_layers_that_run_as_a_loop_have_one_program(marks):
    """Its stacks of numbers, the layers' and the optimizer's, are no tensors that are split."""
    model, batch = words(vocabulary=64, width=32, inner=64, batch=16)
    model.blocks = nn.Sequential(*(nn.Sequential(Scaled(32), nn.GELU()) for _ in range(3)))
    expected = losses(training(copy.deepcopy(model), fused=True).step, batch)
    count = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(count), (count,), ("all",))
    spmd.use_spmd(auto=True, mesh=mesh)
    spmd.scan_model(model.to("xla"))
    for layer in model.blocks if marks else ():
        spmd.mark_sharding(layer[0].weight, mesh, (None, "all"))
    own = training(model, fused=True)
    assert losses(own.step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)
    assert num_steps(least_ops=30) == [3]
    assert all(p.sharding is not None for p in model.parameters() if p.dim())
    if marks:
        assert {layer[0].weight.partition_spec for layer in model.blocks} == {(None, "all")}


@pytest.fixture
def finds_fsdp(monkeypatch):
    """The shardings that split the batch and the parameters are those that are found."""
    plain = mode.searched

    def reordered(*args, **options):
        found = plain(*args, **options)
        return sorted(found, key=lambda x: x.candidate.kind is not Kind.FSDP)

    monkeypatch.setattr(mode, "searched", reordered)


@pytest.mark.usefixtures("nothing_pending", "finds_fsdp")
@pytest.mark.parametrize("is_drawn", [False, True])
def test_equal_layers_become_loops_where_found_shardings_gather_their_weights(is_drawn):
    count = spmd.global_runtime_device_count()
    if count == 1:
        pytest.skip("one device gathers nothing")
    mesh = spmd.Mesh(range(count), (count,), ("all",))
    inner = 640 if is_drawn else 512  # else both would have one program
    eager, batch = words(vocabulary=64, width=128, inner=inner, depth=6, batch=16)

    def drawn():
        torch.manual_seed(3)
        with torch.device("xla"):
            return Words(64, 128, inner, 6)

    if is_drawn:
        spmd.use_spmd()
        eager.load_state_dict({name: x.cpu() for name, x in drawn().state_dict().items()})
    spmd.use_spmd(auto=True, mesh=mesh)
    model = drawn() if is_drawn else copy.deepcopy(eager).to("xla")
    spmd.sync()
    other, own = (training(x, fused=True, eps=1e-3) for x in (eager, model))
    for size in (16, 16, 8, 16):  # the third one is another program, which finds the stacks
        part = [x[:size] for x in batch]
        found = own.step(*(x.to("xla") for x in part))
        spmd.sync()
        assert found.item() == pytest.approx(other.step(*part).item(), **CLOSE)
    steps = [x for x in spmd.metrics.programs() if x.num_ops > 60 and x.executions]
    assert sorted(x.executions for x in steps) == [1, 3]
    for program in steps:
        assert [n for n, _ in program.loops] == [6, 6]  # of the forward, and of the backward
        assert program.alias_bytes > 0.99 * program.argument_bytes  # stacks are updated in place
    weights = [x.weight for block in model.blocks for x in (block.up, block.down)]
    assert not any(p.sharding.is_replicated for p in weights)
    with torch.no_grad():
        seen, expected = model(batch[0].to("xla")).cpu(), eager(batch[0])
    close = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=close)


def test_evaluation_and_a_smaller_batch_keep_the_shardings():
    model, batch = words(batch=8)
    reference = copy.deepcopy(model)
    spmd.use_spmd(auto=True)
    own, other = training(model.to("xla"), fused=True), training(reference, fused=True)
    for size in (8, 8, 5, 8):
        part = [x[:size] for x in batch]
        mine = own.step(*(x.to("xla") for x in part))
        spmd.sync()
        assert mine.item() == pytest.approx(other.step(*part).item(), **CLOSE)
    before = [p.sharding for p in model.parameters()]
    with torch.no_grad():
        mine = model(batch[0].to("xla")).cpu()
    torch.testing.assert_close(mine, reference(batch[0]).detach(), rtol=1e-4, atol=1e-4)
    assert [p.sharding for p in model.parameters()] == before


def test_a_given_mesh_and_marks():
    count = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(count), (count,), ("all",))
    model, batch = words()
    expected = losses(training(copy.deepcopy(model)).step, batch)
    spmd.use_spmd(auto=True, mesh=mesh)
    model.to("xla")
    spmd.mark_sharding(model.table.weight, mesh, (None, "all"))
    own = training(model)
    assert losses(own.step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)
    assert model.table.weight.partition_spec == (None, "all")
    assert {p.sharding.mesh for p in model.parameters()} == {mesh}


@pytest.mark.exhaustive  # test_auto_shard.py has them, with an explicit search
def test_convolutions():
    model, batch = pictures()
    expected = losses(training(copy.deepcopy(model), torch.optim.SGD, momentum=0.9).step, batch)
    spmd.use_spmd(auto=True)
    own = training(model.to("xla"), torch.optim.SGD, momentum=0.9)
    assert losses(own.step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)


@pytest.mark.exhaustive  # the next one captures a step, too
def test_a_captured_step():
    model, batch = words()
    expected = losses(training(copy.deepcopy(model), fused=True).step, batch)
    spmd.use_spmd(auto=True)
    own = training(model.to("xla"), fused=True)
    step = spmd.compile(own.step, capture=True)
    assert losses(step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)


def test_small_state_of_a_captured_step_is_not_stacked():
    """A program with stacks is not searched; `small_state` begins them with eight small tensors."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    batch = [torch.randn(8, 8)]

    def training_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    expected = losses(training_of(copy.deepcopy(model)), batch)
    spmd.use_spmd(auto=True)
    step = spmd.compile(training_of(model.to("xla")), full_graph=True, capture=True)
    assert losses(step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)
    assert all(p.sharding is not None for p in model.parameters())


def test_a_wrong_index_is_said_with_its_line():
    spmd.use_spmd(auto=True)
    spmd.config.check_indices = True
    table, weight = torch.randn(16, 8).to("xla"), torch.randn(8, 8).to("xla")

    def step(ids):
        hidden = table @ weight  # results of products and lookups are marked
        return (hidden[ids] @ weight)[ids % 4].sum()

    run = spmd.compile(step, full_graph=True, capture=True)
    for _ in range(3):
        run(torch.arange(8).to("xla"))
        spmd.sync()
    line = step.__code__.co_firstlineno + 2
    with pytest.raises(IndexError, match=rf"recorded at .*test_mode\.py:{line}, takes -16 to 15"):
        run((torch.arange(8) + 92).to("xla")).item()


def test_distribute_module_with_auto_policy():
    count = spmd.global_runtime_device_count()
    model, batch = words()
    expected = losses(training(copy.deepcopy(model)).step, batch)
    mesh = dtensor.to_device_mesh(spmd.Mesh(range(count), (count,), ("all",)))
    found = dtensor.distribute_module(model, mesh, dtensor.auto_policy)
    own = training(found)
    assert losses(own.step, [x.to("xla") for x in batch]) == pytest.approx(expected, **CLOSE)
    assert {p.sharding.mesh.size() for p in found.parameters()} == {count}


@pytest.fixture
def searches_of(monkeypatch):
    """The steps that were searched."""
    decide, calls = searches.decide, []

    def counted(groups, *args, **options):
        calls.append(groups.step)
        return decide(groups, *args, **options)

    monkeypatch.setattr(searches, "decide", counted)
    return calls


def drawn_on(device, *, freezes=False):
    """A model that is drawn there, with a frozen layer or without."""
    torch.manual_seed(3)
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(32, 512), nn.LayerNorm(512), nn.Linear(512, 512), nn.Linear(512, 32)
        )
    for p in model[2].parameters():
        p.requires_grad_(not freezes)
    return model


@pytest.mark.usefixtures("nothing_pending")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_weights_are_drawn_once_their_shardings_are_known(
    searches_of, freezes, captured, monkeypatch
):
    compute, drawn = execution.compute_apart, []

    def noted(storages):
        drawn.extend(storages)
        compute(storages)

    monkeypatch.setattr(execution, "compute_apart", noted)
    inputs = torch.randn(4, 32), torch.arange(4) % 32
    spmd.use_spmd()
    reference = drawn_on("xla", freezes=freezes)
    spmd.sync()
    state = {name: x.cpu() for name, x in reference.state_dict().items()}
    eager = drawn_on("cpu", freezes=freezes)
    eager.load_state_dict(state)
    # By default Adam's first step is as long where a gradient is nearly 0, and its sign rounding.
    options = {"fused": True, "eps": 1e-3, "lr": 1e-3}
    expected = losses(training(eager, **options).step, inputs)

    spmd.use_spmd(auto=True)
    model = drawn_on("xla", freezes=freezes)
    spmd.sync()
    assert all(p._handle.value.data is None for p in model.parameters())  # not drawn yet
    own = training(model, **options)
    step = spmd.compile(own.step, capture=True) if captured else own.step
    on_device = [x.to("xla") for x in inputs]
    assert losses(step, on_device) == pytest.approx(expected, **CLOSE)
    (searched,) = searches_of
    assert len(searched.updated) >= sum(p.requires_grad for p in model.parameters())
    assert all(p.sharding is not None for p in model.parameters())
    found = {x.value.placement.sharding for x in drawn}
    assert len(drawn) == len(state) and found == {p.sharding for p in model.parameters()}
    is_split = any(not sharding.is_replicated for sharding in found)
    assert is_split == (spmd.global_runtime_device_count() > 1)


def test_the_state_of_large_drawn_weights_is_an_input_of_the_first_search(searches_of, monkeypatch):
    """Else the step that runs would be another program, whose candidates nobody compiled."""
    monkeypatch.setattr(initial_state, "_REPLICATED_BYTES", 100)  # as if weights were large
    spmd.use_spmd(auto=True)
    model = drawn_on("xla")
    spmd.sync()
    own = training(model, fused=True)
    losses(own.step, [torch.randn(8, 32).to("xla"), (torch.arange(8) % 32).to("xla")])
    (searched,) = searches_of
    # The weight, its moments and its number of steps.
    assert len(searched.updated) == 4 * len([*model.parameters()])
    steps = [x for x in spmd.metrics.programs() if x.num_ops > 15 and x.executions]
    assert [x.executions for x in steps] == [3]


@pytest.mark.usefixtures("nothing_pending")
def test_layers_of_a_drawn_model_that_compute_again_are_searched_once(searches_of):
    """Weights that wait are read as those in memory are, and not through barriers."""
    inputs = torch.randn(8, 32), torch.arange(8) % 32
    spmd.use_spmd()
    reference = drawn_on("xla")
    spmd.sync()
    eager = drawn_on("cpu")
    eager.load_state_dict({name: x.cpu() for name, x in reference.state_dict().items()})
    options = {"fused": True, "eps": 1e-3, "lr": 1e-3}
    expected = losses(training(eager, **options).step, inputs)
    spmd.use_spmd(auto=True)
    model = drawn_on("xla")
    for layer in model:
        spmd.checkpoint_module(layer)
    spmd.sync()
    own = training(model, **options)
    found = losses(own.step, [x.to("xla") for x in inputs])
    assert found == pytest.approx(expected, **CLOSE)
    (searched,) = searches_of
    barriers = [n for n in searched.recorded.nodes if n.entry.name == BARRIER]
    assert barriers and all(n.inputs[0] >= 0 for n in barriers)
    steps = [x for x in spmd.metrics.programs() if x.num_ops > 15 and x.executions]
    assert [x.executions for x in steps] == [3]


def test_a_later_program_takes_the_kind_of_the_first_one(monkeypatch):
    model, batch = words(vocabulary=64, width=32, inner=128, batch=16)
    answers, plain = [], mode.searched

    def reordered(*args, **options):
        is_later = bool(answers)
        found = plain(*args, **options)
        # As if compilation had decided for this kind, and the model later for another one.
        answers.append(sorted(found, key=lambda x: (x.candidate.kind is not Kind.FSDP) ^ is_later))
        return answers[-1]

    monkeypatch.setattr(mode, "searched", reordered)
    spmd.use_spmd(auto=True)
    own = training(model.to("xla"), fused=True)
    losses(own.step, [x.to("xla") for x in batch])
    losses(own.step, [x[:8].to("xla") for x in batch])
    first, later = answers
    assert first[0].candidate.kind is Kind.FSDP and later[0].candidate.kind is not Kind.FSDP
    used = [*automatic.search._known.values()][-1]
    assert used == next(x.shardings for x in later if x.candidate.kind is Kind.FSDP)


def test_a_weight_that_is_read_does_not_wait_and_the_others_do():
    spmd.use_spmd(auto=True)
    model = drawn_on("xla")
    spmd.sync()
    read = model[0].weight.detach().cpu()
    pending = [name for name, p in model.named_parameters() if p._handle.value.data is None]
    assert len(pending) == len([*model.parameters()]) - 1 and "0.weight" not in pending
    spmd.use_spmd()
    spmd.sync()
    assert all(p._handle.value.data is not None for p in model.parameters())
    assert torch.equal(model[0].weight.detach().cpu(), read)


def test_a_search_that_fails_leaves_the_draws_pending(searches_of, monkeypatch):
    registration.start((3, 5))
    model = drawn_on("xla")
    spmd.sync()
    x = torch.ones(8, 32).to("xla")
    with pytest.raises(AutoShardingError, match=r"devices; got one of shape \(3, 5\)"):
        model(x).sum().item()
    spmd.use_spmd(auto=True)
    assert torch.isfinite(model(x).sum()).item() and len(searches_of) == 1


def test_the_switch():
    assert not registration.is_automatic()
    spmd.use_spmd(auto=True)
    assert registration.is_automatic()
    spmd.use_spmd()
    assert not registration.is_automatic()
    with pytest.raises(ValueError, match=r"a mesh without auto=True.*set_global_mesh"):
        spmd.use_spmd(mesh=spmd.Mesh(range(1), (1,)))
    with pytest.raises(TypeError, match="auto"):
        spmd.use_spmd(auto="yes")


def test_a_shape_that_does_not_fit_the_devices():
    registration.start((3, 5))
    x = torch.ones(4, 4).to("xla")
    with pytest.raises(AutoShardingError, match=r"devices; got one of shape \(3, 5\)"):
        (x @ x).sum().item()
    spmd.use_spmd()
    assert (x @ x).sum().item() == 64


def test_contradicting_marks_change_nothing():
    count = spmd.global_runtime_device_count()
    if count == 1:
        pytest.skip("one device has no contradicting marks")
    mesh = spmd.Mesh(range(count), (count,))
    spmd.use_spmd(auto=True)
    a, b = torch.ones(8, 8).to("xla"), torch.ones(8, 8).to("xla")
    spmd.mark_sharding(a, mesh, (0, None))
    spmd.mark_sharding(b, mesh, (None, 0))
    with pytest.raises(AutoShardingError, match=r"split the same dims; got .*\(0, None\) and"):
        ((a + b) @ a).sum().item()
    spmd.use_spmd()
    assert ((a + b) @ a).sum().item() == 2 * 8**3


def test_plans():
    count = spmd.global_runtime_device_count()

    def train():
        spmd.use_spmd()
        model, batch = words()
        own = training(model.to("xla"), fused=True)
        for _ in range(6):
            own.step(*(x.to("xla") for x in batch))
            spmd.sync()

    made = spmd.plan(train, topology=f"cpu-{count}", auto=True)
    (found,) = made.shardings
    assert "Words.blocks.*.up.weight x2" in found.text and "spmd.shard_module(model" in found.text
    assert (
        found.text.startswith(f"mesh {found.mesh}\n") and values(made)["found_mesh"] == found.mesh
    )
    assert "Shardings that were found:" in str(made) and made.step is not None
    assert not registration.is_automatic()
    assert not spmd.plan(train, topology=f"cpu-{count}").shardings


@pytest.mark.exhaustive  # test_plans, and the recipes' test_plans.py, plan what is found
def test_a_planned_script_turns_it_on_and_off():
    count = spmd.global_runtime_device_count()

    def train(is_on_then=True, calls=()):
        spmd.use_spmd(auto=True)
        model, batch = words()
        own = training(model.to("xla"), fused=True)
        for keywords in calls:
            spmd.use_spmd(**keywords)
        assert registration.is_automatic() == is_on_then
        for _ in range(6):
            own.step(*(x.to("xla") for x in batch))
            spmd.sync()

    spmd.use_spmd()
    (found,) = spmd.plan(train, topology=f"cpu-{count}").shardings
    assert "Words.blocks.*.up.weight x2" in found.text
    assert not registration.is_automatic()
    off = functools.partial(train, False, [{}])
    assert not spmd.plan(off, topology=f"cpu-{count}").shardings
    asked = functools.partial(train, True, [{}])  # the plan's own --auto stays on
    assert len(spmd.plan(asked, topology=f"cpu-{count}", auto=True).shardings) == 1
    spmd.use_spmd(auto=True)
    assert not spmd.plan(off, topology=f"cpu-{count}").shardings
    assert registration.is_automatic()  # as before the plan


def test_a_measured_peak_is_not_searched(monkeypatch):
    monkeypatch.setattr(utilisation, "_MATMUL_SIZES", (64,))
    count = spmd.global_runtime_device_count()
    spmd.use_spmd(auto=True)
    mesh = spmd.Mesh(range(count), (count,), ("measured",))
    utilisation.measured_peak(spmd.device(), mesh, torch.float32)
    model, batch = words()
    own = training(model.to("xla"))
    losses(own.step, [x.to("xla") for x in batch])
    meshes = {p.sharding.mesh for p in model.parameters()}
    assert len(meshes) == 1 and "measured" not in meshes.pop().shape()
