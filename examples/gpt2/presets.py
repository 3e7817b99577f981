"""GPT-2 sizes by name, and mesh axes of the batch, in plain values without a framework."""

from dataclasses import dataclass

from examples.training.knobs import KnobError
from examples.training.model_sizes import check_divides, check_sizes

# The batch is split over both: fsdp is data parallelism that also splits parameters, gradients and
# optimizer state.
BATCH_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class ModelPreset:
    """One GPT-2 size, with default training settings for it.

    Attributes:
        name: the value for `--preset`.
        num_layers: transformer blocks.
        width: size of the hidden state.
        num_heads: attention heads; a divisor of the width.
        vocab_size: tokens of the vocabulary, before padding.
        positions: longest sequence (rows of the learned position table).
        seq: default sequence length of training.
        batch: default number of sequences in a step, over all devices.
        lr: default peak learning rate.

    Raises:
        KnobError: a size is one that no model has, or two do not fit together.
    """

    name: str
    num_layers: int
    width: int
    num_heads: int
    vocab_size: int
    positions: int
    seq: int
    batch: int
    lr: float

    def __post_init__(self) -> None:
        check_sizes(self)
        check_divides(self, "num_heads", "width")
        if self.seq > self.positions:
            raise KnobError(
                f"seq of the preset {self.name!r} must not pass its positions; got {self.seq} of "
                f"{self.positions}. Write for instance seq={self.positions}."
            )

    def num_params(self, vocab_size: int | None = None) -> int:
        """The number of parameters, with the token table once, as the output layer shares it.

        A block has four matrices with 12·d² elements in total, 9·d biases, and two layer norms with
        2·d elements each.

        Args:
            vocab_size: rows of the token table, such as a padded size; None: the preset's.
        """
        d = self.width
        tables = ((self.vocab_size if vocab_size is None else vocab_size) + self.positions) * d
        return tables + self.num_layers * (12 * d * d + 13 * d) + 2 * d


# The published sizes (124M, 350M, 1.5B) keep heads of width 64; the others from 0.5B up have heads
# of width 128, which fill the matrix unit of a TPU or GPU.
PRESETS = {
    preset.name: preset
    for preset in (
        #           name     layers width heads  vocab  positions  seq batch  lr
        ModelPreset("smoke", 2, 64, 4, 512, 128, 64, 8, 3e-3),
        ModelPreset("tiny", 4, 256, 8, 4096, 1024, 256, 8, 1e-3),
        ModelPreset("small", 6, 512, 8, 8192, 1024, 256, 16, 1e-3),
        ModelPreset("124M", 12, 768, 12, 50257, 1024, 1024, 8, 6e-4),
        ModelPreset("350M", 24, 1024, 16, 50257, 1024, 1024, 8, 3e-4),
        ModelPreset("0.5B", 24, 1280, 10, 50257, 1024, 1024, 8, 2.5e-4),
        ModelPreset("1B", 24, 1792, 14, 50257, 1024, 1024, 8, 2e-4),
        ModelPreset("1.5B", 48, 1600, 25, 50257, 1024, 1024, 8, 1.8e-4),
        ModelPreset("2B", 24, 2560, 20, 50257, 1024, 1024, 8, 1.6e-4),
        ModelPreset("4B", 34, 3072, 24, 50257, 1024, 1024, 8, 1.2e-4),
    )
}


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """`vocab_size` rounded up to a multiple, for even shards and for the speed of matrix units.

    Example:
        >>> padded_vocab(50257, 128), padded_vocab(50257, 1)
        (50304, 50257)
    """
    return -(-vocab_size // multiple) * multiple
