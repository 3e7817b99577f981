"""Text to blocks: the tokenizer's round trip, the split, the order of batches, cache and errors."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.training import text_sources
from examples.training.choices import PYTHON_STDLIB
from examples.training.packed_text import pack_text
from examples.training.text import (
    TextData,
    block_batches,
    check_vocabulary,
    load_text,
    packed_blocks,
)
from examples.training.text_sources import TextError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Six files of distinct numbered sentences, one of them in a subfolder."""
    folder = tmp_path / "corpus"
    (folder / "below").mkdir(parents=True)
    for index in range(6):
        path = folder / ("below" if index == 5 else ".") / f"part{index}.txt"
        path.write_text(
            "".join(f"Sentence {line} of part {index} says naïve things.\n" for line in range(200)),
            encoding="utf-8",
        )
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    return folder


def load(source: Path | str, tmp_path: Path, **settings: Any) -> TextData:
    options: dict[str, Any] = {"vocab_size": 300, "seq": 16, **settings}
    return load_text([str(source)], cache_dir=str(tmp_path / "cache"), **options)


def test_any_text_survives_the_tokenizer(corpus: Path, tmp_path: Path) -> None:
    tokenizer = load(corpus, tmp_path).tokenizer
    for sample in ("Sentence 3 of part 1", "never seen: žluťoučký 漢字 🙂\t\n", ""):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 0


def test_blocks_hold_the_text_once_split_in_two(corpus: Path, tmp_path: Path) -> None:
    data = load(corpus, tmp_path)
    assert data.train_NT.dtype == data.validation_NT.dtype == torch.int64
    assert data.train_NT.shape[1] == data.validation_NT.shape[1] == 17
    assert 0.03 < len(data.validation_NT) / (len(data.train_NT) + len(data.validation_NT)) < 0.07
    # Inputs cover the stream without gaps, and each target is the input's next token.
    stream = data.train_NT[:, :-1].flatten()
    assert torch.equal(data.train_NT[:, 1:].flatten()[:-1], stream[1:])
    decoded = data.tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    assert decoded.count("Sentence 7 of part 2 says naïve things.\n") <= 1
    held_out = data.tokenizer.decode(data.validation_NT[:, :-1].flatten().tolist())
    sentences = [line for line in held_out.splitlines()[1:-1] if line]
    assert len(sentences) > 10
    assert not any(sentence in decoded for sentence in sentences)


def test_packed_blocks_leave_out_the_rest() -> None:
    blocks = packed_blocks(np.arange(10), 3)
    assert blocks.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert len(packed_blocks(np.arange(9), 3)) == 2


def test_the_second_time_is_from_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(corpus, tmp_path)
    # Any import of the library fails: a cached text must not need it.
    monkeypatch.setitem(sys.modules, "datasets", None)
    second = load(corpus, tmp_path)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert torch.equal(first.train_NT, second.train_NT)
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert load(corpus, tmp_path, seq=32).was_cached  # blocks are cut after the cache
    for source in (corpus, "someone/novels"):
        message = r"got no (such )?package.*\. Run: pip install .*(datasets|spmd-data\[text\])"
        with pytest.raises(TextError, match=message):
            load(source, tmp_path, vocab_size=301)


def test_a_run_goes_on_with_damaged_tokens(corpus: Path, tmp_path: Path) -> None:
    first = load(corpus, tmp_path)
    (tokens,) = (tmp_path / "cache").glob("documents/*/tokens.arrow")
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x7f")
    with pytest.warns(UserWarning, match=r"tokens.arrow differs from its digest\. If it happens"):
        second = load(corpus, tmp_path)
    assert not second.was_cached and torch.equal(first.train_NT, second.train_NT)
    assert load(corpus, tmp_path).was_cached


def test_a_run_goes_on_with_a_damaged_tokenizer(corpus: Path, tmp_path: Path) -> None:
    first = load(corpus, tmp_path)
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    content = path.read_text()
    path.write_text(content.replace("pre_tokenizer", "pre-tokenizer"))
    with pytest.warns(UserWarning, match=r"trained again: it differs from its digest\. If it happ"):
        second = load(corpus, tmp_path)
    assert torch.equal(first.train_NT, second.train_NT) and path.read_text() == content
    assert load(corpus, tmp_path).was_cached


def test_packed_documents_are_the_blocks_tokens(corpus: Path, tmp_path: Path) -> None:
    """There is one cache of tokens for both."""
    blocks = load(corpus, tmp_path)
    options: dict[str, Any] = {"max_mb": 0.0, "cache_dir": str(tmp_path / "cache"), "seq": 16}
    packed = pack_text(blocks, [str(corpus)], **options, progress=False)
    assert len([*(tmp_path / "cache" / "documents").glob("*/tokens.arrow")]) == 1
    documents = [packed.train._documents, packed.validation._documents]
    tokens = [part.tokens(i) for part in documents for i in range(len(part.lengths))]
    stream = blocks.train_NT[:, :-1].flatten().numpy()
    assert np.array_equal(np.concatenate(tokens)[: len(stream)], stream)


def test_a_source_that_breaks_while_it_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a cache that cannot be written."""

    def broken(self: object) -> list[str]:
        raise OSError("the disk fails")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(text_sources._LocalFiles, "read", broken)
        with pytest.raises(TextError, match=r"must be readable; got 6 files: the disk fails"):
            load(corpus, tmp_path)
    assert len(load(corpus, tmp_path).train_NT)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    check_vocabulary(np.array([0, 4]), 5)
    for tokens, wrong in (([0, 5], 5), ([-1, 3], -1)):
        with pytest.raises(TextError, match=f"from 0 to 4, the vocabulary's last; got {wrong}. Us"):
            check_vocabulary(np.array(tokens), 5)


def test_a_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(TextError, match="--cache-dir must be a folder that can be written; got"):
        load(corpus, tmp_path)


def test_a_changed_file_is_read_again(corpus: Path, tmp_path: Path) -> None:
    load(corpus, tmp_path)
    (corpus / "part0.txt").write_text("Something else. " * 300, encoding="utf-8")
    assert not load(corpus, tmp_path).was_cached


def test_max_mb_reads_a_part(corpus: Path, tmp_path: Path) -> None:
    whole, part = load(corpus, tmp_path), load(corpus, tmp_path, max_mb=0.02)
    assert 0.2 < len(part.train_NT) / len(whole.train_NT) < 0.6


def test_the_standard_library_is_text_that_is_always_there(tmp_path: Path) -> None:
    data = load(PYTHON_STDLIB, tmp_path, max_mb=0.2)
    assert len(data.train_NT) > 1000


def test_batches_are_shuffled_by_the_seed_and_each_pass_sees_a_block_once() -> None:
    blocks_NT = torch.arange(10)[:, None] * 100 + torch.arange(5)

    def blocks_of(num_batches: int, *, parts: int = 1, seed: int | None = None) -> list[int]:
        batches = [*block_batches(blocks_NT, 3, num_batches, parts=parts, seed=seed)]
        assert len(batches) == num_batches
        assert all(
            x_ABT.shape == y_ABT.shape == (parts, 3 // parts, 4) and torch.equal(x_ABT + 1, y_ABT)
            for x_ABT, y_ABT in batches
        )
        return [int(row[0]) // 100 for x_ABT, _ in batches for row in x_ABT.flatten(0, 1)]

    shuffled = blocks_of(7, seed=5)
    assert shuffled == blocks_of(7, seed=5)
    assert shuffled != blocks_of(7, seed=6)
    assert len(set(shuffled[:9])) == len(set(shuffled[9:18])) == 9
    assert shuffled[:9] != shuffled[9:18]
    assert shuffled == blocks_of(7, parts=3, seed=5)
    # From the fifth batch on, in the middle of the second pass.
    rest = block_batches(blocks_NT, 3, 7, seed=5)
    rest.load_state_dict({"samples": 12})
    assert shuffled[12:] == [int(row[0]) // 100 for x_ABT, _ in rest for row in x_ABT[0]]
    assert blocks_of(4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"\xff\xfe broken",
            r"every file of --data must be readable UTF-8 text; got '.*bad\.txt': .*\. "
            r"Convert it, or leave it out\.",
        ),
        (b"", r"--data must hold text; got 1 empty files\. Pass others\."),
        (
            b"Too short.",
            r"one training and one validation block of 17 tokens each; got \d+ tokens from "
            r".*bad\.txt\. Give more text .* or a shorter --seq",
        ),
    ],
)
def test_files_that_will_not_do(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(TextError, match=message):
        load(tmp_path / "bad.txt", tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nothing.txt", "which is neither a file nor a folder"),
        ("{empty}", r"with no \.txt, .* file inside"),
    ],
)
def test_sources_that_are_not_there(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TextError, match=message):
        load(source.format(empty=tmp_path / "empty"), tmp_path)


def test_a_vocabulary_has_room_for_every_byte(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TextError, match=r"at least 257 tokens; got --vocab 256\. Pass --vocab 512 or more\."
    ):
        load(corpus, tmp_path, vocab_size=256)
    load(corpus, tmp_path, vocab_size=257)


class FakeHub:
    """A hub with a single dataset, as the datasets library gives it."""

    def __init__(self, column: str) -> None:
        self.column = column

    def load_dataset(self, name: str, configuration: str | None, split: str) -> "FakeHub":
        if (name, configuration, split) != ("someone/novels", "small", "train"):
            raise FileNotFoundError(f"no {name} on the hub")
        return self

    @property
    def column_names(self) -> list[str]:
        return [self.column]

    def shuffle(self, seed: int) -> list[dict[str, str]]:
        return [
            {self.column: f"Chapter {index}. It was a dark and stormy night. "}
            for index in range(100)
        ]


def test_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", FakeHub("text").load_dataset)
    assert len(load("someone/novels:small", tmp_path).train_NT) > 50
    with pytest.raises(
        TextError,
        match=r"got 'someone/poems', which is no file here, and the hub said: "
        r"FileNotFoundError: no someone/poems",
    ):
        load("someone/poems", tmp_path)
    monkeypatch.setattr("datasets.load_dataset", FakeHub("article").load_dataset)
    with pytest.raises(
        TextError,
        match=r"a column called 'text'; got 'someone/novels:small' with the columns \['article'\]",
    ):
        load("someone/novels:small", tmp_path, vocab_size=301)
