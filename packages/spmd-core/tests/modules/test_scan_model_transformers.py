"""`scan_model` on models of Hugging Face, against the same models in eager torch."""

import copy

import pytest
import torch
import transformers

import spmd_core as spmd

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HIDDEN = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(attention="sdpa"):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=32,
            n_embd=16,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation=attention,
            **SIZES,
        )
    )


def llama(attention="sdpa"):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_key_value_heads=1, attn_implementation=attention, **SIZES, **HIDDEN
        )
    )


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **HIDDEN, **NO_DROPOUT))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=3,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **SIZES,
        )
    )


def checkpointed(make):
    def made():
        model = make()
        model.activation_checkpointing_enable()
        return model

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        gpt2,
        lambda: gpt2("eager"),
        checkpointed(gpt2),
        llama,
        checkpointed(llama),
        bert,
        t5,
    ],
    ids=["gpt2", "gpt2 eager", "gpt2 recomputed", "llama", "llama recomputed", "bert", "t5"],
)
def test_losses_and_gradients(make):
    torch.manual_seed(0)
    eager = make().train()
    model = spmd.scan_model(copy.deepcopy(eager).to("xla"))
    before = spmd.metrics.counter("layers_called_apart")
    ids = torch.randint(3, 64, (2, 12))
    keywords = {} if make is bert else {"use_cache": False}
    expected = eager(ids, labels=ids, **keywords).loss
    loss = model(ids.to("xla"), labels=ids.to("xla"), **keywords).loss
    expected.backward()
    loss.backward()
    assert "spmd::scan" in spmd.debugging.passes(loss)
    assert spmd.metrics.counter("layers_called_apart") == before
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    for (name, own), other in zip(model.named_parameters(), eager.parameters()):
        # The gradient of keys' biases is nought but for rounding.
        torch.testing.assert_close(
            own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [False, True])
def test_generation(use_cache):
    torch.manual_seed(0)
    eager = gpt2().eval()
    model = spmd.scan_model(copy.deepcopy(eager).to("xla"))
    ids = torch.randint(3, 64, (2, 4))
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
    expected = eager.generate(ids, **options)
    if use_cache:  # each layer writes to the cache at its own place
        with pytest.warns(UserWarning, match="scan_model: .* got a read of attn.layer_idx"):
            found = model.generate(ids.to("xla"), **options)
    else:
        found = model.generate(ids.to("xla"), **options)
    assert torch.equal(found.cpu(), expected)
