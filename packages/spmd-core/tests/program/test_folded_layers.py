"""What a program repeats becomes loops: which runs, and what their iterations read and keep."""

import pytest
import torch
from recorded_graphs import graph_of, names, rewritten
from torch import nn

import spmd_core as spmd
from spmd_core.program import chosen_runs
from spmd_core.program.ir import Graph, Ref
from spmd_core.program.passes import folded_layers as folded_layers_module
from spmd_core.program.passes.folded_layers import folded_layers
from spmd_core.program.repeated_entries import RepeatedEntry

WIDTH, ROWS = 6, 5


@pytest.fixture(autouse=True)
def folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    monkeypatch.setattr(chosen_runs, "MIN_SAVED", 6)
    monkeypatch.setattr(folded_layers_module, "_MOST_COPIED", 0)


def folded(*tensors: torch.Tensor) -> Graph:
    """The recorded graph of pending tensors with loops."""
    return rewritten(folded_layers, graph_of(*tensors))


def loops(graph: Graph) -> list[tuple[int, list[str]]]:
    """The loops of a graph: how often each runs which operations."""
    return [
        (op.entry.steps, names(op.bodies[0]))
        for op in graph.ops
        if isinstance(op.entry, RepeatedEntry)
    ]


def loop(graph: Graph, number: int = 0):
    """A loop of a graph."""
    return [op for op in graph.ops if isinstance(op.entry, RepeatedEntry)][number]


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*(sizes or (WIDTH, WIDTH))).to("xla")


def batch(width: int = WIDTH, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, width).to("xla")


def test_layers_of_a_forward_are_a_loop_over_their_stacked_parameters():
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(5)))
    with torch.no_grad():
        graph = folded(layers(batch()))
    assert loops(graph) == [(5, ["linear", "tanh"])]
    carry, *stacks = loop(graph).operands
    assert carry.spec.shape == (ROWS, WIDTH)
    assert [x.spec.shape for x in stacks] == [(5, WIDTH, WIDTH), (5, WIDTH)]
    assert all(x.op is None for x in stacks)  # inputs of the program, which no step copies
    assert loop(graph).entry.stacks == range(1, 1)


def test_a_backward_goes_over_the_layers_from_the_last_one_on():
    model = nn.Sequential(
        linear(4, WIDTH), *(nn.Sequential(linear(), nn.Tanh()) for _ in range(5)), linear(WIDTH, 2)
    )
    model(batch(4)).sum().backward()
    graph = folded(*(p.grad for p in model.parameters()))
    assert loops(graph) == [(5, ["linear", "tanh"]), (5, ["tanh_backward", "linear_backward"])]
    forward, backward = loop(graph, 0), loop(graph, 1)
    assert backward.entry.key[-1] and not forward.entry.key[-1]  # in reverse
    # Kept are each layer's input and its result, and nothing twice.
    assert len(forward.entry.stacks) == 2
    assert {*forward.results[1:]} < {*backward.operands}
    # The gradients of each kind of parameter are a stack, of which each layer's is a row.
    stacks = sorted(backward.entry.outs[i].shape for i in backward.entry.stacks)
    assert stacks == [(5, WIDTH), (5, WIDTH, WIDTH)]


def test_views_are_made_again_and_not_kept():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return torch.tanh(self.linear(x.t().contiguous().t()).t()).t()

    model = nn.Sequential(linear(), *(Layer() for _ in range(5)), linear(WIDTH, 2))
    model(batch()).sum().backward()
    graph = folded(*(p.grad for p in model.parameters()))
    forward, backward = loop(graph, 0), loop(graph, 1)
    assert len(forward.entry.stacks) == 2
    assert "t" in names(backward.bodies[0])


def test_activations_and_gates_are_computed_again_and_not_kept():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = linear(), linear(), linear()

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    model = nn.Sequential(linear(), *(Gated() for _ in range(5)), linear(WIDTH, 2))
    model(batch()).sum().backward()
    graph = folded(*(p.grad for p in model.parameters()))
    forward, backward = loop(graph, 0), loop(graph, 1)
    # Of one layer the gate, what it opens, and the result; and the next one's, which is carried.
    kept = [x.op.entry.name for x in forward.bodies[0].outputs[1:] if x.op is not None]
    assert kept == ["aten::linear"] * 3 and len(forward.entry.stacks) == 4
    assert "silu" in names(backward.bodies[0])


def test_no_product_is_computed_again():
    """For an operation that is cheap, but whose operand nothing else keeps."""
    scale = batch()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = linear(), linear()

        def forward(self, x):
            return torch.tanh(self.down(self.up(x) * scale))

    model = nn.Sequential(linear(), *(Scaled() for _ in range(5)), linear(WIDTH, 2))
    model(batch()).sum().backward()
    (_, forward), (_, backward) = loops(folded(*(p.grad for p in model.parameters())))
    assert "mul.Tensor" in forward and "linear" not in backward


class Masked(nn.Module):
    """A layer with a mask of its own that is the same in all layers."""

    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = linear(), mask

    def forward(self, x):
        return x + self.linear(x @ self.mask().tril())


@pytest.mark.parametrize(
    ("mask", "is_made_once"),
    [
        (lambda: torch.eye(WIDTH, device="xla"), True),
        # The number is an input of the program, and may be another one in each layer.
        (lambda: torch.full((WIDTH, WIDTH), 0.5, device="xla"), False),
    ],
)
def test_a_mask_that_layers_make_is_not_kept(mask, is_made_once):
    model = nn.Sequential(linear(), *(Masked(mask) for _ in range(5)), linear(WIDTH, 2))
    model(batch()).sum().backward()
    graph = folded(*(p.grad for p in model.parameters()))
    kept = [x.spec.shape[1:] for x in loop(graph).results[1:]]
    assert (ROWS, WIDTH) in kept and (WIDTH, WIDTH) not in kept
    (_, forward), (_, backward) = loops(graph)
    found = names(graph).count("tril"), forward.count("tril"), backward.count("tril")
    assert found == ((1, 0, 0) if is_made_once else (0, 1, 1))


def test_each_iteration_has_its_own_numbers_and_seeds():
    x = batch()
    for i in range(6):
        x = nn.functional.dropout(x * (i + 0.5), 0.5)
    graph = folded(x)
    ((steps, body),) = loops(graph)
    assert steps == 6 and "bernoulli.p" in body
    scalars = loop(graph).scalars
    assert len(scalars) == sum(len(op.scalars) for op in loop(graph).bodies[0].ops)
    assert all(len(positions) == 6 == len({*positions}) for positions in scalars)


def test_updates_in_a_loop_of_python_are_a_loop():
    x, target = batch(), batch()
    with torch.no_grad():
        for _ in range(9):
            x -= 0.1 * (x - target)
    graph = folded(x)
    assert [steps for steps, _ in loops(graph)] == [9]
    assert len(names(graph)) == 1


def test_the_updates_of_an_optimizer_are_none():
    parameters = [nn.Parameter(batch()) for _ in range(8)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(parameters, foreach=False).step()
    assert loops(folded(*(p.detach() for p in parameters))) == []


def test_layers_that_differ_from_the_others_stay_apart():
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(12)]
    layers[5] = nn.Sequential(linear(), nn.ReLU())
    with torch.no_grad():
        graph = folded(nn.Sequential(*layers)(batch()))
    assert loops(graph) == [(5, ["linear", "tanh"]), (6, ["linear", "tanh"])]
    assert names(graph) == ["repeat", "linear", "relu", "repeat"]


def test_layers_with_the_same_parameters_read_them_as_they_are():
    layer = nn.Sequential(linear(), nn.Tanh())
    x = batch()
    with torch.no_grad():
        for _ in range(6):
            x = layer(x)
    graph = folded(x)
    assert loops(graph) == [(6, ["linear", "tanh"])]
    assert not loop(graph).entry.stacked
    assert {x.spec.shape for x in loop(graph).operands[1:]} == {(WIDTH, WIDTH), (WIDTH,)}


def test_parameters_that_some_layers_share_stay_as_they_are():
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(8)]
    layers[6] = layers[2]
    with torch.no_grad():
        recorded = graph_of(nn.Sequential(*layers)(batch()))
    assert rewritten(folded_layers, recorded) is recorded


def test_iterations_of_which_too_few_are_alike_stay_apart():
    values, early = [batch() for _ in range(12)], batch()
    x, made = batch(), []
    for value in values:
        x = torch.tanh(x + value)
    for i in range(6):
        y = x * values[i] + (early if i == 3 or i < 2 else made[i - 2])
        x = torch.tanh(y * values[i])
        made.append(x)
    assert loops(folded(x)) == [(12, ["add.Tensor", "tanh"])]


def test_an_iteration_that_reads_another_value_is_in_no_loop():
    x, value, other = batch(), batch(), batch()
    for i in range(12):
        x = torch.tanh(x + (other if i == 9 else value))
    assert loops(folded(x)) == [(9, ["add.Tensor", "tanh"])]


def test_rows_that_are_read_in_another_order_are_in_no_loop():
    values, x = [batch() for _ in range(12)], batch()
    for value in values:
        x = torch.tanh(x + value)
    for i in (0, 1, 2, 3, 5, 4):
        x = torch.sin(x * values[i])
    assert loops(folded(x)) == [(12, ["add.Tensor", "tanh"])]


def test_values_of_all_layers_that_are_returned_are_rows():
    x = batch()
    states = []
    with torch.no_grad():
        for layer in [nn.Sequential(linear(), nn.Tanh()) for _ in range(5)]:
            x = layer(x)
            states.append(x)
    graph = folded(*states)
    # Whichever programs were searched before: the storages receive the rows of one stack.
    assert names(graph) == ["repeat", "unstack", "stack"]
    stack, rows = graph.ops[-1], graph.ops[1].results
    assert [*graph.outputs] == [Ref(stack)]
    assert [*stack.operands] == [*rows[:4], loop(graph).results[0]]


def test_a_forward_without_a_loop_of_its_gradients_is_none():
    """What it keeps would be taken apart again for the layers' gradients."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return (grad.sin() if ctx.number % 2 else grad.exp()) + 1, None

    layers = [linear() for _ in range(6)]
    x = linear()(batch(rows=200))
    for i, layer in enumerate(layers):
        x = Odd.apply(torch.tanh(layer(torch.sin(x).exp().tan())), i)
    x.sum().backward()
    recorded = graph_of(*(p.grad for layer in layers for p in layer.parameters()))
    assert rewritten(folded_layers, recorded) is recorded


def test_a_first_layer_whose_input_has_no_gradient_stays_apart():
    model = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(6)))
    model(batch()).sum().backward()
    graph = folded(*(p.grad for p in model.parameters()))
    assert [steps for steps, _ in loops(graph)] == [5, 5]
    assert names(graph).count("linear") == 1


def test_fewer_than_four_layers_and_little_to_save_are_none(monkeypatch):
    model = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3)))
    with torch.no_grad():
        assert loops(folded(model(batch()))) == []
        model = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(5)))
        assert loops(folded(model(batch()))) != []
        monkeypatch.setattr(chosen_runs, "MIN_SAVED", 9)
        assert loops(folded(model(batch()))) == []


def test_loops_that_are_repeated_are_a_loop():
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(5)]
    x, y = batch(), batch()
    with torch.no_grad():
        for _ in range(4):
            for layer in layers:
                x = layer(x)
            x = x + y.sin()
    graph = folded(x)
    assert [steps for steps, _ in loops(graph)] == [4]
    (inner,) = loops(loop(graph).bodies[0])
    assert inner == (5, ["linear", "tanh"])


def test_other_marks_of_layers_keep_them_apart(mesh_1d):
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(6)]
    for i, layer in enumerate(layers):
        spmd.mark_sharding(layer[0].weight, mesh_1d, ("x", None) if i % 2 else (None, "x"))
    with torch.no_grad():
        recorded = graph_of(nn.Sequential(*layers)(batch()))
    assert rewritten(folded_layers, recorded) is recorded


def test_nothing_is_folded_unless_asked_for(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    model = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(8)))
    with torch.no_grad():
        recorded = graph_of(model(batch()))
    assert rewritten(folded_layers, recorded) is recorded
