"""A tiny Llama with a tokenizer, its programs, an engine over them, and clients of it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import spmd_core as spmd
from examples.llama_serving.engine import Engine, Event, Failed, Finished, Piece, Request
from examples.llama_serving.loading import load_model, read_config
from examples.llama_serving.measures import Measures
from examples.llama_serving.programs import Programs

LENGTH, SLOTS, QUEUE, END = 96, 4, 100, 1
TEXT = "the cat sat on the mat. the dog ate the hat, and the cat ran off with 3 rats; über Öl. "


def tiny_tokenizer() -> Any:
    """Bytes and some merges; its decoder gives half a character where a token ends in one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def save_tiny_model(folder: Path, *, kv_heads: int) -> None:
    """A random Llama of two layers with 8 heads, and its tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def tensor_mesh(num_devices: int) -> spmd.Mesh | None:
    return spmd.Mesh(range(num_devices), (num_devices,), ("tensor",)) if num_devices > 1 else None


def make_programs(folder: Path, *, one_by_one: bool = False, scan: bool = False) -> Programs:
    """Compiled programs; with `one_by_one` those that compute no prompts together.

    With `scan` the layers run as one loop.
    """
    mesh = tensor_mesh(spmd.global_runtime_device_count())
    model = load_model(folder, read_config(folder), dtype=torch.float32, mesh=mesh)
    if scan:
        spmd.scan_model(model)
    programs = Programs(model, num_slots=SLOTS, length=LENGTH, mesh=mesh)
    if one_by_one:
        programs.sizes.rows = lambda bucket: (1,)  # type: ignore[method-assign]
    assert len(list(programs.compile_all())) == len(programs.sizes.all()) + 1
    steps: list[Any] = [programs._captured_prefill, programs._captured_decode]
    recorded = [step.recorded for step in steps]
    list(programs.compile_all())
    assert [step.recorded for step in steps] == recorded, [step.reason for step in steps]
    return programs


@dataclass
class Client:
    """Collects a request's events."""

    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Piece):
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))

    def end(self) -> Finished | Failed:
        assert self.ended.wait(60), "the request did not end"
        last = self.events[-1]
        assert not isinstance(last, Piece)
        return last


def make_engine(programs: Programs, tokenizer: Any, **options: Any) -> Engine:
    settings = {"end_tokens": [END], "max_queued": QUEUE, "measures": Measures(), **options}
    return Engine(programs, tokenizer, **settings)


def ask(engine: Engine, requests: Sequence[Request]) -> list[Client]:
    clients = [Client() for _ in requests]
    engine.submit(list(zip(requests, clients)))
    return clients


def wait_idle(engine: Engine) -> None:
    """Until no slot is held, no request waits, and the thread has nothing on its way."""
    for _ in range(600):
        if engine.is_idle:
            return
        time.sleep(0.05)
    raise AssertionError("the engine did not become idle")
