"""The text of a run, and its batches: blocks of tokens, in an order that the seed decides."""

from collections.abc import Iterable
from typing import Any

from examples.llama_tp import weights
from examples.llama_tp.config import TrainConfig
from examples.training.text import TextData, block_batches, check_amount, load_text


def load(config: TrainConfig) -> TextData:
    """The text as token ids, from its source or the cache, after checking that there is enough.

    Raises:
        TextError: a source cannot be read, or the text is too short.
        KnobError: the tokenizer of --weights cannot be read, or does not fit its vocabulary.
    """
    text = load_text(
        config.data,
        vocab_size=config.vocab,
        seq=config.seq,
        max_mb=config.max_mb,
        cache_dir=config.cache_dir,
        progress=config.progress,
        given=weights.tokenizer(config.weights) if config.weights else None,
    )
    check_amount(text, batch=config.batch, eval_batches=config.eval_batches)
    return text


def batches(text: TextData, config: TrainConfig) -> tuple[Iterable[Any], Iterable[Any]]:
    """The batches of a run, and those of an evaluation."""
    train = block_batches(
        text.train_NT, config.batch, config.steps, parts=config.accumulate, seed=config.seed
    )
    return train, block_batches(text.validation_NT, config.batch, config.eval_batches)
