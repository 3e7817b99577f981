"""`generate()` of transformers: token for token as on the CPU, in few programs."""

import pytest
import torch
import transformers as hf
from tiers import exhaustive

import spmd_core as spmd
from spmd_core.program import compile_cache, growing_program

pytestmark = pytest.mark.slow
VOCAB = 64
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2,
}  # fmt: skip


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=10))


def gpt2():
    config = hf.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=64, bos_token_id=0,
        eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(growing_program, "_LEAST_ROOM", 8)
    monkeypatch.setattr(growing_program, "_CHEAP_BYTES", 0)
    compile_cache.clear()


def model_programs() -> int:
    """How many compiled programs run the model, and not a check of the inputs."""
    return sum(program.num_ops > 40 for program in spmd.metrics.programs())


def check(make, *, batch=2, prompt=5, marks=lambda model: None, **options):
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(3, VOCAB, (batch, prompt))
    options = {"do_sample": False, "max_new_tokens": 14, **options}
    expected = model.generate(ids, **options)
    model = model.to("xla")
    marks(model)
    found = model.generate(ids.to("xla"), **options)
    assert found.cpu().tolist() == expected.tolist()
    return model, ids, options


@pytest.mark.parametrize("make", [llama, exhaustive(gpt2)])
def test_a_dynamic_cache_takes_a_program_for_each_power_of_two(make):
    model, ids, options = check(make)
    # The prompt of 5, the length 6, and room for 8, 16 and 32 positions.
    assert model_programs() <= 5
    compiled = spmd.metrics.counter("compiles")
    longer = model.generate(ids.to("xla"), **options | {"max_new_tokens": 18})
    assert longer.shape == (2, 23) and spmd.metrics.counter("compiles") == compiled


@pytest.mark.exhaustive
def test_a_static_cache_takes_three_programs(monkeypatch):
    monkeypatch.setattr(growing_program, "_CHEAP_BYTES", 1 << 20)
    check(llama, cache_implementation="static")
    # The prompt, the first token, and all others.
    assert model_programs() <= 3


@pytest.mark.exhaustive
def test_a_window_that_slides():
    check(mistral, max_new_tokens=9)  # 14 positions, of which the window has 10


@pytest.mark.exhaustive
def test_beams_that_change_places():
    check(llama, num_beams=3, max_new_tokens=5)  # of 5 to 10 positions: two bounds


def test_a_sharded_model(mesh_1d):
    def marks(model):
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                rows = any(part in name for part in ("q_proj", "gate", "up", "embed"))
                spmd.mark_sharding(weight, mesh_1d, ("x", None) if rows else (None, "x"))

    check(llama, marks=marks)
    assert model_programs() <= 6


def test_samples_are_those_of_the_seed():
    torch.manual_seed(0)
    model = llama().eval().to("xla")
    ids = torch.randint(3, VOCAB, (2, 5)).to("xla")

    def sample():
        torch.manual_seed(3)
        return model.generate(ids, do_sample=True, max_new_tokens=10, top_k=20).cpu()

    first = sample()
    assert first.shape == (2, 15) and bool((first < VOCAB).all())
    assert first.tolist() == sample().tolist()
