"""Packed documents through transformers' models: each document as if it were alone in a row."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import spmd_core as spmd
from examples.training.attention import CAUSAL_SDPA

LENGTHS = ((5, 1, 10), (13, 3))  # of the documents in two rows of 16 tokens


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "attn_implementation": CAUSAL_SDPA, "use_cache": False}
    if kind == "gpt2":
        dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return GPT2LMHeadModel(
            GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, **dropouts, **sizes)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        )
    )


def packed() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "input_ids": torch.randint(0, 50, (2, 16)),
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS]),
        "document_ids": torch.stack(
            [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
        ),
    }


def results(model: nn.Module, logits: torch.Tensor) -> list[torch.Tensor]:
    logits.square().sum().backward()
    return [
        logits.detach().cpu(),
        *(p.grad.cpu() for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_documents_are_as_if_each_were_alone(kind: str, device: str, num_devices: int) -> None:
    batch = packed()
    alone = model_of(kind)
    rows = [
        torch.cat([alone(part[None]).logits[0] for part in ids.split(lengths)])
        for ids, lengths in zip(batch["input_ids"], LENGTHS)
    ]
    right = results(alone, torch.stack(rows))

    model = model_of(kind).to(device)
    batch = {name: x.to(device) for name, x in batch.items()}
    if device == "xla":
        mesh = spmd.Mesh(range(num_devices), (min(num_devices, 2), -(-num_devices // 2)))
        for x in batch.values():
            spmd.mark_sharding(x, mesh, (0, None))
        compiles = spmd.metrics.counter("executions")
    logits = model(**batch).logits
    if device == "xla":
        assert spmd.metrics.counter("executions") == compiles  # nothing is read on the host
    for got, correct in zip(results(model, logits), right, strict=True):
        torch.testing.assert_close(got, correct, rtol=1e-3, atol=1e-4)


def test_a_mask_beside_ids_is_an_error() -> None:
    model, batch = model_of("gpt2"), packed()
    mask = torch.zeros(2, 1, 16, 16)
    with pytest.raises(ValueError, match=r"got an attention_mask too\. Leave it out"):
        model(**batch, attention_mask=mask)
