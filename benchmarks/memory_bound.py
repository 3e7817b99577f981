"""How little memory can a device have for GPT-2's train step? The lower bound, in plain arithmetic.

The step is that of `examples/gpt2/train.py` under bfloat16 autocast, with each block computed
again in backward, clipping by the norm of all gradients, and AdamW. What is stated below must lie
in memory under these semantics, whatever the order of the operations:

- **State**, 12 bytes a parameter: float32 values and two moments (Rajbhandari et al. 2020, ZeRO,
  section 3.1, without its 16-bit copies). It is there throughout.
- **Gradients.** No gradient may be used before the norm of all is known, so at the end of backward
  all of them exist. A parameter that is only used through its bfloat16 cast has a gradient of 2
  bytes, as autocast computes it in bfloat16 and the cast to float32 adds nothing; the tables' and
  the layer norms' have 4 bytes, and so has every gradient that was summed over devices, as sums
  are in float32.
- **Block inputs**, 4 bytes x tokens x width for each block (Korthikanti et al. 2022, section 5, has
  2: under autocast the residual sum is float32). Backward starts with all of them, and frees one
  after each block.
- **A block's backward**: what its products gave and its gradients need: queries, keys and values
  (6 bytes x tokens x width), attended values (2), the residual sum between the two layers (4), the
  MLP's inner values (8). The other activations are functions of these element by element or row by
  row, and a fused program never stores them. In addition, where fsdp splits the weights, the
  largest weight of the block, gathered in bfloat16.
- **The head**: bfloat16 logits, whose gradient may take their place, and where fsdp splits it, the
  table, gathered in bfloat16.

Gradients grow by as much as a block's in each block of the backward, and block inputs shrink, both
linearly: so the peak is at the head, in the last block, in the first block, or at the end. The
bound is the largest of the four. It holds for programs that compute no gradient twice and move no
state to the host. It leaves out what a compiler adds: alignment, code, collectives' buffers, the
lookup.
"""

from dataclasses import dataclass

from examples.gpt2.presets import ModelPreset, padded_vocab

STATE_BYTES, FLOAT32_BYTES, BFLOAT16_BYTES = 12, 4, 2


@dataclass(frozen=True)
class Moment:
    """The contents of one device's memory at one moment of the step, in bytes."""

    state: float
    gradients: float = 0.0
    block_inputs: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.state + self.gradients + self.block_inputs + self.activations + self.gathered


def moments(
    model: ModelPreset, *, fsdp: int = 1, tensor: int = 1, batch: int = 1
) -> dict[str, Moment]:
    """The moments of a step of which one has the peak.

    Args:
        model: sizes; sequences have its length, and the vocabulary is padded as the recipe pads it.
        fsdp: shards of batch, parameters, gradients and moments.
        tensor: shards of heads, inner width and vocabulary.
        batch: sequences on each shard of the batch.
    """
    d, num_layers = model.width, model.num_layers
    table = padded_vocab(model.vocab_size, 128) * d / tensor
    positions = model.positions * d
    # Of a block: weights, and the biases of the layers whose outputs are split.
    weights, biases = 12 * d * d / tensor, 7 * d / tensor
    whole = 2 * d  # the biases of the layers whose inputs are split
    norms = 4 * d
    of_block = weights / fsdp + biases + whole + norms
    of_tables = (table + positions) / fsdp
    state = STATE_BYTES * (num_layers * of_block + of_tables + 2 * d)

    of_products = FLOAT32_BYTES if fsdp > 1 else BFLOAT16_BYTES
    block_gradients = of_products * (weights / fsdp + biases + whole) + FLOAT32_BYTES * norms
    # Before the lookup adds its part, the table's gradient is the output layer's alone.
    head_gradients = of_products * table / fsdp + FLOAT32_BYTES * 2 * d
    all_gradients = num_layers * block_gradients + FLOAT32_BYTES * (of_tables + 2 * d)

    tokens = batch * model.seq
    hidden = FLOAT32_BYTES * tokens * d
    kept = BFLOAT16_BYTES * tokens * d
    in_block = hidden + kept * (3 + 1 + 4) / tensor
    is_gathered = fsdp > 1
    largest_weight = is_gathered * BFLOAT16_BYTES * 4 * d * d / tensor
    logits = BFLOAT16_BYTES * tokens * padded_vocab(model.vocab_size, 128) / tensor
    return {
        "head": Moment(
            state, 0, hidden * num_layers, logits + hidden, is_gathered * BFLOAT16_BYTES * table
        ),
        "last block": Moment(state, head_gradients, hidden * num_layers, in_block, largest_weight),
        "first block": Moment(
            state,
            head_gradients + (num_layers - 1) * block_gradients,
            hidden,
            in_block,
            largest_weight,
        ),
        "end of backward": Moment(state, all_gradients),
    }


def bound(model: ModelPreset, *, fsdp: int = 1, tensor: int = 1, batch: int = 1) -> Moment:
    """The moment with the peak; arguments as of `moments`."""
    found = moments(model, fsdp=fsdp, tensor=tensor, batch=batch)
    return max(found.values(), key=lambda moment: moment.total)
