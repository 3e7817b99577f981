"""Turns text into a byte-level BPE tokenizer and blocks of training and validation tokens.

Tokenizers and tokens are cached between runs. The same source, settings and seed give the same
batches in the same order, on any machine and any mesh.

Legend: N blocks, T tokens in a sequence, A parts of a batch, B sequences in a part.
"""

import contextlib
import hashlib
import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.training import text_cache
from examples.training.choices import PYTHON_STDLIB, TEXT_CACHE_DIR

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # of the files that are read in a folder
END_OF_TEXT = "<|endoftext|>"  # token 0; stands before every document
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of text
VALIDATION_SHARE = 0.05

_CACHE_FORMAT = 2
# Documents are shuffled before the split, so that the validation part resembles the training part.
# The seed is fixed, so that the split does not depend on --seed.
_SHUFFLE_SEED = 0


class TextError(ValueError):
    """The text cannot be read, or there is too little of it."""


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
        was_cached: whether the tokens were read from the cache.
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

    Raises:
        TextError: a source cannot be read, or the text is too short for a training block and a
            validation block.
    """
    if given is None and vocab_size < MIN_VOCAB_SIZE:
        raise TextError(
            f"a byte-level vocabulary has at least {MIN_VOCAB_SIZE} tokens; "
            f"got --vocab {vocab_size}. Pass --vocab 512 or more."
        )
    documents = source_of(sources, max_mb)
    key = documents.key() | {
        "format": _CACHE_FORMAT,
        **({"vocab_size": vocab_size} if given is None else key_of(given)),
        "max_mb": max_mb,
        "tokenizers": tokenizers.__version__,
    }
    folder = (
        Path(cache_dir).expanduser()
        / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    )

    found = text_cache.read(folder)
    was_cached = found is not None
    if found is None:
        texts = within(documents.read(), max_mb)
        if given is None:
            trained = _trained_tokenizer(texts, vocab_size)
            given = GivenTokenizer(trained, trained.token_to_id(END_OF_TEXT))
        found = given.tokenizer, np.concatenate(encoded(texts, given))
        try:
            text_cache.write(folder, *found, key)
        except OSError as error:
            raise TextError(
                f"--cache-dir must be a folder that can be written; got {cache_dir!r}: {error}. "
                "Name another one."
            ) from error
    tokenizer, tokens = found
    separator = given.separator if given else tokenizer.token_to_id(END_OF_TEXT)
    check_vocabulary(tokens, vocabulary_of(GivenTokenizer(tokenizer, separator)))

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
        separator=separator,
        was_cached=was_cached,
        summary=f"{documents.name()}: {len(tokens):,} tokens of {tokenizer.get_vocab_size():,}"
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


@dataclass(frozen=True)
class BlockBatches:
    """An iterable of pairs (inputs, targets), each int64 of shape (A, B, T).

    It passes over the blocks as often as needed: with a seed in another random order each time,
    without one in the text's order. A pass drops the last blocks if they do not fill a batch.

    Attributes:
        blocks_NT: the blocks, of shape (N, T + 1).
        batch: blocks in a batch, A·B.
        num_batches: the batches of a whole run.
        parts: into how many parts a batch is cut (A).
        seed: of the order; None for the text's.
        first: the batches that an earlier run had; iteration begins behind them.
    """

    blocks_NT: torch.Tensor
    batch: int
    num_batches: int
    parts: int = 1
    seed: int | None = None
    first: int = 0

    def __len__(self) -> int:
        return self.num_batches - self.first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        num_blocks = len(self.blocks_NT)
        per_pass = num_blocks // self.batch
        for index in range(self.first, self.num_batches):
            epoch, position = divmod(index, per_pass)
            if position == 0 or index == self.first:
                order_N = torch.arange(num_blocks)
                if self.seed is not None:
                    order_N = torch.randperm(
                        num_blocks,
                        generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch),
                    )
            block_BT = self.blocks_NT[order_N[position * self.batch : (position + 1) * self.batch]]
            block_ABT = block_BT.unflatten(0, (self.parts, -1))
            yield block_ABT[..., :-1].contiguous(), block_ABT[..., 1:].contiguous()


# --- Sources --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LocalFiles:
    """UTF-8 files on this machine, in their order of use; each file is one document."""

    paths: tuple[Path, ...]

    def key(self) -> dict[str, Any]:
        return {
            "files": [
                [str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in self.paths
            ]
        }

    def name(self) -> str:
        return f"{len(self.paths):,} files"

    def read(self) -> list[str]:
        datasets = _datasets_library()
        for path in self.paths:
            _check_readable(path)
        # The library caches the text in Arrow files. The tokens are cached here, so that copy is
        # deleted.
        with tempfile.TemporaryDirectory() as scratch, _without_bars(datasets):
            files = [str(path) for path in self.paths]
            rows = datasets.load_dataset(
                "text",
                data_files=files,
                split="train",
                sample_by="document",
                cache_dir=scratch,
                keep_in_memory=True,
            )
            return rows["text"][:]


@dataclass(frozen=True)
class _HubDataset:
    """The training split of a dataset of the Hugging Face hub; each row is one document."""

    source: str

    def key(self) -> dict[str, Any]:
        return {"hub": self.source}

    def name(self) -> str:
        return self.source

    def read(self) -> Iterator[str]:
        datasets = _datasets_library()
        name, _, configuration = self.source.partition(":")
        try:
            rows = datasets.load_dataset(name, configuration or None, split="train")
        # Without a network, and for an unknown name or configuration, the library raises another
        # type each.
        except Exception as error:
            raise TextError(
                f"--data must be files, folders, {PYTHON_STDLIB!r} or a dataset that the hub can "
                f"give; got {self.source!r}, which is no file here, and the hub said: "
                f"{type(error).__name__}: {error}. Check the name and the network, or pass a file."
            ) from error
        if "text" not in rows.column_names:
            raise TextError(
                f"a dataset must have a column called 'text'; got {self.source!r} with the columns "
                f"{rows.column_names}. Pass another one."
            )
        for row in rows.shuffle(seed=_SHUFFLE_SEED):
            yield row["text"]


def source_of(sources: Sequence[str], max_mb: float) -> _LocalFiles | _HubDataset:
    """Where the documents come from; raises TextError for a source that is not there."""
    return _hub_source(sources) or _LocalFiles(_chosen_files(_listed_files(sources), max_mb))


def _hub_source(sources: Sequence[str]) -> _HubDataset | None:
    """The hub dataset that `sources` names, or None if the sources are local."""
    only = sources[0] if len(sources) == 1 else ""
    looks_local = (
        only == PYTHON_STDLIB
        or only.startswith((".", "/", "~"))
        or only.endswith(TEXT_SUFFIXES)
        or Path(only).exists()
    )
    return _HubDataset(only) if only and not looks_local else None


def _listed_files(sources: Sequence[str]) -> list[Path]:
    """All files of the local sources, in a fixed order."""
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == PYTHON_STDLIB:
            files += _stdlib_files()
        elif path.is_dir():
            files += sorted(
                file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file()
            )
        elif path.is_file():
            files.append(path)
        else:
            raise TextError(
                f"every source of --data must exist; got {source!r}, which is neither a file nor a "
                "folder. Check the path."
            )
    if not files:
        raise TextError(
            f"--data must lead to text; got {', '.join(sources)}, with no "
            f"{', '.join(TEXT_SUFFIXES)} file inside. Pass other folders or files."
        )
    return files


def _stdlib_files() -> list[Path]:
    """The standard library's files, without installed packages and without its tests.

    Some of the tests are invalid text on purpose.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in left_out]  # what stays is walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _chosen_files(files: list[Path], max_mb: float) -> tuple[Path, ...]:
    """The files, shuffled, up to the one that reaches `max_mb` (0: all).

    The shuffle gives a small part varied text; a part is faster to read than all files.
    """
    random.Random(_SHUFFLE_SEED).shuffle(files)
    chosen, num_bytes = [], 0
    for path in files:
        chosen.append(path)
        num_bytes += path.stat().st_size
        if max_mb and num_bytes >= max_mb * 1e6:
            break
    if num_bytes == 0:
        raise TextError(f"--data must hold text; got {len(files)} empty files. Pass others.")
    return tuple(chosen)


def _check_readable(path: Path) -> None:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"every file of --data must be readable UTF-8 text; got {str(path)!r}: {error}. "
            "Convert it, or leave it out."
        ) from error


def within(texts: Iterable[str], max_mb: float) -> list[str]:
    """The first texts, up to `max_mb` in total (0: all); the last one is cut at the limit."""
    kept: list[str] = []
    num_left = int(max_mb * 1e6) if max_mb else None
    for text in texts:
        data = text.encode() if num_left is not None else b""
        kept.append(
            text
            if num_left is None or len(data) <= num_left
            else data[:num_left].decode(errors="ignore")
        )
        if num_left is not None:
            num_left -= len(data)
            if num_left <= 0:
                break
    if not any(kept):
        raise TextError(
            f"--data must hold text; got {len(kept)} empty documents. Pass another source."
        )
    return kept


def _datasets_library() -> Any:
    try:
        # Needed only without a cache: later runs, and machines with a copy of the cache, do not
        # import it.
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise TextError(
            "reading text needs the datasets library; got no such package, and no cached tokens. "
            "Run: pip install datasets"
        ) from error
    return datasets


@contextlib.contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """Disables the library's progress bars within the block."""
    had_bars = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            datasets.enable_progress_bars()


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


def key_of(given: GivenTokenizer) -> dict[str, Any]:
    """What decides the tokens of a text, for the cache."""
    digest = hashlib.sha256(given.tokenizer.to_str().encode()).hexdigest()
    return {"tokenizer": digest, "separator": given.separator}


def encoded(texts: list[str], given: GivenTokenizer) -> list[np.ndarray]:
    """The token ids of each document, int32, with the separator before them."""
    encodings = given.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([given.separator, *encoding.ids], dtype=np.int32) for encoding in encodings]
