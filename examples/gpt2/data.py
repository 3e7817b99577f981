"""The text of a run, and its batches: blocks or packed documents, in an order by the seed.

Legend: A parts of a batch, B sequences in a part, T tokens in a sequence.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.config import TrainConfig
from examples.training.packed_text import PackedText, pack_text
from examples.training.text import TextData, block_batches, check_amount, load_text
from examples.training.text_sources import TextError
from spmd_data import sharded_dataloader


def load(config: TrainConfig) -> TextData | PackedText:
    """The text as token ids, from its source or the cache, after checking that there is enough.

    Returns:
        Blocks of tokens; with --pack, documents that are packed into sequences.

    Raises:
        TextError: a source cannot be read, or the text is too short.
    """
    text = load_text(
        config.data,
        vocab_size=config.vocab,
        seq=config.seq,
        max_mb=config.max_mb,
        cache_dir=config.cache_dir,
        progress=config.progress,
    )
    if not config.pack:
        check_amount(text, batch=config.batch, eval_batches=config.eval_batches)
        return text
    packed = pack_text(
        text,
        config.data,
        seq=config.seq,
        max_mb=config.max_mb,
        cache_dir=config.cache_dir,
        progress=config.progress,
    )
    needed = config.batch * config.eval_batches
    if len(packed.train) < config.batch or len(packed.validation) < needed:
        raise TextError(
            f"packed documents must fill one training batch of {config.batch} sequences and "
            f"{config.eval_batches} validation batches ({needed} sequences); got "
            f"{len(packed.train)} and {len(packed.validation)} of {config.seq} tokens. Give more "
            "text, or lower --batch, --seq or --eval-batches."
        )
    return packed


def batches(
    text: TextData | PackedText, config: TrainConfig, mesh: spmd.Mesh | None
) -> tuple[Iterable[Any], Iterable[Any]]:
    """The batches of training, and those of an evaluation.

    Of blocks, all of a run. Of packed documents, those of an epoch that belong to this process.
    """
    if isinstance(text, PackedText):
        return packed_batches(text, config, mesh)
    train = block_batches(
        text.train_NT, config.batch, config.steps, parts=config.accumulate, seed=config.seed
    )
    return train, block_batches(text.validation_NT, config.batch, config.eval_batches)


# --- Packed documents -----------------------------------------------------------------------------


def packed_batches(
    packed: PackedText, config: TrainConfig, mesh: spmd.Mesh | None
) -> tuple[DataLoader[Any], Iterable[Any]]:
    """The batches of one epoch of training, and those of an evaluation: this process's part."""

    def loader(sequences: Any, parts: int, **options: Any) -> DataLoader[Any]:
        return sharded_dataloader(
            sequences,
            mesh,
            shardings.batch_axes(mesh) if mesh else None,
            batch_size=config.batch,
            collate_fn=partial(in_parts, num_parts=parts),
            **options,
        )

    train = loader(packed.train, config.accumulate, seed=config.seed, num_workers=config.workers)
    if not config.eval_batches:
        return train, []
    chosen = range(config.batch * config.eval_batches)
    return train, loader(Subset(packed.validation, chosen), 1, shuffle=False)


def in_parts(sequences: list[dict[str, torch.Tensor]], *, num_parts: int) -> list[torch.Tensor]:
    """Tokens, targets, positions and document ids, each of shape (A, B, T)."""
    names = ("input_ids", "targets", "position_ids", "document_ids")
    return [
        torch.stack([sequence[name] for sequence in sequences]).unflatten(0, (num_parts, -1))
        for name in names
    ]
