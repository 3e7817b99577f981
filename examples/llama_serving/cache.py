"""Keys and values of all requests in flight: fixed slots on the device, written in place.

Legend: S slots, L positions of a slot, K heads of keys and values, P prompts that are computed
together, T tokens of their bucket, H size of a head.
"""

from typing import Any

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

import spmd_core as spmd


class SlotCache:
    """A slot for each request in flight, with room for `length` tokens; created on device `xla`.

    A slot's row is rewritten by the prompt of its next request, so that it needs no clearing.

    Args:
        config: the model's sizes.
        num_slots: requests that may be in flight.
        length: positions of a slot: the tokens of a prompt and its continuation.
        dtype: of the keys and values.
        mesh: keys and values are split by heads along its axis `tensor`, where the axis divides
            their number; else each device has all of them.

    Attributes:
        keys, values: for each layer, (S, K, L, H).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        mesh: spmd.Mesh | None,
    ) -> None:
        # A GPT-2 has neither attribute.
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (num_slots, heads, length, head_dim)
        by_heads = mesh is not None and heads % mesh.shape().get("tensor", heads + 1) == 0

        def zeros() -> torch.Tensor:
            made = torch.zeros(shape, dtype=dtype, device="xla")
            if mesh is not None:
                spmd.mark_sharding(made, mesh, (None, "tensor" if by_heads else None))
            return made

        self.keys = [zeros() for _ in range(config.num_hidden_layers)]
        self.values = [zeros() for _ in range(config.num_hidden_layers)]
        self.num_slots, self.length = num_slots, length

    def for_prompts(self, slots_P: torch.Tensor) -> Cache:
        """What the model writes prompts to: each into its slot, from 0 on."""
        return Cache(layers=[_PromptLayer(k, v, slots_P) for k, v in zip(self.keys, self.values)])

    def for_tokens(self, positions_S: torch.Tensor) -> Cache:
        """What the model writes a token of each slot to: each at the slot's own position."""
        slots_S = torch.arange(self.num_slots, device="xla")
        layers = [_TokensLayer(k, v, slots_S, positions_S) for k, v in zip(self.keys, self.values)]
        return Cache(layers=layers)


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values (S, K, L, H), and where the next `update` writes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, *where: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.where = keys, values, where
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the tensors exist."""

    def get_seq_length(self) -> int:
        """Refused: a slot's length is a tensor on the device, so callers pass positions."""
        raise NotImplementedError(
            "slots have lengths of their own, on the device; got a question for one number. Pass "
            "position_ids and an attention mask of four dims to the model."
        )

    get_max_length = get_seq_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refused, as `get_seq_length` is."""
        return self.get_seq_length(), query_length


class _PromptLayer(_SlotLayer):
    """Writes the keys and values of prompts to their slots; attention is within each prompt."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes (P, K, T, H) at the positions from 0 on, and returns it."""
        (slots_P,) = self.where
        for all_SKLH, new in ((self.keys, key_states), (self.values, value_states)):
            # Whole rows: attention gives what the slot's last request left behind a weight of
            # zero, but zero times NaN is NaN.
            room = all_SKLH.shape[2] - new.shape[2]
            rows = torch.nn.functional.pad(new, (0, 0, 0, room)).to(all_SKLH.dtype)
            all_SKLH.index_copy_(0, slots_P, rows)
        return key_states, value_states


class _TokensLayer(_SlotLayer):
    """Writes the keys and values of one token for each slot; attention is over the slot."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes (S, K, 1, H), each at its slot's position, and returns all slots."""
        slots_S, positions_S = self.where
        for all_SKLH, new in ((self.keys, key_states), (self.values, value_states)):
            all_SKLH[slots_S, :, positions_S] = new[:, :, 0].to(all_SKLH.dtype)
        return self.keys, self.values
