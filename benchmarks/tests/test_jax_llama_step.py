"""The reference program computes the results of the Llama recipe's step in eager torch."""

import re

import jax
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import jax_llama_step as reference
from benchmarks.fixed_llama_step import batch_of
from examples.llama_tp.model import build_model, next_token_loss
from examples.llama_tp.presets import ModelPreset
from examples.training.schedule import decay_groups

TINY = ModelPreset("tiny", 2, 32, 48, 4, 2, 64, 16, 4, 1e-3)


def make_torch_model(model: ModelPreset) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, vocab_size=model.vocab_size, positions=model.seq)


def test_names_and_shapes_are_hugging_faces() -> None:
    model = make_torch_model(TINY)
    assert reference.parameter_shapes(TINY) == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("fsdp", "tensor", "keeps_nothing_gathered"),
    [(1, 1, False), (4, 2, False), (4, 2, True)],
)
def test_three_steps_equal_torch(
    monkeypatch: pytest.MonkeyPatch, fsdp: int, tensor: int, keeps_nothing_gathered: bool
) -> None:
    if fsdp * tensor > jax.device_count():
        pytest.skip(f"needs {fsdp * tensor} devices; this run has {jax.device_count()}")
    monkeypatch.setattr(reference, "MAX_NORM", 0.5)  # so that the gradients are scaled
    # With torch's 1e-8, Adam scales a gradient that is almost 0, and its rounding, to a full step.
    monkeypatch.setattr(reference, "EPSILON", 1e-3)
    setup = reference.Setup(TINY, fsdp, tensor, keeps_nothing_gathered)
    model = make_torch_model(TINY)
    parameters = [*model.parameters()]
    groups = decay_groups(parameters, reference.WEIGHT_DECAY)
    betas = (reference.BETA_1, reference.BETA_2)
    optimizer = torch.optim.AdamW(
        groups, lr=reference.LEARNING_RATE, betas=betas, eps=reference.EPSILON
    )
    values = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    tokens, labels = batch_of(setup)
    step, state, batch = reference.build(setup, values, tokens, labels)
    for _ in range(3):
        expected = next_token_loss(model, torch.from_numpy(tokens), torch.from_numpy(labels))
        expected.backward()
        norm = nn.utils.clip_grad_norm_(parameters, reference.MAX_NORM)
        assert norm > reference.MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        state, loss = step(state, *batch)
        np.testing.assert_allclose(float(loss), expected.item(), rtol=2e-6)
    for name, p in model.named_parameters():
        moments = optimizer.state[p]
        for got, want in (
            (state.mean[name], moments["exp_avg"]),
            (state.square[name], moments["exp_avg_sq"]),
            (state.parameters[name], p.detach()),
        ):
            bound = 1e-5 * float(want.abs().max())
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=bound, err_msg=name)
        sharding = state.parameters[name].sharding
        assert isinstance(sharding, jax.sharding.NamedSharding)
        assert sharding.spec == reference.partition_spec(name), name
    assert int(state.num_steps) == 3


def gathers(keeps_nothing_gathered: bool) -> list[str]:
    setup = reference.Setup(TINY, keeps_nothing_gathered=keeps_nothing_gathered)
    values = {n: np.zeros(s, np.float32) for n, s in reference.parameter_shapes(TINY).items()}
    step, _, _ = reference.build(setup, values, *batch_of(setup))
    text = step.as_text()  # type: ignore[attr-defined]
    return re.findall(r"= (\S+?)\{\S* all-gather\(", text)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_parameters_are_gathered_twice_unless_they_are_kept() -> None:
    d, f, k = TINY.width, TINY.hidden // 2, TINY.width // 4
    kept, again = gathers(False), gathers(True)
    for shape in (f"{f},{d}", f"{d},{f}", f"{k},{d}"):
        once = kept.count(f"f32[{shape}]")
        assert once and again.count(f"f32[{shape}]") > once, shape
