"""One tiny model in a folder, its programs, and an engine over them, for all tests."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.llama_serving.engine import Engine
from examples.llama_serving.programs import Programs
from examples.llama_serving.tests.tiny import (
    make_engine,
    make_programs,
    save_tiny_model,
    tiny_tokenizer,
    wait_idle,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, kv_heads=2)
    return path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def expected(folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """What transformers' own `generate` continues a prompt with, on the CPU."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
        )
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="session")
def programs(folder: Path) -> Programs:
    return make_programs(folder)


@pytest.fixture(scope="session")
def shared_engine(programs: Programs, tokenizer: Any) -> Iterator[Engine]:
    engine = make_engine(programs, tokenizer)
    engine.start()
    yield engine
    engine.stop(grace_s=0)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Idle before and after: `reset()` of the tests' state must not meet a step."""
    yield shared_engine
    wait_idle(shared_engine)
