"""Llama sizes by name, and the names of mesh axes, in plain values without a framework."""

from dataclasses import dataclass

from examples.training.model_sizes import check_divides, check_sizes

MESH_AXES = ("data", "fsdp", "context", "tensor")
# The batch is split over both: fsdp is data parallelism that also splits parameters, gradients and
# optimizer state.
BATCH_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class ModelPreset:
    """One Llama size, with default training settings for it.

    Attributes:
        name: the value for `--preset`.
        num_layers: transformer blocks.
        width: size of the hidden state.
        hidden: size of an MLP's hidden layer.
        num_heads: attention heads; a divisor of the width.
        num_kv_heads: heads of keys and values; a divisor of the number of heads.
        vocab_size: tokens of the vocabulary.
        seq: default sequence length of training.
        batch: default number of sequences in a step, over all devices.
        lr: default peak learning rate.

    Raises:
        KnobError: a size is one that no model has, or two do not fit together.
    """

    name: str
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq: int
    batch: int
    lr: float

    def __post_init__(self) -> None:
        check_sizes(self)
        check_divides(self, "num_kv_heads", "num_heads")

    def num_params(self, vocab_size: int | None = None) -> int:
        """The number of parameters; the output layer has a table of its own.

        A block has the matrices of queries and of the attention's result, of d² elements each,
        those of keys and values, of d·k each, the three of an MLP of hidden size f, of d·f each,
        and two norms.

        Args:
            vocab_size: rows of the token table; None: the preset's.
        """
        d, f = self.width, self.hidden
        k = d // self.num_heads * self.num_kv_heads
        block = 2 * d * d + 2 * d * k + 3 * d * f + 2 * d
        tables = 2 * (self.vocab_size if vocab_size is None else vocab_size) * d
        return tables + self.num_layers * block + d


# From 1B on the published sizes: Llama 3.2 1B, and Llama 2 7B, 13B and 70B.
PRESETS = {
    preset.name: preset
    for preset in (
        #           name   layers width hidden heads kv  vocab    seq batch  lr
        ModelPreset("debug", 2, 64, 192, 8, 4, 512, 64, 8, 3e-3),
        ModelPreset("tiny", 4, 256, 704, 8, 4, 4096, 256, 8, 1e-3),
        ModelPreset("125M", 12, 768, 2048, 12, 12, 32000, 1024, 8, 6e-4),
        ModelPreset("1B", 16, 2048, 8192, 32, 8, 128256, 2048, 8, 3e-4),
        ModelPreset("7B", 32, 4096, 11008, 32, 32, 32000, 4096, 8, 3e-4),
        ModelPreset("13B", 40, 5120, 13824, 40, 40, 32000, 4096, 8, 3e-4),
        ModelPreset("70B", 80, 8192, 28672, 64, 8, 32000, 4096, 8, 1.5e-4),
    )
}
