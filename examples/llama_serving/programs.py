"""The programs on the device: some for prompts of each bucket, one for a token of all slots.

Legend: S slots, L positions of a slot, P prompts that are computed together, T tokens of their
bucket, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

import spmd_core as spmd
from examples.llama_serving.batching import PromptSizes
from examples.llama_serving.cache import SlotCache
from examples.llama_serving.sampling import SamplingOptions, next_tokens

# A step is captured once two calls agree. In the very first one, the state is data from the host,
# and no program's result.
_CALLS_TO_CAPTURE = 3


@dataclass(frozen=True)
class Prompt:
    """A request's beginning.

    Attributes:
        slot: the number of the slot that it takes, over whatever was in it.
        ids: 1 to `length` token ids.
        options: how the tokens after it are chosen.
    """

    slot: int
    ids: Sequence[int]
    options: SamplingOptions = field(default_factory=SamplingOptions)


class Programs:
    """Writes prompts into slots and continues all slots; the host reads nothing in between.

    What a slot needs for its next token is on the device: its last token, its position and its
    options. So a step can be sent before the tokens of the last one are read. Steps are captured:
    after the first calls, none costs the host more than starting its program.

    One thread at a time may use it.

    Args:
        model: a Llama or a GPT-2 on device `xla`, in evaluation mode, laid out over `mesh`, with an
            attention without a mask builder (`examples.training.attention`).
        num_slots: requests that may be in flight.
        length: positions of a slot.
        mesh: with the axis `tensor`; None for one device.
        capture: whether steps are captured; else each is recorded.

    Attributes:
        sizes: which prompts are computed together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        length: int,
        mesh: spmd.Mesh | None,
        capture: bool = True,
    ) -> None:
        self._model, self._mesh = model, mesh
        self.num_slots, self.length = num_slots, length
        self.sizes = PromptSizes(num_slots=num_slots, length=length)
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
        self._captured_prefill = spmd.compile(self._prefill, name="prefill", capture=capture)
        self._captured_decode = spmd.compile(self._decode, name="decode", capture=capture)

    def compile_all(self) -> Iterator[str]:
        """Runs every program on no request's behalf, and names each before it compiles.

        Waits for the device. No call after this one compiles anything, or records anything that is
        captured.
        """
        for rows, bucket in self.sizes.all():
            yield f"{rows} prompt{'s' * (rows > 1)} of up to {bucket} tokens"
            for _ in range(_CALLS_TO_CAPTURE):
                self.prefill([Prompt(0, [0] * bucket)] * rows).tolist()
        yield f"a token of {self.num_slots} slots"
        for _ in range(_CALLS_TO_CAPTURE):
            self.decode().tolist()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Starts requests in slots; does not wait.

        Args:
            prompts: of one bucket, and at most as many as are computed together (`sizes`).

        Returns:
            The first token after each prompt: int64 of shape (P,), with P at least their number;
            the others mean nothing. Reading it waits.
        """
        bucket = self.sizes.bucket(max(len(prompt.ids) for prompt in prompts))
        rows = next(rows for rows in self.sizes.rows(bucket) if rows >= len(prompts))
        # Rows that are left write once more what the first prompt writes.
        all_P = [*prompts, *[prompts[0]] * (rows - len(prompts))]
        ids_PT = torch.tensor([[*p.ids, *[0] * (bucket - len(p.ids))] for p in all_P])
        whole_P4 = [(p.slot, len(p.ids), p.options.top_k, p.options.seed) for p in all_P]
        real_P2 = [(p.options.temperature, p.options.top_p) for p in all_P]
        given = (ids_PT, torch.tensor(whole_P4), torch.tensor(real_P2))
        tokens_P: torch.Tensor = self._captured_prefill(*(x.to("xla") for x in given))
        return tokens_P

    @torch.no_grad()
    def decode(self) -> torch.Tensor:
        """Continues every slot by a token, the free ones by a meaningless one; does not wait.

        Returns:
            The tokens: int64 of shape (S,). Reading them waits.
        """
        tokens_S: torch.Tensor = self._captured_decode()
        return tokens_S

    def _prefill(
        self, ids_PT: torch.Tensor, whole_P4: torch.Tensor, real_P2: torch.Tensor
    ) -> torch.Tensor:
        slots_P, lengths_P, top_k_P, seeds_P = whole_P4.unbind(1)
        temperatures_P, top_p_P = real_P2.unbind(1)
        num_prompts, num_tokens = ids_PT.shape
        output = self._model.base_model(
            ids_PT,
            position_ids=torch.arange(num_tokens, device="xla")[None],
            past_key_values=self._cache.for_prompts(slots_P),
            use_cache=True,
        )
        prompts_P = torch.arange(num_prompts, device="xla")
        last_P1D = output.last_hidden_state[prompts_P, lengths_P - 1][:, None]
        logits_PV = self._gathered(self._model.lm_head(last_P1D)[:, 0])
        first_P = next_tokens(logits_PV, temperatures_P, top_k_P, top_p_P, seeds_P, lengths_P)
        for state_S, value_P in (
            (self._tokens, first_P),
            # A prompt that fills its slot has ended, and stays in its row.
            (self._positions, lengths_P.clamp(max=self.length - 1)),
            (self._top_k, top_k_P),
            (self._seeds, seeds_P),
            (self._temperatures, temperatures_P),
            (self._top_p, top_p_P),
        ):
            state_S.index_copy_(0, slots_P, value_P)
        return first_P.clone()

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
