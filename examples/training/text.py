"""Turns text into a byte-level BPE tokenizer and blocks of training and validation tokens.

Tokenizers and tokens are cached between runs. The same source, settings and seed give the same
batches in the same order, on any machine and any mesh.

Legend: N blocks, T tokens in a sequence, A parts of a batch, B sequences in a part.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import spmd_core as spmd
from examples.training.batches import NumberedBatches
from examples.training.choices import TEXT_CACHE_DIR
from examples.training.text_sources import Source, TextError, read_texts, source_of
from examples.training.tokenizer_cache import cached_tokenizer
from spmd_data import TokenCache, cached_tokens

END_OF_TEXT = "<|endoftext|>"  # token 0; stands before every document
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of text
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer to encode the text with, instead of one that is trained on it.

    Attributes:
        tokenizer: encodes and decodes text.
        separator: the id of the token that stands before every document.
    """

    tokenizer: Tokenizer
    separator: int


@dataclass(frozen=True)
class TextData:
    """Text as token ids, ready to be cut into batches.

    Attributes:
        train_NT: training blocks, int64, of shape (N, T + 1): inputs are the first T tokens of a
            block and targets the last T, so consecutive blocks share one token.
        validation_NT: validation blocks in the same form; no token position is in both parts.
        tokenizer: encodes and decodes text.
        separator: the id of the token before every document.
        was_cached: whether tokenizer and tokens were read from the cache.
        summary: source and number of tokens, in one line for the console.
        identity: a hash of the tokens and the length of a block.
    """

    train_NT: torch.Tensor
    validation_NT: torch.Tensor
    tokenizer: Tokenizer
    separator: int
    was_cached: bool
    summary: str
    identity: str


def load_text(
    sources: Sequence[str],
    *,
    vocab_size: int,
    seq: int,
    max_mb: float = 0.0,
    cache_dir: str = TEXT_CACHE_DIR,
    given: GivenTokenizer | None = None,
    progress: bool = True,
) -> TextData:
    """Reads the text or its cache, trains the tokenizer and cuts the tokens into blocks.

    Args:
        sources: `python-stdlib` (the source of Python's standard library on this machine), files,
            folders (their .txt, .md, .rst and .py files), or the name of one dataset of the Hugging
            Face hub, as `name` or `name:configuration`, with a column `text`.
        vocab_size: largest size of the vocabulary, at least 257; short texts may give fewer tokens.
        seq: tokens in a sequence (T).
        max_mb: how much text to use, in millions of bytes; 0: all.
        cache_dir: folder for the cached tokenizers and tokens.
        given: a tokenizer; then none is trained, and `vocab_size` is not used.
        progress: whether a bar shows the first run's writing of the tokens.

    Raises:
        TextError: a source cannot be read, or the text is too short for a training block and a
            validation block.
    """
    if given is None and vocab_size < MIN_VOCAB_SIZE:
        raise TextError(
            f"a byte-level vocabulary has at least {MIN_VOCAB_SIZE} tokens; "
            f"got --vocab {vocab_size}. Pass --vocab 512 or more."
        )
    source = source_of(sources, max_mb)

    @cache
    def texts() -> list[str]:  # read only where the cache lacks something
        return read_texts(source, max_mb)

    if given is None:
        with _written_to(cache_dir):
            trained = cached_tokenizer(
                lambda: _trained_tokenizer(texts(), vocab_size),
                key=_key_of_texts(source, max_mb) | {"vocab_size": vocab_size},
                cache_dir=f"{cache_dir}/tokenizers",
            )
        separator = trained.token_to_id(END_OF_TEXT)
        assert separator is not None  # it is trained with this token
        given = GivenTokenizer(trained, separator)
    tokenizer = given.tokenizer
    documents = cached_documents(
        texts, source, given, max_mb=max_mb, cache_dir=cache_dir, progress=progress
    )
    tokens, was_cached = documents.all_tokens, texts.cache_info().misses == 0
    check_vocabulary(tokens, vocabulary_of(given))

    num_validation = max(seq + 1, int(VALIDATION_SHARE * len(tokens)))
    num_train = len(tokens) - num_validation
    if num_train < seq + 1:
        raise TextError(
            f"the text must fill one training and one validation block of {seq + 1} tokens each; "
            f"got {len(tokens)} tokens from {', '.join(sources)}. "
            f"Give more text with --data, or a shorter --seq than {seq}."
        )
    return TextData(
        train_NT=packed_blocks(tokens[:num_train], seq),
        validation_NT=packed_blocks(tokens[num_train:], seq),
        tokenizer=tokenizer,
        separator=given.separator,
        was_cached=was_cached,
        summary=f"{source.name()}: {len(tokens):,} tokens of {tokenizer.get_vocab_size():,}"
        + (", from the cache" if was_cached else ""),
        identity=f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]} in blocks of {seq}",
    )


def vocabulary_of(given: GivenTokenizer) -> int:
    """The number of rows that the tokens need; a tokenizer's ids may have gaps."""
    return max(given.separator, *given.tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises TextError if a token id is not from 0 to below the size of the vocabulary."""
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise TextError(
            f"token ids must be from 0 to {vocab_size - 1}, the vocabulary's last; got {wrong}. "
            "Use the tokenizer that belongs to the model."
        )


def check_amount(text: TextData, *, batch: int, eval_batches: int) -> None:
    """Raises TextError if the text is too short for a training batch or for an evaluation."""
    needed, seq = batch * (eval_batches or 1), text.train_NT.shape[1] - 1
    if len(text.train_NT) < batch or (eval_batches and len(text.validation_NT) < needed):
        raise TextError(
            f"the text must fill one training batch of {batch} blocks and {eval_batches} "
            f"validation batches ({needed} blocks); got {len(text.train_NT)} and "
            f"{len(text.validation_NT)} of {seq} tokens. Give more text, or lower --batch, --seq "
            "or --eval-batches."
        )


def packed_blocks(tokens: np.ndarray, seq: int) -> torch.Tensor:
    """The tokens in blocks of shape (N, seq + 1), int64; block i starts at token i·seq.

    Tokens at the end that do not fill a block are dropped.

    Example:
        >>> packed_blocks(np.arange(8), seq=3)
        tensor([[0, 1, 2, 3],
                [3, 4, 5, 6]])
    """
    starts = np.arange(0, len(tokens) - seq, seq)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64))


def block_batches(
    blocks_NT: torch.Tensor,
    batch: int,
    num_batches: int,
    *,
    parts: int = 1,
    seed: int | None = None,
) -> NumberedBatches[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (inputs, targets), each int64 of shape (A, B, T).

    They pass over the blocks as often as needed: with a seed in another random order each time,
    without one in the text's order. A pass drops the last blocks if they do not fill a batch.

    Args:
        blocks_NT: the blocks, of shape (N, T + 1).
        batch: blocks in a batch, A·B.
        num_batches: the batches of a whole run.
        parts: into how many parts a batch is cut (A).
        seed: of the order; None for the text's.
    """
    num_blocks = len(blocks_NT)

    @lru_cache(maxsize=1)
    def order_N(epoch: int) -> torch.Tensor:
        if seed is None:
            return torch.arange(num_blocks)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(num_blocks, generator=generator)

    def make(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, position = divmod(number, num_blocks // batch)
        block_BT = blocks_NT[order_N(epoch)[position * batch : (position + 1) * batch]]
        block_ABT = block_BT.unflatten(0, (parts, -1))
        return block_ABT[..., :-1].contiguous(), block_ABT[..., 1:].contiguous()

    return NumberedBatches(make, num_batches, batch=batch)


# --- Tokens ---------------------------------------------------------------------------------------


def _trained_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer like GPT-2's: it encodes any text, without an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cached_documents(
    texts: Callable[[], list[str]],
    source: Source,
    given: GivenTokenizer,
    *,
    max_mb: float,
    cache_dir: str,
    progress: bool,
) -> TokenCache:
    """The tokens of each document, from the cache or written to it.

    Args:
        texts: reads the documents; called only where the cache lacks them.
        source, max_mb: where they are from, and how much of it.
        given: encodes them.
        cache_dir: folder for cached tokenizers and tokens.
        progress: whether a bar shows the writing.

    Raises:
        TextError: the texts cannot be read, or the cache not be written.
    """

    def lazily() -> Iterator[str]:
        yield from texts()

    digest = hashlib.sha256(given.tokenizer.to_str().encode()).hexdigest()
    encoder = {"tokenizer": digest, "separator": given.separator}
    try:
        with _written_to(cache_dir):
            return cached_tokens(
                lazily(),
                lambda some: encoded(some, given),
                key=_key_of_texts(source, max_mb) | encoder,
                cache_dir=f"{cache_dir}/documents",
                progress=progress,
            )
    except spmd.errors.DataError as error:  # a package is missing
        raise TextError(str(error)) from error


def _key_of_texts(source: Source, max_mb: float) -> dict[str, Any]:
    """What decides the texts and how the library splits them."""
    return source.key() | {"max_mb": max_mb, "tokenizers": tokenizers.__version__}


@contextlib.contextmanager
def _written_to(cache_dir: str) -> Iterator[None]:
    """Inside, an OSError means that the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise TextError(
            f"--cache-dir must be a folder that can be written; got {cache_dir!r}: {error}. "
            "Name another one."
        ) from error


def encoded(texts: list[str], given: GivenTokenizer) -> list[np.ndarray]:
    """The token ids of each document, int32, with the separator before them."""
    encodings = given.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([given.separator, *encoding.ids], dtype=np.int32) for encoding in encodings]
