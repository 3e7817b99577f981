"""The models train under each manual sharding as in eager torch."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from tiers import exhaustive
from torch import Tensor, nn

import spmd_core as spmd
from benchmarks.auto_models import MODELS, mesh_of
from benchmarks.auto_models.manual import mark_outputs, spec_of

# In the default tier some of them, as each case compiles a program: the recipes' own tests train
# GPT-2 and Llama with the recipes' marks, and MLP-Mixer's marks are told by names as T5's are.
DEFAULT = {
    ("resnet", "spatial"),
    ("t5", "fsdp_tensor"),
    ("mixtral", "fsdp"),
    ("two_tower", "fsdp_tensor"),
}
EVERY = [(model.name, strategy) for model in MODELS.values() for strategy in model.manual]
CASES = [case if case in DEFAULT else exhaustive(*case) for case in EVERY]
# Of all elements of the parameters, the share that a device of 8 holds at most: tiny models have
# many biases, which are replicated.
MOST_HELD = {"data": 1.0, "spatial": 1.0, "fsdp": 0.4, "fully_shard": 0.4, "fsdp_tensor": 0.4}


def three_losses(step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[float]:
    losses, num_reads = [], spmd.metrics.counter("host_reads")
    for _ in range(3):
        losses.append(step(*inputs))
        spmd.sync()
    assert spmd.metrics.counter("host_reads") == num_reads
    return [loss.item() for loss in losses]


def held(model: nn.Module) -> float:
    """The share of the parameters' elements that the first device holds."""
    parameters: list[Any] = [*model.parameters()]
    on_first = [prod(p.local_shards[0].data.shape) for p in parameters]
    return sum(on_first) / sum(p.numel() for p in parameters)


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_losses_are_those_of_eager_torch(
    name: str, strategy: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-5, relative: sums over devices add up float32 terms in another order."""
    monkeypatch.setattr(spmd.config, "strict", True)
    torch.manual_seed(0)
    right, _, right_step, _ = MODELS[name].build("tiny", "cpu")
    model, _, step, inputs = MODELS[name].build("tiny", "xla")
    MODELS[name].manual[strategy](model, inputs, mesh_of(strategy, num_devices))
    assert not spmd.metrics.counter("executions"), "weights and inputs are drawn as marked"
    spmd.sync()
    # On the device other random numbers are drawn.
    model.load_state_dict(right.state_dict())
    actual = three_losses(step, inputs)
    expected = three_losses(right_step, tuple(t.cpu() for t in inputs))
    assert expected[2] < expected[0]
    assert actual == pytest.approx(expected, rel=1e-5)
    if num_devices == 8:
        assert held(model) <= MOST_HELD[strategy]


def test_sizes_are_the_published_ones() -> None:
    published = {
        ("gpt2", "124M"): 124.5, ("gpt2", "1.5B"): 1558, ("gpt2", "4B"): 4009,
        ("llama", "1B"): 1498, ("llama", "8B"): 8030, ("llama", "70B"): 68977,
        ("resnet", "1024"): 25.56, ("vit", "B/16"): 86.57, ("vit", "H/14"): 632.0,
        ("t5", "220M"): 222.9, ("mixer", "B/16"): 59.88,
    }  # fmt: skip
    for (name, size), millions in published.items():
        model, _, _, inputs = MODELS[name].build(size, "meta")
        number = sum(p.numel() for p in model.parameters())
        assert number / 1e6 == pytest.approx(millions, rel=1e-3), (name, size)
        assert inputs[0].shape[0] % 64 == 0


def test_a_forgotten_rule_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"every parameter must match a rule; got 'a.weight'"):
        spec_of("a.weight", {r"a": ()})
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(LookupError, match=r"a rule must match a module; got \['1'\]"):
        mark_outputs(model, mesh_of("data", 1), {r"0": (), r"1": ()})
    with pytest.raises(ValueError, match="the inner axes must divide the number of devices; got 3"):
        mesh_of("spatial", 8, inner=3)
