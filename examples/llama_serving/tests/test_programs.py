"""The tokens of transformers' `generate`, in whatever slots and order, from programs made once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_serving.programs import Programs, Prompt
from examples.llama_serving.sampling import NOT_FINITE, SamplingOptions
from examples.llama_serving.tests.tiny import LENGTH, SLOTS, make_programs, save_tiny_model

pytestmark = pytest.mark.one_device
GREEDY = SamplingOptions()


def prompt(length: int) -> list[int]:
    return torch.randint(
        2, 320, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def prefill(
    programs: Programs, slot: int, ids: Sequence[int], options: SamplingOptions = GREEDY
) -> list[int]:
    """The first token after one prompt."""
    tokens: list[int] = programs.prefill([Prompt(slot, ids, options)]).tolist()
    return tokens


def check(programs: Programs, expected: Callable[[Sequence[int], int], list[int]]) -> None:
    """Prompts of many lengths join in any slot at any step, some in place of others."""
    # The step and slot at which a prompt of a length joins.
    schedule = {1: (0, 2), 7: (0, 0), 32: (2, 1), 33: (3, 3), 64: (6, 2), 31: (7, 0), 2: (9, 1)}
    found: dict[int, list[int]] = {}
    length_in: dict[int, int] = {}
    compiles = spmd.metrics.counter("compiles")
    for step in range(14):
        for length, (joins, slot) in schedule.items():
            if joins == step:
                found[length] = prefill(programs, slot, prompt(length))
                length_in[slot] = length
        tokens = programs.decode().tolist()
        for slot, length in length_in.items():
            found[length].append(tokens[slot])
    assert spmd.metrics.counter("compiles") == compiles
    assert min(map(len, found.values())) > 5
    for length, tokens in found.items():
        wanted = expected(prompt(length), len(tokens))
        # `generate` ends at the model's end of text, the programs go on.
        assert tokens[: len(wanted)] == wanted


def test_tokens_are_those_of_generate(
    programs: Programs, expected: Callable[[Sequence[int], int], list[int]]
) -> None:
    check(programs, expected)


def test_layers_as_one_loop(
    folder: Path, expected: Callable[[Sequence[int], int], list[int]]
) -> None:
    """Their caches are written in the loop; programs have few inputs, whatever the layers."""
    before = spmd.metrics.counter("stacks_run_layer_by_layer")
    check(make_programs(folder, one_by_one=True, scan=True), expected)
    assert spmd.metrics.counter("stacks_run_layer_by_layer") == before
    decode = [p for p in spmd.metrics.programs() if p.name.startswith("decode")][-1]
    # 9 stacks of weights, 2 of caches, 3 weights, the rotation, and 6 of the slots.
    assert decode.num_leaves == 21


@pytest.mark.exhaustive  # test_engine.py has heads that it does not
@pytest.mark.parametrize("scan", [False, True])
def test_heads_that_the_axis_divides(tmp_path: Path, num_devices: int, scan: bool) -> None:
    save_tiny_model(tmp_path, kv_heads=8)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()

    def expected(ids: Sequence[int], max_tokens: int) -> list[int]:
        options: dict[str, Any] = {"attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        options |= {"do_sample": False, "max_new_tokens": max_tokens}
        return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()

    programs = make_programs(tmp_path, one_by_one=True, scan=scan)
    check(programs, expected)
    # A step has no second cache, not even for a time, and no result but tokens.
    (decode,) = [p for p in spmd.metrics.programs() if p.name.startswith("decode")]
    cache_bytes = 2 * 2 * SLOTS * 8 // num_devices * LENGTH * 8 * 4
    assert decode.alias_bytes >= cache_bytes > decode.temp_bytes
    assert decode.output_bytes - decode.alias_bytes < 1000
    if num_devices > 1:
        keys: Any = programs._cache.keys[0]
        shards = keys.local_shards
        assert [tuple(shard.data.shape) for shard in shards] == [
            (SLOTS, 8 // num_devices, LENGTH, 8)
        ] * num_devices
    before = spmd.metrics.counter("donated_bytes")
    programs.decode()
    assert spmd.metrics.counter("donated_bytes") - before >= cache_bytes


def test_a_slot_is_filled_to_its_end(
    programs: Programs, expected: Callable[[Sequence[int], int], list[int]]
) -> None:
    ids = prompt(LENGTH - 4)
    found = prefill(programs, 3, ids)
    found += [programs.decode().tolist()[3] for _ in range(3)]
    assert found == expected(ids, 4)
    for _ in range(3):  # a step or two beyond, until the host has noticed
        programs.decode()
    full = prompt(LENGTH)
    assert prefill(programs, 3, full) == expected(full, 1)


def test_nothing_of_a_slots_last_request_is_left(
    programs: Programs, expected: Callable[[Sequence[int], int], list[int]]
) -> None:
    with torch.no_grad():
        for values in programs._cache.values:
            values.fill_(float("nan"))
    ids = prompt(5)
    found = prefill(programs, 1, ids)
    rest = [programs.decode().tolist() for _ in range(3)]
    assert found + [tokens[1] for tokens in rest] == expected(ids, 4)
    # The other slots have NaNs in what they attend to, and say so.
    assert rest[0][0] == NOT_FINITE
    for slot in range(SLOTS):
        prefill(programs, slot, ids)


def test_a_request_draws_the_same_in_any_company(programs: Programs) -> None:
    ids = prompt(9)

    def tokens(slot: int, seed: int = 2**40 + 1) -> list[int]:
        options = SamplingOptions(temperature=1.5, top_k=50, top_p=0.95, seed=seed)
        first = prefill(programs, slot, ids, options)
        return first + [programs.decode().tolist()[slot] for _ in range(8)]

    prefill(programs, 0, prompt(3))
    found = tokens(2)
    for slot in range(SLOTS):
        prefill(programs, slot, prompt(40), SamplingOptions(temperature=0.5, seed=slot))
    assert tokens(1) == found
    assert tokens(1, seed=2**41 + 1) != found


def test_prompts_that_are_computed_together(
    programs: Programs, expected: Callable[[Sequence[int], int], list[int]]
) -> None:
    compiles = spmd.metrics.counter("compiles")
    for lengths in ((5, 32, 1), (9, 20), (40,)):
        slots = range(len(lengths), 0, -1)
        group = [Prompt(slot, prompt(n)) for slot, n in zip(slots, lengths)]
        found = [[token] for token in programs.prefill(group).tolist()[: len(group)]]
        for _ in range(3):
            tokens = programs.decode().tolist()
            for p, text in zip(group, found):
                text.append(tokens[p.slot])
        assert found == [expected(p.ids, 4) for p in group]
    assert spmd.metrics.counter("compiles") == compiles


@pytest.mark.exhaustive
def test_recorded_steps_have_the_tokens_of_captured_ones(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, kv_heads=8)
    captured = make_programs(tmp_path, one_by_one=True)
    # One loaded model: its weights are in both.
    options: Any = {"num_slots": SLOTS, "length": LENGTH, "mesh": captured._mesh}
    recorded = Programs(captured._model, capture=False, **options)
    found = [
        [*prefill(of, 1, prompt(7)), *(of.decode().tolist()[1] for _ in range(6))]
        for of in (captured, recorded)
    ]
    assert found[0] == found[1]
    assert not hasattr(recorded._captured_decode, "replayed")
