"""What is done alike to all rows of stacks becomes one operation on the stacks."""

import pytest
import torch
from recorded_graphs import graph_of, names, rewritten, rows_of, stack_of
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.graph.recorders import lock
from spmd_core.graph.values import Spec
from spmd_core.marks.constraints import constrained_copy
from spmd_core.ops.kernels.traits import Elements, Parts
from spmd_core.program.dim_rules import dims
from spmd_core.program.ir import Graph, Ref
from spmd_core.program.mark_names import MARK, MARK_ALONG, MARK_SHARDING, MARK_SUM
from spmd_core.program.passes.stacked_operations import stacked_operations
from spmd_core.program.stacked_entries import StackedEntry, stacked
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import wrap


def stack(count=3, shape=(2, 4), start=1):
    """A stack of small integers, which all operations below compute exactly."""
    size = torch.Size((count, *shape)).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(count, *shape)


def ones(*shape):
    """A leaf of the device."""
    return torch.ones(shape).to("xla")


def merged(*tensors) -> Graph:
    return rewritten(stacked_operations, graph_of(*tensors))


def of_rows(function, *stacks):
    """A function of each row of some stacks; the results are stacked."""
    return stack_of(*(function(*rows) for rows in zip(*map(rows_of, stacks))))


def ops_of(graph: Graph) -> list[str]:
    """The names of operations without those that only count how often they are there."""
    return [name for name in names(graph) if name not in ("stack", "unstack")]


# Graphs. Nothing is compiled.


def test_what_is_done_to_all_rows_is_one_operation_on_the_stack():
    a, b = stack().to("xla"), stack().to("xla")
    graph = merged(of_rows(lambda x, y: (x * 2).add(y), a, b))
    assert names(graph) == ["mul.Tensor", "add.Tensor"]
    first, second = graph.ops
    assert isinstance(second.entry, StackedEntry) and second.entry.spec.shape == (3, 2, 4)
    assert first.operands == (Ref(graph.inputs[0]),)
    assert second.operands == (Ref(first), Ref(graph.inputs[1]))
    assert first.scalars == ((0, 1, 2),)
    assert "scalars (0, 1, 2) of aten::mul.Tensor" in graph.text()


def test_the_stack_of_all_rows_in_their_order_is_the_stack():
    a = stack().to("xla")
    graph = merged(stack_of(*rows_of(a)).sin())
    assert names(graph) == ["sin"]
    assert graph.ops[0].operands == (Ref(graph.inputs[0]),)


def test_rows_of_what_was_stacked_are_what_was_stacked():
    a, b = ones().sin(), ones().cos()
    first, second = rows_of(stack_of(a, b))
    assert sorted(names(merged(second - first))) == ["cos", "sin", "sub.Tensor"]


def test_rows_in_another_order_are_stacked():
    a = stack().to("xla")
    for order in ((1, 0, 2), (0, 1), (0, 1, 1)):
        rows = rows_of(a)
        made = names(merged(stack_of(*(rows[i] for i in order))))
        assert made == ["unstack", "stack"], order
    first, second, third = (x * 2 for x in rows_of(a))
    assert names(merged(stack_of(second, third, first))) == ["mul.Tensor", "unstack", "stack"]


def test_rows_of_a_new_stack_are_rows_of_that():
    rows = [(ones(4) * i).sin() for i in range(3)]
    kept = stack_of(*rows)
    graph = merged(kept, stack_of(*(x.cos() for x in rows)))
    assert names(graph).count("cos") == 1
    assert names(graph).count("stack") == 1


def test_what_is_not_done_to_every_row_stays():
    a = stack().to("xla")
    first, second, third = rows_of(a)
    graph = merged(stack_of(first * 2, second * 2, third))
    assert names(graph) == ["unstack", "mul.Tensor", "mul.Tensor", "stack"]
    graph = merged(stack_of(first.sin(), second.sin(), third.cos()))
    assert sorted(ops_of(graph)) == ["cos", "sin", "sin"]


def test_what_reads_the_results_of_only_some_rows_stays_too():
    a = stack().to("xla")
    rows = [x * 2 if i else x for i, x in enumerate(rows_of(a))]
    rows = [x.sin() for x in rows]  # of a product, but for the first
    graph = merged(stack_of(*(x + 1 for x in rows)))
    assert ops_of(graph).count("sin") == 3
    assert ops_of(graph).count("add.Tensor") == 3


def test_rows_of_different_indices_stay_apart():
    a, b = rows_of(stack().to("xla")), rows_of(stack().to("xla"))
    graph = merged(stack_of(*(a[i] * b[(i + 1) % 3] for i in range(3))))
    assert ops_of(graph) == ["mul.Tensor"] * 3
    tied = merged(stack_of(*(x - a[0] for x in a)))
    assert ops_of(tied) == ["sub.Tensor"] * 3


def test_stacks_of_different_lengths_stay_apart():
    a, b = rows_of(stack(3).to("xla")), rows_of(stack(4).to("xla"))
    graph = merged(stack_of(*(x * y for x, y in zip(a, b))))
    assert ops_of(graph) == ["mul.Tensor"] * 3


def test_a_value_that_all_rows_read_is_one_operand():
    a, scale = stack().to("xla"), ones(4).sin()
    graph = merged(of_rows(lambda x: x * scale, a))
    assert names(graph) == ["sin", "mul.Tensor"]
    assert graph.ops[1].operands[1] == Ref(graph.ops[0])


def test_the_same_twice_is_two_operations():
    a = stack().to("xla")
    graph = merged(of_rows(lambda x: (x * 2) - (x * 3), a))
    assert names(graph) == ["mul.Tensor", "mul.Tensor", "sub.Tensor"]
    assert [op.scalars for op in graph.ops] == [((0, 2, 4),), ((1, 3, 5),), ()]


def test_inputs_with_one_element_may_differ_from_row_to_row():
    a = stack().to("xla")
    rates = [torch.tensor(float(i)) for i in range(3)]
    graph = merged(stack_of(*(x * rate for x, rate in zip(rows_of(a), rates))))
    assert names(graph) == ["stack", "mul.Tensor"]
    rate = torch.tensor(2.0).to("xla")
    graph = merged(stack_of(*(x * rate for x in rows_of(a))))
    assert names(graph) == ["mul.Tensor"]
    assert len(graph.ops[0].operands) == 2


def test_rows_that_something_else_reads_are_taken_once():
    a = stack(5).to("xla")
    doubled = [x * 2 for x in rows_of(a)]
    graph = merged(stack_of(*doubled), doubled[1].sin(), doubled[3].cos(), doubled[3])
    assert names(graph) == ["mul.Tensor", "unstack", "sin", "cos"]
    assert len(graph.ops[1].entry.outs) == 2
    results = [Ref(graph.ops[1], 1), Ref(graph.ops[2]), Ref(graph.ops[3]), Ref(graph.ops[0])]
    assert {*graph.outputs} == {*results}


def test_what_reads_a_row_comes_after_what_computes_all_rows():
    a, b = rows_of(stack().to("xla")), rows_of(stack().to("xla"))
    shared = None
    made = []
    for x in a:
        y = x * 2
        if shared is None:
            shared = y.sum()  # of the first row, before the others
        made.append(y)
    scaled = [x * shared for x in b]
    graph = merged(stack_of(*made), stack_of(*scaled))
    assert names(graph) == ["mul.Tensor", "unstack", "sum", "mul.Tensor"]


def test_several_results_are_stacks():
    graph = merged(of_rows(lambda x: torch.sub(*x.sort(dim=-1)), stack().to("xla")))
    assert names(graph) == ["sort", "sub.Tensor"]
    assert [spec.shape for spec in graph.ops[0].entry.outs] == [(3, 2, 4)] * 2


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten::bernoulli", torch.bernoulli),
        ("aten::gather", lambda x: x.gather(1, (x > 2).long())),
        ("aten::convolution", lambda x: F.conv1d(x, ones(2, 2, 2))),
        ("spmd::optimization_barrier", lambda x: torch.ops.spmd.optimization_barrier([x])[0]),
        ("spmd::to_host_memory", torch.ops.spmd.to_host_memory),
        ("jax::double", lambda x: spmd.call_jax(double, x)),
        ("aten::grid_sampler_3d_backward", lambda x: sampled_backward(x.reshape(1, 2, 2, 2, 1))),
    ],
)
def test_what_is_no_plain_function_of_arrays_stays(name, function):
    graph = merged(of_rows(function, stack().to("xla")))
    assert sum(op.entry.name.startswith(name) for op in graph.ops) == 3


def double(x):
    return x * 2


def sampled_backward(x):
    grid = x.expand(1, 2, 2, 2, 3)
    grad = x.reshape(1, 1, 2, 2, 2)
    return torch.ops.aten.grid_sampler_3d_backward(grad, grad, grid, 0, 0, False, [True, True])[1]


def test_manual_regions_stay(mesh_1d, num_devices):
    a = rows_of(torch.ones(3, 8).to("xla"))
    mapped = spmd.shard_map(lambda x: x * 2, mesh_1d, [("x",)], ("x",))
    graph = merged(stack_of(*map(mapped, a)))
    assert ops_of(graph).count("mul.Tensor") == 3


def test_graphs_without_stacks_are_left_as_they_are():
    graph = graph_of(ones(3).sin())
    assert stacked_operations(graph, None) is graph
    first, second, _ = rows_of(stack().to("xla"))
    graph = graph_of(first @ second.t())
    assert stacked_operations(graph, None) is graph


def test_norms_of_all_rows_make_one_vector():
    a, b = rows_of(stack().to("xla")), rows_of(stack(shape=(5,)).to("xla"))
    other = torch.linalg.vector_norm(ones(3))
    norms = [torch.linalg.vector_norm(x) for both in zip(a, b) for x in both]
    graph = merged(torch.stack([*norms, other]))
    assert names(graph).count("linalg_vector_norm") == 3
    assert names(graph)[-1] == "stack" and "unstack" not in names(graph)
    assert len(graph.ops[-1].operands) == 3


# Marks.


def marked(x, sharding, name=MARK_SHARDING, **options):
    with lock:
        return wrap(constrained_copy(x, sharding, name, **options))


def test_a_mark_of_all_rows_is_one_of_the_stack(mesh_2d):
    sharding = Sharding.of(mesh_2d, ("a", "b"), 2)
    rows = rows_of(stack(shape=(8, 4)).to("xla"))
    made = [marked(x, sharding, MARK, summed_over=(0,)) for x in rows]
    (op,) = merged(stack_of(*made)).ops
    entry = op.entry
    assert (entry.name, entry.summed_over, entry.along) == (MARK, (0,), None)
    assert entry.sharding is Sharding.of(mesh_2d, (None, "a", "b"), 3)
    assert entry.spec.shape == (3, 8, 4) and op.source_of_elements(Elements.SAME) is not None
    made = [marked(x[0], Sharding.of(mesh_2d, ("a",), 1), MARK_ALONG, along=(0,)) for x in rows]
    *_, op = merged(stack_of(*made)).ops
    assert (op.entry.along, op.entry.sharding.dims) == ((0,), ((), (0,)))


def test_marks_of_data_along_axes_stay(mesh_2d):
    rows = rows_of(stack(shape=(8, 4)).to("xla"))
    sharding = Sharding.of(mesh_2d, ("a", None), 2)
    graph = merged(stack_of(*(marked(x, sharding, MARK_ALONG, along=(0,)) for x in rows)))
    assert ops_of(graph) == ["mark_along"] * 3
    made = [marked(x, sharding, MARK_SUM, along=(0,), summed_over=(0,)) for x in rows]
    assert ops_of(merged(stack_of(*made))) == ["mark_sum"] * 3


def test_layers_that_run_one_by_one_gather_one_by_one(mesh_2d):
    x, weights = ones(5, 4), stack(shape=(4, 4)).to("xla")
    everywhere = Sharding.of(mesh_2d, (), 2)
    for weight in rows_of(weights):
        x = x.bfloat16() @ marked(weight.bfloat16(), everywhere)
    made = names(merged(x))
    assert made.count("mark_sharding") == 3 and made[0] == "unstack"
    # The cast of the first input is another operation than that of a weight.
    assert made.count("_to_copy") == 4
    # The same for a product of what all layers read.
    x = ones(5, 4)
    keys = [x @ weight for weight in rows_of(weights)]
    x = keys[0]
    for key in keys[1:]:
        x = x.cos() + key
    assert ops_of(merged(x)).count("mm") == 3


# Traits, dims and numbers.


def entry_of(function, *operands):
    (op,) = graph_of(function(*operands)).ops
    return op.entry


def test_traits_are_those_of_the_operation_on_stacks():
    x, weight = ones(2, 4), ones(3, 4)
    row = entry_of(lambda x: x.bfloat16(), x)
    assert stacked(row, 3, operands=(True,), numbers=()).traits.elements is Elements.SAME
    assert stacked(row, 3, operands=(False,), numbers=()).traits.elements is Elements.REPEATED
    grad = ones(2, 3)
    row = entry_of(
        lambda *given: torch.ops.aten.linear_backward(*given, [True, True, False])[1],
        *(x, grad, weight),
    )
    for operands, gradients in {
        (True, True, True): (0, 2),
        (True, True, False): (0,),
        (False, True, True): (),
    }.items():
        traits = stacked(row, 3, operands=operands, numbers=()).traits
        assert (traits.gradients, traits.parts) == (gradients, Parts.DIMS)


def test_dims_of_operations_on_stacks_follow_from_their_kernels():
    x, weight = ones(2, 4), ones(5, 4)
    row = entry_of(torch.nn.functional.linear, x, weight)
    entry = stacked(row, 3, operands=(False, True), numbers=())
    rule = dims(entry, [x._handle.spec, Spec.contiguous((3, 5, 4), torch.float32)])
    assert [rule.sources(0, dim) for dim in range(3)] == [((1, 0),), ((0, 0),), ((1, 1),)]
    row = entry_of(lambda x: x * 2.0, x)
    entry = stacked(row, 3, operands=(True,), numbers=(True,))
    rule = dims(entry, [Spec.contiguous((3, 2, 4), torch.float32)])
    assert [rule.sources(0, dim) for dim in range(3)] == [((0, 0),), ((0, 1),), ((0, 2),)]


# Steps of optimizers. First graphs, then values.


def parameters(count, *, seed=0):
    """Parameters of layers, in the order of layers, and one of no layer."""
    torch.manual_seed(seed)
    layers = [(torch.randn(4, 6), torch.randn(6)) for _ in range(count)]
    return [torch.nn.Parameter(x) for x in (torch.randn(5), *(x for both in layers for x in both))]


def loss_of(params, x):
    """A loss for which all layers are stacked; `x` is float32 (3, 4)."""
    on_device = x.device.type == "xla"
    stacks = [(stack_rows.apply if on_device else as_stack)(*params[i::2]) for i in (1, 2)]
    return torch.tanh(x @ stacks[0] + stacks[1][:, None]).square().mean() + params[0].sin().sum()


def as_stack(*rows):
    return torch.stack(rows)


class stack_rows(torch.autograd.Function):
    """The layers' tensors as one, whose gradient is that of each."""

    @staticmethod
    def forward(ctx, *tensors):
        return stack_of(*tensors)

    @staticmethod
    def backward(ctx, grad):
        return rows_of(grad)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by steps of Newton and Schulz: products of each layer's own."""

    def __init__(self, params, lr):
        super().__init__([*params], {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                update = momentum
                if p.ndim == 2:
                    update = momentum / (momentum.norm() + 1e-7)
                    for _ in range(3):
                        gram = update @ update.mT
                        update = 1.5 * update - 0.5 * gram @ update
                p.add_(update, alpha=-group["lr"])


def grouped(params):
    """Later layers learn faster, and vectors do not decay."""
    matrices, vectors = params[1::2], [params[0], *params[2::2]]
    groups = [
        {"params": matrices[:1], "lr": 1e-2},
        {"params": matrices[1:], "lr": 2e-2},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, foreach=False)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=p[0].device.type == "xla"),
    "tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "groups": grouped,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "muon": lambda p: Muon(p, lr=1e-2),
}


def step(params, optimizer, averages, seed, *, norm_type=2.0):
    torch.manual_seed(seed)
    loss = loss_of(params, torch.randn(3, 4).to(params[0].device))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(averages, params, 0.5)
    return loss


def on_device(params):
    return [torch.nn.Parameter(p.detach().to("xla")) for p in params]


def copies(params):
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_does_not_grow_with_the_number_of_layers(name):
    found = []
    for count in (3, 5):
        params = on_device(parameters(count))
        optimizer, averages = OPTIMIZERS[name](params), copies(params)
        if name == "capturable":  # counts steps on the device
            for same in (params[1::2], params[2::2]):
                for p, count in zip(same, rows_of(torch.zeros(len(same)).to("xla"))):
                    zeros = [torch.zeros_like(p) for _ in range(2)]
                    optimizer.state[p] = dict(
                        zip(("step", "exp_avg", "exp_avg_sq"), (count, *zeros))
                    )
        step(params, optimizer, averages, 0)
        states = [x for state in optimizer.state.values() for x in state.values()]
        states = [x for x in states if isinstance(x, torch.Tensor) and x.device.type == "xla"]
        found.append(names(merged(*params, *averages, *states)))
    assert found[0] == found[1]


@pytest.mark.one_device
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_give_the_values_of_eager_torch(name, mesh_2d):
    eager = parameters(3)
    params = on_device(eager)
    if name in ("adamw", "muon"):  # test_stacked_state.py has marks of other optimizers
        for p in params[1::2]:
            spmd.mark_sharding(p, mesh_2d, ("a", "b") if name == "adamw" else (None, "a"))
    both = [(x, OPTIMIZERS[name](x), copies(x)) for x in (params, eager)]
    for seed in range(3):
        losses = [step(*each, seed, norm_type=torch.inf if seed else 2.0) for each in both]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for own, right in zip((*params, *both[0][2]), (*eager, *both[1][2])):
        torch.testing.assert_close(own.detach().cpu(), right.detach(), rtol=1e-5, atol=1e-6)


# Values of programs.


@pytest.mark.one_device
def test_values_are_those_of_eager_torch(mesh_1d, mesh_2d):
    """On dims that are split evenly and unevenly, by one axis and by two."""
    kinds = (0.5, 3, True, 2 - 1j)
    for mesh, spec in [
        (mesh_1d, (None, "x", None)),
        (mesh_1d, (None, None, "x")),
        (mesh_2d, (None, "a", "b")),
        (mesh_2d, (None, ("b", "a"), None)),
    ]:
        for shape in ((8, 16), (5, 3)):
            a, b = stack(3, shape), stack(3, shape, start=-20)
            bias = stack(1, shape[1:])[0]

            def compute(rows, others, bias):
                sums = [x * y + bias for x, y in zip(rows, others)]
                scaled = [x.mul(kinds[i]) if i < 2 else x for i, x in enumerate(sums)]
                numbers = [(x * kind).real for kind in kinds for x in rows]
                masks = [
                    torch.where(x > y, x, 2.0 * i) for i, (x, y) in enumerate(zip(rows, others))
                ]
                tops = [x.max(dim=-1) for x in rows]
                return [*scaled, *numbers, *masks, *(t for top in tops for t in top)]

            on_xla = [spmd.mark_sharding(x.to("xla"), mesh, spec) for x in (a, b)]
            made = compute(*map(rows_of, on_xla), bias.to("xla"))
            spmd.sync()
            for own, right in zip(made, compute(a, b, bias)):
                assert torch.equal(own.cpu(), right)


@pytest.mark.one_device
def test_marked_rows_have_their_values(mesh_2d):
    a = stack(3, (8, 4))
    sharding = Sharding.of(mesh_2d, ("a", "b"), 2)
    rows = [marked(x * 2, sharding, MARK, summed_over=()) for x in rows_of(a.to("xla"))]
    made = stack_of(*rows)
    assert debugging.stablehlo(made).count("sdy.sharding_constraint") == 1
    row = rows[1].sin()
    del rows
    spmd.sync()
    assert torch.equal(made.cpu(), a * 2)
    torch.testing.assert_close(row.cpu(), (a[1] * 2).sin())


def test_loops_have_numbers_of_rows_too():
    """A body has its numbers from its loop."""
    a = stack()

    def body(x, _):
        return of_rows(lambda row: row * 0.5 + 1, x), None

    made, _ = spmd.control_flow.scan(body, a.to("xla"), None, length=3)
    right = a
    for _ in range(3):
        right = right * 0.5 + 1
    assert torch.equal(made.cpu(), right)
