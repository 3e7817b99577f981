"""auto/marked_graph.py: marks where the partitioner has a choice, and no others."""

import copy

import pytest
import torch
from auto_steps import chosen, groups_of, training, words

import spmd_core as spmd
from spmd_core.auto.candidates import Kind
from spmd_core.auto.costs import CostModel
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Read, marked, positions, shardings
from spmd_core.auto.solve import solve
from spmd_core.debugging import communication
from spmd_core.metrics.flops import entry_flops
from spmd_core.planner.topology import present
from spmd_core.program.compilation import build
from spmd_core.program.mark_names import MARK, MARK_SHARDING
from spmd_core.sharding.sharding import Sharding

pytestmark = pytest.mark.skipif("spmd.global_runtime_device_count() < 8")


@pytest.mark.parametrize(
    "options",
    [{"fused": True}, {"make": torch.optim.SGD, "momentum": 0.9, "foreach": False}],
    ids=["adamw", "momentum"],
)
def test_with_whole_parameters_the_sum_of_a_shared_weights_gradients_is_marked(options):
    """What the embedding and the logits give it is added before it is summed over devices."""

    def read(recorded, groups, found):
        ((tensor, sharding),) = found.marks
        assert found.gradients == {tensor} and sharding.is_replicated
        maker = groups.step.operations[groups.step.makers[tensor]]
        of_table = {words(vocabulary=512, width=256)[0].table.weight.shape}
        return maker.entry.name, {groups.step.tensors[tensor].spec.shape} == of_table

    mesh = spmd.Mesh(range(8), (8,), ("data",))
    assert chosen(Kind.DATA, mesh, read, **options) == ("aten::add.Tensor", True)


@pytest.mark.parametrize("in_code", [False, True])
def test_whole_parameters_gradients_are_marked_where_products_make_them_in_another_dtype(in_code):
    """The partitioner would sum them over devices in bfloat16."""

    def read(recorded, groups, found):
        of = {groups.of_tensor[t]: groups.step.tensors[t].spec.dtype for t in found.gradients}
        marked = [recorded.names[s] for i, s in enumerate(recorded.leaves) if is_of(groups, of, i)]
        return {x.removeprefix("Words.") for x in marked}, set(of.values())

    def is_of(groups, of, leaf):
        return leaf in groups.step.updated and groups.of_tensor[leaf] in of

    mesh = spmd.Mesh(range(8), (8,), ("data",))
    options = {"make": torch.optim.SGD, "in_code": in_code}
    names = [n for n, _ in words()[0].named_parameters() if "norm" not in n]  # those of products
    assert chosen(Kind.DATA, mesh, read, is_bf16=True, **options) == ({*names}, {torch.float32})
    table = set() if in_code else {"table.weight"}  # which is read twice
    assert chosen(Kind.DATA, mesh, read, **options)[0] == table


def test_gradients_are_summed_over_the_axes_that_split_the_rows_of_their_products():
    """Also where no input says so, as its rows are split after a lookup."""
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))

    def read(recorded, groups, found):
        over = dict(found.summed_over)
        assert {*over} <= found.gradients
        graph = marked(recorded.graph, found)
        named = {node.entry.summed_over for node in graph.nodes if node.entry.name == MARK}
        assert named >= {*over.values()}
        return {*over.values()}

    assert chosen(Kind.TENSOR, mesh, read) == {(0,)}  # features are split over the other axis
    mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
    assert chosen(Kind.FSDP, mesh, read) == {(0,)}
    assert not chosen(Kind.FSDP, mesh, lambda *found: found[2].summed_over, in_code=True)


def test_gradients_of_split_parameters_are_marked():
    mesh = spmd.Mesh(range(8), (8,), ("fsdp",))

    def read(recorded, groups, found):
        return len(found.gradients), {s.is_replicated for t, s in found.marks}

    count, replicated = chosen(Kind.FSDP, mesh, read)
    assert count >= 5 and replicated == {False}  # two weights of two blocks, and the table


def test_parameters_are_marked_whole_where_products_read_them():
    """The partitioner might gather activations in their place."""
    mesh = spmd.Mesh(range(8), (8,), ("fsdp",))

    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        entries = [node.entry for node in recorded.graph.nodes]
        of_new = positions(entries, len(recorded.graph.leaves), found)
        for ((place, position),), sharding in found.reads:
            (number,) = [
                i for i, p in enumerate(of_new) if p == place and graph.nodes[i].entry is entries[p]
            ]
            results = [(n, i) for n, node in enumerate(graph.nodes) for i in node.entry.outs]
            before = graph.nodes[results[graph.nodes[number].inputs[position]][0]].entry
            assert before.sharding == sharding and before.name == MARK_SHARDING
            assert entry_flops(entries[place])
        return len(of_new) == len(graph.nodes), {x.sharding.is_replicated for x in found.reads}

    assert chosen(Kind.FSDP, mesh, read) == (True, {True})
    # What is whole is not marked.
    assert not chosen(Kind.DATA, mesh, lambda recorded, groups, found: found.reads)


@pytest.mark.parametrize(("factor", "read_as"), [("columns", (None, None)), ("summed", (None, 0))])
def test_what_products_read_in_another_layout_is_moved_once_for_all(factor, read_as):
    """Activations split by rows are gathered, or exchanged for a split along what is summed."""
    x = torch.ones(64, 16).to("xla") * 2
    weights = [torch.ones(16, 32 * (i + 1)).to("xla") for i in range(3)]  # so that none are tied
    groups = groups_of(*(x @ w for w in weights))
    products = [i for i, one in enumerate(groups.step.operations) if one.flops]
    t = groups.step.operations[products[0]].operands[0][0]
    allowed = {groups.tie[groups.of_tensor[t]]: (groups.tensor_class[t, 0],)}
    for i in products:
        rows, columns = groups.step.operations[i].rule.operands[1]
        chosen_factor = {"summed": rows, "columns": columns}[factor][0]
        allowed[groups.tie[groups.of_operation[i]]] = (groups.factor_class[i, chosen_factor],)
    mesh = spmd.Mesh(range(8), (8,))
    solution = solve(CostModel(groups, (8,), Machine.of(present().devices)), allowed=[allowed])
    found = shardings(groups, solution, mesh)
    nodes = [groups.step.operations[i].node for i in products]
    of_x = [read for read in found.reads if read.uses[0][1] == 0]
    assert of_x == [Read(tuple((n, 0) for n in nodes), Sharding.of(mesh, read_as, 2))]
    graph = marked(groups.step.recorded, found)
    first = [n.inputs[0] for n in graph.nodes if entry_flops(n.entry)]
    assert len(first) == 3 and len({*first}) == 1
    made = [(node, i) for node in graph.nodes for i in range(len(node.entry.outs))]
    assert made[first[0]][0].entry.sharding == of_x[0].sharding


def test_features_and_parameters_over_two_axes_move_what_an_expert_would():
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))

    def read(recorded, groups, found):
        leaves = dict(zip(recorded.leaves, found.leaves))
        specs = {
            recorded.names[s].partition(".")[2]: x.partition_spec
            for s, x in leaves.items()
            if s in recorded.names
        }
        program = build(marked(recorded.graph, found), "candidate")
        return specs, communication.of_text(program.compiled_text(), program.lowered)

    specs, moved = chosen(Kind.TENSOR, mesh, read)
    # Whatever is gathered over `fsdp` is the minor part of a dim that `tensor` splits.
    both = [dim for spec in specs.values() for dim in spec if isinstance(dim, tuple)]
    assert all(dim == ("tensor", "fsdp") for dim in both)
    up, down = (specs[f"blocks.0.{name}.weight"] for name in ("up", "down"))
    assert "tensor" in str(up[0]) and "tensor" in str(down[1])  # (out, in)
    gathers = [c for c in moved.where(kind="all-gather") if "blocks" in str(c.causes[0])]
    assert gathers and {c.axes for c in gathers} == {("fsdp",)}
    large = [c for c in moved if c.kind in ("all-to-all", "collective-permute")]
    assert sum(c.moved_bytes for c in large) < 0.05 * sum(c.moved_bytes for c in moved)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_values_are_those_of_eager_torch(is_hybrid):
    model, batch = words(batch=16)
    eager = training(copy.deepcopy(model), torch.optim.SGD, lr=0.1)
    expected = [eager.step(*batch).item() for _ in range(3)]
    own = training(model.to("xla"), torch.optim.SGD, lr=0.1)
    inputs = [x.to("xla") for x in batch]
    mesh = spmd.Mesh(range(8), (4, 2), ("x", "y"))
    if is_hybrid:
        mesh = spmd.HybridMesh(
            ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2), axis_names=("x", "y"), num_slices=2
        )
    plan = spmd.auto_shard(own.step, *inputs, mesh=mesh, candidates=1)
    assert plan.mesh == mesh and plan.mesh.axis_names == ("x", "y")
    assert [own.step(*inputs).item() for _ in range(3)] == pytest.approx(expected, rel=1e-5)
