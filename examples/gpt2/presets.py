"""Model sizes by name, with the parameter counts that the formulas need. Plain numbers: nothing here imports a framework."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPreset:
    """One GPT-2 size, and settings that train it sensibly.

    Attributes:
        name: what `--preset` takes.
        num_layers: transformer blocks.
        width: size of the hidden state.
        num_heads: attention heads; the width divides by it.
        vocab_size: tokens of the vocabulary, before padding.
        positions: longest sequence (rows of the learned position table).
        seq: default sequence length of training.
        batch: default number of sequences in a step, over all devices.
        lr: default peak learning rate.
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

    def num_params(self, vocab_size: int | None = None) -> int:
        """Parameters of the model; the token table counts once, as the output layer shares it. `vocab_size` may be the padded one.

        A block has four matrices of 12·d² together, 9·d of biases, and two layer norms of 2·d each.
        """
        d = self.width
        tables = ((self.vocab_size if vocab_size is None else vocab_size) + self.positions) * d
        return tables + self.num_layers * (12 * d * d + 13 * d) + 2 * d


# The published sizes keep heads of 64; from 0.5B up heads are 128 wide, which fills a TPU's and a GPU's matrix unit.
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
        ModelPreset("2B", 24, 2560, 20, 50257, 1024, 1024, 8, 1.6e-4),
        ModelPreset("4B", 34, 3072, 24, 50257, 1024, 1024, 8, 1.2e-4),
    )
}


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """`vocab_size` rounded up to a multiple: matrix units like round sizes, and shards of it come out even.

    Example:
        >>> padded_vocab(50257, 128), padded_vocab(50257, 1)
        (50304, 50257)
    """
    return -(-vocab_size // multiple) * multiple
