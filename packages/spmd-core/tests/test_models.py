"""Models that nobody here wrote train as in eager torch, with no operation on the host and nothing compiled after the second step."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

import spmd_core as spmd


def gpt2():
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=128, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    ids = torch.randint(0, 128, (8, 16))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama():
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    ids = torch.randint(0, 128, (8, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def resnet():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}


@pytest.mark.parametrize("make", [gpt2, llama, resnet])
def test_three_steps_equal_eager_torch(make, mesh_1d, num_devices, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    reference, batch = make()
    model = copy.deepcopy(reference).to("xla")
    for p in model.parameters():
        dim = next((d for d, n in enumerate(p.shape) if n % num_devices == 0), None)
        spmd.mark_sharding(p, mesh_1d, tuple("x" if d == dim else None for d in range(p.dim())))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    compiles = []
    for _ in range(3):
        losses = []
        for m, optimizer, device in zip((reference, model), optimizers, ("cpu", "xla")):
            inputs = {name: x.to(device) for name, x in batch.items()}
            if device == "xla":
                for x in inputs.values():
                    spmd.mark_sharding(x, mesh_1d, ("x",))
            loss = m(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        spmd.sync()
        compiles.append(spmd.metrics.counter("compiles"))
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-4, atol=1e-5)
    assert compiles[2] == compiles[1]
