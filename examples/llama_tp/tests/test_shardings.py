"""The plans: every parameter's layout, the literature's collectives, more devices than heads."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from children import figures
from tiers import exhaustive

import spmd_core as spmd
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS

TOKENS = 64


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_model(PRESETS["debug"], vocab_size=512, positions=TOKENS)


def step(net: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(net(tokens).logits.transpose(1, 2), labels)
    loss.backward()
    return loss.detach()


def on(mesh: spmd.Mesh, **options: bool) -> tuple[Any, Any]:
    """The model, in eager torch and over the mesh."""
    right = model()
    ours = copy.deepcopy(right).to("xla")
    defaults = {"sequence_parallel": True, "loss_parallel": True}
    shardings.parallelize(ours, mesh, **{**defaults, **options})
    return right, ours


def batch(mesh: spmd.Mesh) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens and labels, on the host and split over the mesh."""
    given = [*torch.randint(512, (2, 8, TOKENS))]
    spec = shardings.batch_sharding(mesh).partition_spec[1:]
    return given, [spmd.mark_sharding(t.to("xla"), mesh, spec) for t in given]


@pytest.fixture
def eight(num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are those of 8 devices")


def test_where_parameters_lie(eight: None) -> None:
    _, ours = on(spmd.parse_mesh("fsdp=2,tensor=4", 8))
    specs = {name: p.partition_spec for name, p in ours.named_parameters()}
    layer = "model.layers.1."
    assert specs[layer + "self_attn.q_proj.weight"] == ("tensor", "fsdp")
    assert specs[layer + "self_attn.o_proj.weight"] == ("fsdp", "tensor")
    assert specs[layer + "mlp.down_proj.weight"] == ("fsdp", "tensor")
    assert specs[layer + "input_layernorm.weight"] == (None,)
    assert specs["model.embed_tokens.weight"] == specs["lm_head.weight"] == ("tensor", "fsdp")


@pytest.mark.parametrize(
    "mesh",
    [
        "tensor=8",
        "fsdp=2,context=2,tensor=2",
        *map(exhaustive, ["data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4", "data=4,tensor=2"]),
        exhaustive("context=8"),
    ],
)
def test_gradients_are_those_of_eager_torch(mesh: str, eight: None) -> None:
    """With tensor=8 there are more devices than heads of keys and values."""
    grid = spmd.parse_mesh(mesh, 8)
    right, ours = on(grid)
    given, split = batch(grid)
    torch.testing.assert_close(step(ours, *split).cpu(), step(right, *given), rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(right.named_parameters(), ours.named_parameters()):
        torch.testing.assert_close(
            *({name: grad} for grad in (q[1].grad.cpu(), p.grad)), rtol=2e-4, atol=2e-6
        )


@pytest.mark.parametrize(
    ("mesh", "sequence_parallel", "expected"),
    [
        # 2 layers, each with attention and an MLP, forward and backward; embedding and output.
        ("data=2,tensor=4", False, {("all-reduce", 65_536): 10}),
        # The inputs of attention, MLPs and the output layer are gathered again in backward.
        ("data=2,tensor=4", True, {("all-gather", 65_536): 15, ("reduce-scatter", 16_384): 10}),
        # Of half of each sequence, and twice as many of them.
        exhaustive(
            "context=2,tensor=4",
            True,
            {("all-gather", 65_536): 15, ("reduce-scatter", 16_384): 10},
        ),
    ],
)
def test_the_collectives_of_a_step(
    mesh: str, sequence_parallel: bool, expected: dict[Any, int], eight: None
) -> None:
    grid = spmd.parse_mesh(mesh, 8)
    _, ours = on(grid, sequence_parallel=sequence_parallel)
    _, split = batch(grid)
    spmd.sync()
    loss = step(ours, *split)
    moved = spmd.debugging.collectives(loss, *(p.grad for p in ours.parameters()))
    over_tensor = [c for c in moved if c.axes == ("tensor",)]
    found = Counter((c.kind, c.result_bytes) for c in over_tensor if c.result_bytes > 4096)
    assert found == expected
    # The rest: numbers for each token of the loss, and gradients of the norms.
    rest = [c for c in over_tensor if c.result_bytes <= 4096]
    assert {c.kind for c in rest} == {"all-reduce"}
    assert sum(c.result_bytes for c in rest) <= 4 * 4 * TOKENS * 4 + 5 * 64 * 4
    other = mesh.split("=")[0]
    assert {c.axes for c in moved} <= {("tensor",), (other,), (other, "tensor")}
    if other == "context":
        kinds = {c.kind for c in moved if c.axes == ("context",)}
        assert kinds == {"all-reduce", "collective-permute"}


_MEMORY = """
import dataclasses
import json
import torch
import torch.nn.functional as F
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS

spmd.simulate(8)
spmd.use_spmd()
mesh = spmd.Mesh(range(8), (8,), ("tensor",))


def temporary(layers, vocabulary, **options):
    sizes = {"num_layers": layers, "num_kv_heads": 8}
    with torch.device("xla"):
        model = build_model(
            dataclasses.replace(PRESETS["debug"], **sizes), vocab_size=vocabulary, positions=256
        )
        tokens = torch.zeros(4, 256, dtype=torch.int64)
    shardings.parallelize(model, mesh, **options)
    spmd.sync()
    F.cross_entropy(model(tokens).logits.transpose(1, 2), tokens).backward()
    spmd.debugging.hlo(*(p.grad for p in model.parameters()))  # compiles it, and runs nothing
    return spmd.metrics.programs()[-1].temp_bytes


found = {}
for split in (False, True):
    found[f"logits {split}"] = temporary(1, 4096, sequence_parallel=True, loss_parallel=split)
    layers = [
        temporary(n, 256, sequence_parallel=split, loss_parallel=True) for n in (2, 6)
    ]
    found[f"layer {split}"] = (layers[1] - layers[0]) / 4
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_what_sequence_and_loss_parallelism_save(eight: None) -> None:
    found = figures(_MEMORY)
    logits, hidden = 4 * 256 * 4096 * 4, 4 * 256 * 64 * 4
    assert found["logits False"] - found["logits True"] > 0.85 * logits
    # Inputs and results of attention, of the MLP and of the norms, of which an eighth is left.
    assert found["layer False"] - found["layer True"] > 7 / 8 * 3.5 * hidden


@pytest.mark.exhaustive
def test_without_loss_parallelism_the_logits_are_gathered(eight: None) -> None:
    """With it they are not: above, nothing as large moves."""
    grid = spmd.parse_mesh("data=2,tensor=4", 8)
    _, ours = on(grid, loss_parallel=False)
    _, split = batch(grid)
    spmd.sync()
    loss = step(ours, *split)
    moved = spmd.debugging.collectives(loss, *(p.grad for p in ours.parameters()))
    assert max(c.result_bytes for c in moved) == 4 * TOKENS * 512 * 4
