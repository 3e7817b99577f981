"""The reference program computes the results of Hugging Face's GPT-2 and torch.optim.AdamW."""

import jax
import numpy as np
import pytest
import torch
from tiers import exhaustive
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import jax_gpt2_step as reference

TINY = reference.Shape(num_layers=2, width=32, num_heads=4, vocabulary=64, batch=8, seq=16)


def make_torch_model(shape: reference.Shape) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=shape.num_layers,
        n_embd=shape.width,
        n_head=shape.num_heads,
        vocab_size=shape.vocabulary,
        n_positions=shape.seq,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def test_names_and_shapes_are_hugging_faces() -> None:
    model = make_torch_model(TINY)
    assert reference.parameter_shapes(TINY) == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("num_devices", [exhaustive(1), exhaustive(2), 8])
def test_three_steps_equal_torch(num_devices: int) -> None:
    if num_devices > jax.device_count():
        pytest.skip(f"needs {num_devices} devices; this run has {jax.device_count()}")
    model = make_torch_model(TINY)
    tokens = reference.random_tokens(TINY)
    values = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    step, state, batch = reference.build(num_devices, shape=TINY, parameters=values, tokens=tokens)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.from_numpy(tokens).long()
    for _ in range(3):
        expected = model(ids, labels=ids).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        state, loss = step(state, batch)
        np.testing.assert_allclose(float(loss), expected.item(), rtol=2e-6)
    for name, p in model.named_parameters():
        moments = optimizer.state[p]
        compared = np.ones(p.shape, dtype=bool)
        if name.endswith("c_attn.bias"):
            # Softmax cancels a shift of the keys, so the gradient of the key bias is 0 plus
            # rounding noise, which Adam scales to full steps.
            compared[TINY.width : 2 * TINY.width] = False
        for got, want, tolerance in (
            (state.mean[name], moments["exp_avg"], 1e-5),
            (state.square[name], moments["exp_avg_sq"], 1e-5),
            (state.parameters[name], p.detach(), 1e-5),
        ):
            bound = tolerance * float(want.abs().max())
            np.testing.assert_allclose(
                np.asarray(got)[compared],
                want.numpy()[compared],
                rtol=1e-4,
                atol=bound,
                err_msg=name,
            )
        sharding = state.parameters[name].sharding
        assert isinstance(sharding, jax.sharding.NamedSharding)
        assert sharding.spec == jax.sharding.PartitionSpec(
            *reference.partition_spec(p.shape, num_devices)
        ), name
    assert int(state.num_steps) == 3


def test_state_is_donated() -> None:
    step, state, batch = reference.build(1, shape=TINY)
    new, _ = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_too_many_devices_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"4096 devices were asked for and jax has \d+"):
        reference.build(4096)


def test_batch_that_does_not_divide_is_an_error() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    with pytest.raises(ValueError, match="7 sequences do not divide by 2"):
        reference.build(2, shape=reference.Shape(batch=7))


def test_the_largest_dim_that_divides_is_split() -> None:
    assert reference.partition_spec((16, 64), 8) == (None, "fsdp")
    assert reference.partition_spec((63, 16), 8) == (None, "fsdp")
    assert reference.partition_spec((7,), 8) == (None,)
