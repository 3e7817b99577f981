"""Language models of transformers train as in eager torch.

No operation runs on the host, and nothing is compiled after the first step. Models that differ
little from another one in this file run only with

    SPMD_ALL_MODELS=1 pytest packages/spmd-core/tests/system/test_models_language.py
"""

import os

import pytest
import torch
import transformers as hf
from tiers import exhaustive
from training import adamw, check_training, hugging_face, shard_parameters, to_device

import spmd_core as spmd

VOCAB, BATCH, SEQ = 64, 8, 12
# Options that have the same name in nearly every decoder's config.
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False,
}  # fmt: skip


def tokens():
    ids = torch.randint(3, VOCAB, (BATCH, SEQ))
    return {"input_ids": ids, "labels": ids}


def gpt2(dropout=0.0):
    config = hf.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=32, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    return hf.GPT2LMHeadModel(config), tokens()


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), tokens()


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8)), tokens()


def mixtral():
    config = hf.MixtralConfig(
        **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config), tokens()


def gemma():
    return hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER, head_dim=8)), tokens()


def gemma2():
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, head_dim=8, sliding_window=8)), tokens()


def gemma3():
    return hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8)
    ), tokens()


def phi():
    return hf.PhiForCausalLM(hf.PhiConfig(**DECODER)), tokens()


def deepseek_v3():
    config = hf.DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config), tokens()


def mamba():
    config = hf.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        time_step_rank=4,
        use_cache=False,
    )
    return hf.MambaForCausalLM(config), tokens()


def bert():
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    batch = tokens()
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[::2, SEQ - 3 :] = 0
    return hf.BertForMaskedLM(config), {
        **batch,
        "attention_mask": mask,
        "labels": torch.where(torch.rand(BATCH, SEQ) < 0.3, batch["labels"], -100),
    }


def t5():
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), tokens()


def whisper():
    config = hf.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=16, max_target_positions=16, dropout=0,
        attention_dropout=0, activation_dropout=0, decoder_start_token_id=0, pad_token_id=2,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(BATCH, 8, 32),
        "labels": tokens()["labels"],
    }


# What the others have beside a Llama is in `ops/`, as all that models compute.
MODELS = [llama, *map(exhaustive, [qwen3, gemma, phi, t5]), deepseek_v3, mamba, whisper]
MODELS += [gemma2, gemma3] if os.environ.get("SPMD_ALL_MODELS") else []


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_three_steps_equal_eager_torch(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model, batch = make()
    check_training(model, batch, mesh_1d)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [pytest.param(gpt2, marks=pytest.mark.one_device), mixtral, exhaustive(bert)],
)
def test_three_steps_of_adamw_equal_eager_torch(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model, batch = make()
    check_training(model, batch, mesh_1d, optimizer=adamw)


@pytest.mark.exhaustive  # test_one_program.py trains with dropout
@pytest.mark.slow
def test_a_model_with_dropout_learns(mesh_1d, num_devices, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model, batch = gpt2(dropout=0.1)
    model.to("xla")
    shard_parameters(model, mesh_1d, num_devices)
    inputs, optimizer = (
        to_device(batch, mesh_1d, num_devices),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
    losses = []
    for _ in range(12):
        loss = hugging_face(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).cpu()
    assert torch.isfinite(losses).all()
    assert losses[-3:].mean() < losses[:3].mean() - 0.3
    with torch.no_grad():
        same = [hugging_face(model, inputs).item() for _ in range(2)]
        still = [hugging_face(model.eval(), inputs).item() for _ in range(2)]
    assert same[0] != same[1]
    assert still[0] == still[1]
