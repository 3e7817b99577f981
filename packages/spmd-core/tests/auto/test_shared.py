"""auto/shared.py: what several operations read, or add up to one sum, moves once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from auto_steps import chosen, groups_of
from torch import nn

import spmd_core as spmd
from spmd_core.auto import decide, marked_graph
from spmd_core.auto.candidates import Kind
from spmd_core.auto.costs import PARTIAL, CostModel
from spmd_core.auto.machine import Machine
from spmd_core.auto.shared import sharing
from spmd_core.auto.solve import sent, solve
from spmd_core.planner import topology

_MACHINE = Machine("made up", 4, 1e9, 1e8, 1e7, 1e6, 1e-6, None, (0, 0, 0, 0))
ROWS, WIDTH, COLUMNS = 64, 16, 32


def readers(count):
    """The groups of products that read one tensor; they have different widths, so no ties."""
    x = torch.ones(ROWS, WIDTH).to("xla")
    weights = [torch.ones(WIDTH, COLUMNS * (i + 1)).to("xla") for i in range(count)]
    return groups_of(*(x @ w for w in weights))


def sums(count):
    """The groups of a sum of products."""
    pairs = [(torch.ones(ROWS, WIDTH * (i + 1)), i) for i in range(count)]
    made = [x.to("xla") @ torch.ones(WIDTH * (i + 1), COLUMNS).to("xla") for x, i in pairs]
    total = made[0]
    for one in made[1:]:
        total = total + one
    return groups_of(total)


def products(groups):
    return [i for i, x in enumerate(groups.step.operations) if x.flops]


def bytes_by_columns(count):
    """The least bytes that are sent where x is split by rows, and products by columns."""
    groups = readers(count)
    model = CostModel(groups, (4,), _MACHINE)
    x = groups.step.operations[products(groups)[0]].operands[0][0]
    allowed = {groups.tie[groups.of_tensor[x]]: (groups.tensor_class[x, 0],)}
    for i in products(groups):
        operation = groups.step.operations[i]
        columns = groups.factor_class[i, operation.rule.operands[1][1][0]]
        allowed[groups.tie[groups.of_operation[i]]] = (columns,)
    return sent(model, solve(model, allowed=[allowed]).choices)


def test_what_several_products_read_is_gathered_once():
    gathered = 4 * ROWS * WIDTH * 3 / 4
    assert bytes_by_columns(1) == pytest.approx(gathered)
    assert bytes_by_columns(3) == pytest.approx(gathered)


def bytes_of_sums(count):
    """The least bytes that are sent where products sum over what the devices share."""
    groups = sums(count)
    model = CostModel(groups, (4,), _MACHINE)
    allowed = {}
    for i in products(groups):
        operation = groups.step.operations[i]
        summed = groups.factor_class[i, operation.rule.operands[0][1][0]]
        allowed[groups.tie[groups.of_operation[i]]] = (summed,)
    total = groups.step.outputs[0]
    rows = groups.tensor_class[total, 0]
    allowed[groups.tie[groups.of_tensor[total]]] = (rows,)
    found = solve(model, allowed=[allowed])
    return sent(model, found.choices), found


def test_a_sum_of_partial_sums_is_reduced_once():
    scattered = 4 * ROWS * COLUMNS * 3 / 4
    assert bytes_of_sums(1)[0] == pytest.approx(scattered)
    found, solution = bytes_of_sums(3)
    assert found == pytest.approx(scattered)
    assert PARTIAL in solution.choices[0]


def test_one_reader_shares_nothing():
    assert not sharing(readers(1)).elements and not sharing(sums(1)).elements


def test_equal_layers_share_alike():
    """One element for each kind, with the number of the layers."""
    x = torch.ones(ROWS, WIDTH).to("xla")
    results = []
    for _ in range(4):
        up, down = (torch.ones(*n).to("xla") for n in ((WIDTH, COLUMNS), (COLUMNS, WIDTH)))
        gate = torch.ones(WIDTH, 2 * COLUMNS).to("xla")
        results.append((x @ gate).sum(0))
        x = torch.relu(x @ up) @ down
    found = sharing(groups_of(x, *results))
    assert sum(one.times for one in found.elements) == 4
    assert len(found.elements) < 4


@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
def test_a_backward_that_computes_again_gathers_again():
    """Parameters that the forward has gathered are not kept for it."""
    mesh = spmd.Mesh(range(8), (8,))

    def count(recorded, groups, found):
        names = ["" if x is None else recorded.names.get(x, "") for x in recorded.leaves]
        weight = next(i for i, x in enumerate(names) if x.endswith("blocks.0.up.weight"))
        group = groups.of_tensor[weight]
        reading = [
            sharing(groups).of.get((i, place))
            for i, operation in enumerate(groups.step.operations)
            for place, (t, _) in enumerate(operation.dims[: len(operation.operands)])
            if operation.flops and groups.of_tensor[t] == group
        ]
        return len(reading), len({x for x in reading if x is not None})

    assert chosen(Kind.FREE, mesh, count) == (2, 1)
    readings, elements = chosen(Kind.FREE, mesh, count, is_recomputed=True)
    assert readings == 3 and elements == 1  # of the recomputation and the backward


class Biased(nn.Module):
    """Attention layers that read one bias of the distance between positions, as T5's do."""

    def __init__(self, heads: int, width: int, depth: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, heads)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.bias((at[:, None] - at).abs().clamp(max=15)).permute(2, 0, 1)[None]
        heads = self.bias.weight.shape[1]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + made.transpose(1, 2).flatten(2)
        return x


def biased_bytes(*, auto):
    """The bytes that one of 8 TPUs sends in a step of `Biased` under autocast, its batch split."""

    def train():
        spmd.use_spmd()
        model = Biased(heads=8, width=64, depth=4).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 512, 64).to("xla")
        if not auto:
            spmd.mark_sharding(x, spmd.Mesh(range(8), (8,), ("data",)), ("data", None, None))
        spmd.sync()
        for _ in range(8):
            with torch.autocast("xla", torch.bfloat16):
                made = model(x)
            made.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            spmd.sync()

    plan = spmd.plan(train, topology="v5e-8", auto=auto)
    assert plan.step is not None and not plan.refusals
    return plan.step.costs.ici_bytes


def only_data(monkeypatch):
    """Searches find data parallelism over 8 devices alone."""
    made = decide.candidates

    def of_data(*args, **options):
        found = made(*args, **options)
        return [x for x in found if x.kind is Kind.DATA and x.mesh_shape == (8,)]

    monkeypatch.setattr(decide, "candidates", of_data)


LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)


@LIBTPU
@pytest.mark.one_device
def test_the_gradients_of_a_bias_that_all_layers_read_are_summed_once(monkeypatch):
    """As in the program that only has marks of its inputs."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # at which libtpu ends
    only_data(monkeypatch)
    by_hand = biased_bytes(auto=False)
    one_sum = 4 * 8 * 512 * 512 * 2 * 7 / 8  # float32, all-reduced over 8 devices
    assert one_sum < by_hand < 1.1 * one_sum
    assert biased_bytes(auto=True) == pytest.approx(by_hand, rel=1e-3)


def biased_losses(model, x):
    """The losses of three steps of `Biased` under autocast."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(3):
        with torch.autocast(x.device.type, torch.bfloat16):
            made = model(x)
        loss = made.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        found.append(loss.item())
    return found


@LIBTPU
@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
def test_with_a_whole_total_of_a_biass_gradients_values_are_those_of_eager_torch(monkeypatch):
    """CPU devices, with the shardings that are chosen for TPUs."""
    torch.manual_seed(0)
    model, x = Biased(heads=8, width=64, depth=4), torch.randn(8, 512, 64)
    expected = biased_losses(copy.deepcopy(model), x)
    machine = Machine.of(topology.find_topology("v5e-8").devices)
    monkeypatch.setattr(Machine, "of", lambda devices: machine)
    only_data(monkeypatch)
    marked, without = [], marked_graph._without
    monkeypatch.setattr(
        marked_graph, "_without", lambda *args: marked.append(without(*args)) or marked[-1]
    )
    spmd.use_spmd(auto=True)
    assert biased_losses(model.to("xla"), x.to("xla")) == pytest.approx(expected, rel=1e-4)
    assert marked and all(x.is_replicated for x in marked)
