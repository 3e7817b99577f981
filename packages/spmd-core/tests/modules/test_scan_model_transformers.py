"""Models of transformers whose stacks run as loops, against eager torch."""

import copy

import pytest
import torch
import transformers as hf
from tiers import exhaustive

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, SpmdError

pytestmark = pytest.mark.slow
VOCAB, LAYERS = 64, 4
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False,
}  # fmt: skip


def gpt2(**options):
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=LAYERS, n_head=2, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1, use_cache=False, **options,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **options))


def bert(**options):
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0, **options,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def vit(**options):
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5, **options,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def t5(**options):
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=2,
        dropout_rate=0, use_cache=False, decoder_start_token_id=0, **options,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def pair(make, **options):
    torch.manual_seed(0)
    right = make(**options)
    return right, spmd.scan_model(copy.deepcopy(right).to("xla"))


def inputs(make):
    torch.manual_seed(1)
    if make is vit:
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 3])}
    ids, mask = torch.randint(3, VOCAB, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def on_device(given):
    return {name: t.to("xla") if isinstance(t, torch.Tensor) else t for name, t in given.items()}


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (llama, "sdpa"),
        (vit, "eager"),
        (t5, "sdpa"),
        *(exhaustive(make, "sdpa") for make in (gpt2, bert, vit)),
        *(exhaustive(make, "eager") for make in (gpt2, llama, bert, t5)),
    ],
)
def test_a_step(make, attention):
    """The loss, logits and all gradients, in training mode; and values in eval mode."""
    right, mine = pair(make, attn_implementation=attention)
    given = inputs(make)
    expected, actual = right(**given), mine(**on_device(given))
    expected.loss.backward()
    actual.loss.backward()
    grads = [p.grad for p in mine.parameters()]
    text = spmd.debugging.operations(actual.loss, actual.logits, *grads)
    # transformers reads T5's mask behind the encoder, whose forward is a program of its own.
    assert text.count("spmd::scan(") == (3 if make is t5 else 2)
    torch.testing.assert_close(actual.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)
    for p, q in zip(right.parameters(), grads, strict=True):
        torch.testing.assert_close(q.cpu(), p.grad, rtol=1e-3, atol=1e-5)
    assert [*mine.state_dict()] == [*right.state_dict()]
    with torch.no_grad():
        expected, actual = right.eval()(**given), mine.eval()(**on_device(given))
    torch.testing.assert_close(actual.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [exhaustive(gpt2), llama, exhaustive(t5)])
def test_hidden_states(make):
    right, mine = pair(make)
    given = {**inputs(make), "output_hidden_states": True}
    names = ["decoder_hidden_states", "encoder_hidden_states"] if make is t5 else ["hidden_states"]
    with torch.no_grad():
        expected, actual = right(**given), mine(**on_device(given))
    for name in names:
        assert len(actual[name]) == len(expected[name]) == LAYERS + 1
        for a, b in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    actual = mine(**on_device(inputs(make)))  # transformers' hooks stay, and collect nothing
    torch.testing.assert_close(actual.logits.detach().cpu(), expected.logits, rtol=1e-4, atol=1e-5)


def test_generation_and_caches():
    right, mine = pair(llama)
    right.eval(), mine.eval()
    ids = torch.randint(3, VOCAB, (2, 5))
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
    mask = torch.ones_like(ids)
    expected = right.generate(ids, attention_mask=mask, **options)
    actual = mine.generate(ids.to("xla"), attention_mask=mask.to("xla"), **options)
    assert torch.equal(actual.cpu(), expected)
    options["use_cache"] = True
    expected = right.generate(ids, attention_mask=mask, **options)
    with pytest.warns(UserWarning, match="past_key_values, a DynamicCache, .*use_cache=False"):
        actual = mine.generate(ids.to("xla"), attention_mask=mask.to("xla"), **options)
    assert torch.equal(actual.cpu(), expected)


def test_a_static_cache_is_written_in_a_loop():
    """It has a counter on the device, too; `generate` makes one in its first step."""
    right, mine = pair(llama)
    right.eval(), mine.eval()
    found = []
    before = spmd.metrics.counter("stacks_run_layer_by_layer")
    for model, device in ((right, "cpu"), (mine, "xla")):
        cache = hf.StaticCache(config=right.config, max_cache_len=9)
        cache.early_initialization(2, 2, 8, dtype=torch.float32, device=device)
        torch.manual_seed(1)
        ids, logits = torch.randint(3, VOCAB, (2, 5)).to(device), []
        for _ in range(3):
            with torch.no_grad():
                logits.append(model(ids, past_key_values=cache, use_cache=True).logits)
            ids = logits[-1][:, -1:].argmax(-1)
        parts = [(x.keys, x.values, x.cumulative_length) for x in cache.layers]
        found.append([t.cpu() for t in (*logits, *sum(parts, ()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert spmd.metrics.counter("stacks_run_layer_by_layer") == before
    ids = torch.randint(3, VOCAB, (2, 5))
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    options |= {"use_cache": True, "cache_implementation": "static"}
    mask = torch.ones_like(ids)
    expected = right.generate(ids, attention_mask=mask, **options)
    with pytest.warns(UserWarning, match="past_key_values, a StaticCache, .*differ in more than"):
        actual = mine.generate(ids.to("xla"), attention_mask=mask.to("xla"), **options)
    assert torch.equal(actual.cpu(), expected)
    assert spmd.metrics.counter("stacks_run_layer_by_layer") == before + 1


def test_gradient_checkpointing():
    right, mine = pair(llama)
    given = inputs(llama)
    for model in (right, mine):
        older = getattr(model, "gradient_checkpointing_enable", None)
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False})
    right(**given).loss.backward()
    loss = mine(**on_device(given)).loss
    loss.backward()
    for p, q in zip(right.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-5)


def test_models_whose_layers_are_of_several_kinds_are_refused():
    config = hf.Gemma2Config(**DECODER, head_dim=8, sliding_window=4)
    model = spmd.scan_model(hf.Gemma2ForCausalLM(config).to("xla"))
    with pytest.raises(SpmdError, match="layer 1"):
        model(**on_device(inputs(llama)))
    right, mine = pair(llama, attn_implementation="eager")
    given = {**inputs(llama), "output_attentions": True}
    with pytest.raises(ControlFlowError, match="keep no tensor that they compute"):
        mine(**on_device(given))
    spmd.scan_model(mine, undo=True)
    for a, b in zip(mine(**on_device(given)).attentions, right(**given).attentions, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)
