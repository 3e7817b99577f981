"""Compiled models, losses and optimizer steps have the values of eager torch on the CPU."""

import copy
import re
import warnings

import pytest
import torch
from tiers import exhaustive
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core import metrics

transformers = pytest.importorskip("transformers")

# torch.compile imports inductor, which decorates methods for torch.jit; Dynamo asks each tensor for
# its gradient.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def assert_equal_states(on_device, expected):
    for found, wanted in zip(on_device.state_dict().values(), expected.state_dict().values()):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("options", "width"),
    [({}, 12), *(exhaustive({"backend": name}, 16) for name in ("openxla", "aot_eager"))],
    ids=["default", "openxla", "aot_autograd"],
)
def test_training_with_running_statistics(options, width, mesh_2d):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4)
    )
    on_device = copy.deepcopy(model).to("xla")
    spmd.mark_sharding(on_device[0].weight, mesh_2d, ("b", None))
    spmd.mark_sharding(on_device[3].weight, mesh_2d, (None, "b"))
    compiled = torch.compile(on_device, fullgraph=True, **options)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, on_device)]
    for size in (8, 8, 6):
        x = torch.randn(size, 8)
        sharded = spmd.mark_sharding(x.to("xla"), mesh_2d, ("a", None))
        losses = [model(x).square().mean(), compiled(sharded).square().mean()]
        torch.testing.assert_close(losses[1].cpu(), losses[0])
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_equal_states(on_device, model)
    assert on_device[0].weight.partition_spec == on_device[0].weight.grad.partition_spec
    # Evaluation is another graph.
    x = torch.randn(5, 8)
    model.eval(), on_device.eval()
    torch.testing.assert_close(compiled(x.to("xla")).cpu(), model(x), rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A block of GPT-2 with its head and loss, which marks its activations."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.projection = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def mark(self, x, *spec):
        return x if x.device.type == "cpu" else spmd.mark_sharding(x, self.mesh, spec)

    def forward(self, ids, dropout=0.0):
        x = self.mark(self.embedding(ids), "a", None, None)
        parts = self.attention(self.norm_1(x)).view(*ids.shape, 3, 4, 4).permute(2, 0, 3, 1, 4)
        q, k, v = (self.mark(part, "a", "b") for part in parts.unbind())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.projection(y.transpose(1, 2).flatten(2)), dropout)
        hidden = self.mark(F.gelu(self.up(self.norm_2(x))), "a", None, "b")
        logits = self.head(x + self.down(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.one_device
def test_training_a_transformer_that_marks_inside(mesh_2d):
    torch.manual_seed(0)
    model = Block(mesh_2d)
    on_device = copy.deepcopy(model).to("xla")
    graphs = []

    def backend(graph_module, inputs):
        graphs.append([node.target for node in graph_module.graph.nodes])
        return torch._dynamo.lookup_backend("openxla")(graph_module, inputs)

    compiled = torch.compile(on_device, backend=backend, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, on_device)]
    for size in (8, 8, 5, 3):
        ids = torch.randint(0, 11, (size, 6))
        losses = [model(ids), compiled(ids.to("xla"))]
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-4, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_equal_states(on_device, model)
    # The third size made the first dim a symbol, which the fourth shares.
    assert len(graphs) == 2
    assert all(F.scaled_dot_product_attention in graph for graph in graphs)
    assert all(graph.count(torch.ops.xla.traced_mark) == 5 for graph in graphs)


def test_a_pretrained_language_model():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    on_device = copy.deepcopy(model).to("xla")
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(on_device, fullgraph=True)(ids.to("xla")).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_function_has_the_programs_of_the_function():
    model = nn.Linear(5, 7, device="xla")
    x = torch.randn(3, 5, device="xla")

    def step(forward):
        model.zero_grad()
        forward(x).relu().mean().backward()
        spmd.sync()

    step(model), step(model)
    known = len(metrics.programs())
    compiled = torch.compile(model, fullgraph=True)
    step(compiled), step(compiled)
    assert len(metrics.programs()) == known


def test_a_compiled_step_and_a_compiled_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    on_device = copy.deepcopy(model).to("xla")
    expected, optimizer = (torch.optim.AdamW(m.parameters()) for m in (model, on_device))
    step = torch.compile(optimizer.step)

    def train(model, optimizer, step, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step()
        return loss

    # `backward` inside leaves the graph, as for any other device.
    for call in (train, torch.compile(train)):
        for _ in range(2):
            x = torch.randn(3, 6)
            found = call(on_device, optimizer, step, x.to("xla"))
            wanted = train(model, expected, expected.step, x)
            torch.testing.assert_close(found.cpu(), wanted)
    assert_equal_states(on_device, model)


def test_random_numbers_autocast_and_modes():
    def function(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = x @ w
        with torch.no_grad():
            y = y + torch.rand(5, device=x.device)
        return F.dropout(y.float(), 0.5), torch.is_grad_enabled(), y

    x, w = torch.randn(3, 4, device="xla"), torch.randn(4, 5, device="xla").requires_grad_()
    compiled = torch.compile(function, fullgraph=True)
    torch.manual_seed(1)
    expected = function(x, w)
    torch.manual_seed(1)
    found = compiled(x, w)
    assert torch.equal(found[0].cpu(), expected[0].cpu()) and found[1] is True
    assert not found[2].requires_grad and found[2].dtype is torch.float32
    with torch.inference_mode():
        assert compiled(x, w)[0].is_inference()


def test_sizes_that_change():
    @torch.compile(fullgraph=True)
    def function(x):
        return (x * x.shape[0]).sum(0) + x.shape[0], x[: x.shape[0] // 2].flip(0)

    for n in (3, 5, 8, 7, 1):
        x = torch.randn(n, 2)
        for found, expected in zip(
            function(x.to("xla")), ((x * n).sum(0) + n, x[: n // 2].flip(0))
        ):
            torch.testing.assert_close(found.cpu(), expected)


def test_inductor_gets_the_graphs_of_other_devices_alone(monkeypatch):
    seen = []

    def inductor(self, graph_module, inputs):
        seen.append(inputs)
        return graph_module.forward

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", inductor)
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(seen) == 1
    assert torch.compile(lambda x: x + 1)(torch.ones(2, device="xla")).tolist() == [2, 2]
    assert torch.compile(lambda x: x.to("xla") + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(seen) == 1


def test_options_of_inductor_are_said_to_have_no_effect():
    x = torch.ones(2, device="xla")
    with pytest.warns(UserWarning, match=r"configure inductor.*got \{'max_autotune': True") as seen:
        assert torch.compile(lambda x: x + 1, mode="max-autotune")(x).tolist() == [2, 2]
    assert "Leave them out" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(lambda x: x + 2)(x).tolist() == [3, 3]


def test_the_backend_has_the_name_that_torch_knows():
    assert "openxla" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("openxla").__module__ == "spmd_core.dynamo.backend"
    explained = torch._dynamo.explain(lambda x: F.relu(x @ x).sum())(torch.ones(2, 2, device="xla"))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_operations_of_a_graph_have_the_users_lines():
    def doubled(x):
        return x * 2

    def function(x):
        y = doubled(x)
        return (y @ y).relu()

    inner, outer = (f.__code__.co_firstlineno for f in (doubled, function))
    compiled = torch.compile(function, fullgraph=True)
    x = torch.ones(3, 3, device="xla")
    with spmd.debugging.source_lines():
        text = spmd.debugging.stablehlo(compiled(x))
    for operation, line in (("mul", inner + 1), ("mm", outer + 2), ("relu", outer + 2)):
        assert re.search(rf"aten::{operation}\b[^\n]*/test_backend\.py:{line}/", text), operation

    @spmd.compile(full_graph=True)
    def region(x):
        return torch.compile(lambda x: x * x.sum().item(), fullgraph=True)(x)

    line = region.__wrapped__.__code__.co_firstlineno + 2
    with pytest.raises(spmd.errors.ProgramError, match=rf"test_backend\.py:{line} needs a value"):
        region(x)
