"""The programs on the device: one for a prompt of each bucket's size, one for a token of all slots.

Legend: S slots, L positions of a slot, T tokens of a prompt's bucket.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_serving.cache import SlotCache
from examples.llama_serving.sampling import SamplingOptions, next_tokens

SMALLEST_BUCKET = 32


class Programs:
    """Writes prompts into slots and continues all slots; the host reads nothing in between.

    What a slot needs for its next token is on the device: its last token, its position and its
    options. So a step can be sent before the tokens of the last one are read.

    One thread at a time may use it.

    Args:
        model: a Llama on device `xla`, in evaluation mode, laid out over `mesh`, with an attention
            without a mask builder (`examples.training.attention`).
        num_slots: requests that may be in flight.
        length: positions of a slot.
        mesh: with the axis `tensor`; None for one device.

    Attributes:
        buckets: the sizes that prompts are padded to, ascending; the last one is `length`.
    """

    def __init__(
        self, model: LlamaForCausalLM, *, num_slots: int, length: int, mesh: spmd.Mesh | None
    ) -> None:
        self._model, self._mesh = model, mesh
        self.num_slots, self.length = num_slots, length
        self.buckets = tuple(_buckets(length))
        dtype = next(model.parameters()).dtype
        self._cache = SlotCache(
            model.config, num_slots=num_slots, length=length, dtype=dtype, mesh=mesh
        )

        def state(dtype: torch.dtype) -> torch.Tensor:
            made = torch.zeros(num_slots, dtype=dtype, device="xla")
            if mesh is not None:
                spmd.mark_sharding(made, mesh, (None,))
            return made

        # `_positions` is where the last token stands: the cache has everything before it.
        self._tokens, self._positions = state(torch.int64), state(torch.int64)
        self._top_k, self._seeds = state(torch.int64), state(torch.int64)
        self._temperatures, self._top_p = state(torch.float32), state(torch.float32)
        spmd.sync()

    def bucket(self, num_tokens: int) -> int:
        """The size that a prompt is padded to."""
        return next(size for size in self.buckets if size >= num_tokens)

    def compile_all(self) -> Iterator[str]:
        """Runs every program once, on no request's behalf, and names each before it does.

        Waits for the device. No call after this one compiles.
        """
        for size in self.buckets:
            yield f"prompts of up to {size} tokens"
            self.prefill(0, [0] * size, SamplingOptions()).tolist()
        yield f"a token of {self.num_slots} slots"
        self.decode().tolist()
        # The state is now the result of a program, as in every later call, and no upload.
        for size in self.buckets:
            self.prefill(0, [0] * size, SamplingOptions()).tolist()
        self.decode().tolist()

    @torch.no_grad()
    def prefill(self, slot: int, prompt: Sequence[int], options: SamplingOptions) -> torch.Tensor:
        """Starts a request in a slot, over whatever was in it; does not wait.

        Args:
            slot: the slot's number.
            prompt: 1 to `length` token ids.
            options: of the request.

        Returns:
            The first token after the prompt: int64 of shape (1,). Reading it waits.
        """
        ids = torch.tensor(prompt)
        padded_1T = nn.functional.pad(ids, (0, self.bucket(len(ids)) - len(ids)))[None]
        whole = torch.tensor([slot, len(ids), options.top_k, options.seed])
        real = torch.tensor([options.temperature, options.top_p])
        inputs = padded_1T.to("xla"), whole.to("xla"), real.to("xla")
        with spmd.compile(full_graph=True, name="prefill"):
            return self._prefill(*inputs)

    @torch.no_grad()
    def decode(self) -> torch.Tensor:
        """Continues every slot by a token, the free ones by a meaningless one; does not wait.

        Returns:
            The tokens: int64 of shape (S,). Reading them waits.
        """
        with spmd.compile(full_graph=True, name="decode"):
            return self._decode()

    # In functions of their own: what a local variable holds when a region ends is a result of the
    # program, such as the logits.

    def _prefill(
        self, ids_1T: torch.Tensor, whole: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        slot, length, top_k, seed = whole.split(1)
        temperature, top_p = real.split(1)
        output = self._model(
            ids_1T,
            position_ids=torch.arange(ids_1T.shape[1], device="xla")[None],
            past_key_values=self._cache.for_prompt(slot),
            use_cache=True,
            logits_to_keep=length - 1,
        )
        logits_1V = self._gathered(output.logits[:, 0])
        first = next_tokens(logits_1V, temperature, top_k, top_p, seed, length)
        for state, value in (
            (self._tokens, first),
            # A prompt that fills its slot has ended, and stays in its row.
            (self._positions, length.clamp(max=self.length - 1)),
            (self._top_k, top_k),
            (self._seeds, seed),
            (self._temperatures, temperature),
            (self._top_p, top_p),
        ):
            state.index_copy_(0, slot, value)
        return first.clone()

    def _decode(self) -> torch.Tensor:
        at_S1 = self._positions[:, None]
        seen_SL = torch.arange(self.length, device="xla")[None] <= at_S1
        output = self._model(
            # A token that could not be chosen has ended its request; any other stands for it.
            self._tokens.clamp(min=0)[:, None],
            position_ids=at_S1,
            attention_mask=seen_SL[:, None, None],
            past_key_values=self._cache.for_tokens(self._positions),
            use_cache=True,
        )
        chosen_S = next_tokens(
            self._gathered(output.logits[:, 0]),
            self._temperatures,
            self._top_k,
            self._top_p,
            self._seeds,
            self._positions + 1,
        )
        self._tokens.copy_(chosen_S)
        # A slot whose request has ended goes on until the next one takes it, and stays in its row.
        self._positions.add_(1).clamp_(max=self.length - 1)
        return chosen_S.clone()

    def _gathered(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Gathers logits that are split by vocabulary: each device then chooses by itself."""
        if self._mesh is None:
            return logits_SV
        return spmd.mark_sharding(logits_SV, self._mesh, (None, None))


def _buckets(length: int) -> Iterator[int]:
    size = SMALLEST_BUCKET
    while size < length:
        yield size
        size *= 2
    yield length
