"""The text of a run, and its batches: blocks of tokens, in an order that the seed decides."""

from examples.llama_tp import weights
from examples.llama_tp.config import TrainConfig
from examples.training.text import BlockBatches, TextData, check_amount, load_text


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


def batches(
    text: TextData, config: TrainConfig, *, first: int
) -> tuple[BlockBatches, BlockBatches]:
    """The batches of training, from the one after `first` on, and those of an evaluation."""
    train = BlockBatches(
        text.train_NT,
        config.batch,
        config.steps,
        parts=config.accumulate,
        seed=config.seed,
        first=first,
    )
    return train, BlockBatches(text.validation_NT, config.batch, config.eval_batches)
