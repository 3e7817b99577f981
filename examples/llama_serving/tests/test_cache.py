"""A prompt fills its slot's row, a token its slot's position, and nothing else changes."""

import pytest
import torch
from transformers import LlamaConfig

import spmd_core as spmd
from examples.llama_serving.cache import SlotCache
from examples.llama_serving.tests.tiny import tensor_mesh


def make(num_devices: int) -> SlotCache:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=2
    )
    mesh = tensor_mesh(num_devices)
    return SlotCache(config, num_slots=3, length=5, dtype=torch.float32, mesh=mesh)


@pytest.mark.one_device
def test_what_is_written_where(num_devices: int) -> None:
    cache = make(num_devices)
    wanted = [torch.ones(3, 8, 5, 4), torch.full((3, 8, 5, 4), 2.0)]
    cache.keys[1].fill_(1)
    cache.values[1].fill_(2)
    prompts = [torch.randn(2, 8, 2, 4) for _ in wanted]
    given = cache.for_prompts(torch.tensor([2, 0]).to("xla")).update(
        *(t.to("xla") for t in prompts), layer_idx=1
    )
    for t, new, got in zip(wanted, prompts, given):
        t[[2, 0]] = 0
        t[[2, 0], :, :2] = new
        assert torch.equal(got.cpu(), new)
    token = [torch.randn(3, 8, 1, 4) for _ in wanted]
    positions = torch.tensor([4, 0, 2])
    given = cache.for_tokens(positions.to("xla")).update(*(t.to("xla") for t in token), layer_idx=1)
    for t, new, got, stored in zip(wanted, token, given, (cache.keys[1], cache.values[1])):
        t[torch.arange(3), :, positions] = new[:, :, 0]
        assert torch.equal(got.cpu(), t) and torch.equal(stored.cpu(), t)
    assert not cache.keys[0].any() and not cache.values[0].any()


def test_a_slot_has_no_length_on_the_host(num_devices: int) -> None:
    layers = make(num_devices).for_tokens(torch.zeros(3, dtype=torch.int64, device="xla"))
    with pytest.raises(NotImplementedError, match="slots have lengths of their own, on the device"):
        layers.get_seq_length()
    with pytest.raises(NotImplementedError, match="Pass position_ids and an attention mask"):
        layers.get_mask_sizes(1, 0)
    spmd.sync()
