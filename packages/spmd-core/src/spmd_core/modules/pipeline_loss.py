"""`pipeline_loss`: a model's loss by the schedule 1F1B, which interleaves forwards and backwards.

p stages, m microbatches. In tick t, stage s runs the forward of microbatch t - s, then the backward
of microbatch t - 2(p-1) + s: the last stage's backward follows its forward at once, and what stage
s + 1 gives back reaches stage s one tick later (PipeDream-flush: Narayanan et al. 2021,
"Memory-efficient pipeline-parallel DNN training", section 3). The first p - 1 ticks have no
backward and the last p - 1 no forward, so all of it takes m + p - 1 forwards and backwards. A stage
keeps the inputs of the last 2p - 1 ticks, and computes a chunk again in its backward.

What the model does before and after the blocks runs in the region too, for one microbatch in each
tick. For that the loss function is called twice: up to the blocks, where an exception ends it, and
past them, where the part before the blocks is recorded again but, as nothing needs it, not
computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import require_callable, require_kind
from spmd_core.errors import WrapError
from spmd_core.manual.collectives import all_reduce
from spmd_core.manual.region import inside
from spmd_core.manual.shard_map import leave
from spmd_core.modules.barrier import optimization_barrier
from spmd_core.modules.fsdp_unit import ParameterRef, swapped, unit_of
from spmd_core.modules.pipeline import Pipeline
from spmd_core.modules.pipeline_region import Region
from spmd_core.recording import random_stream
from spmd_core.runtime.devices import require_spmd


def pipeline_loss(
    loss_function: Callable[..., torch.Tensor], model: nn.Module, *batch: Any
) -> torch.Tensor:
    """`loss_function(model, *batch)` of a model with a pipeline, in its schedule.

    With schedule "1f1b", the gradients are computed together with the loss, and `backward()` of the
    result hands them out; the memory that activations take does not grow with the number of
    microbatches. Then `loss_function` sees one device's rows of one microbatch, and must be a mean
    over rows that count equally: the result is the mean over all parts. It calls the model once,
    marks nothing over the pipeline's axes, and is called several times. Random numbers before the
    blocks are drawn again for the part after them: a dropout before the blocks has two different
    masks if its result also bypasses them. With other schedules, and without gradients, this is the
    plain call.

    Args:
        loss_function: `loss_function(model, *batch)` returns a 0-dim tensor of floats.
        model: whose blocks, or those of a module in it, became a `pipeline`.
        batch: tensors on device `xla` with the batch in dim 0; anything else is passed as it is.

    Returns:
        A 0-dim tensor on device `xla`. Does not wait.

    Raises:
        WrapError: the model has no pipeline or several, has units of fully_shard, or the loss
            function does not call the model once, or the loss is not a 0-dim tensor.
        ValueError: microbatches x parts of the batch do not divide the batch.

    Example:
        >>> from torch import nn
        >>> from spmd_core import Mesh, pipeline
        >>> mesh = Mesh(range(8), (2, 4), ("pipe", "data"))
        >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        >>> _ = pipeline(model, mesh, num_microbatches=4, schedule="1f1b", batch_axes=("data",))
        >>> x = torch.ones(32, 16, device="xla")
        >>> loss = pipeline_loss(lambda model, x: (model(x) - x).square().mean(), model, x)
        >>> loss.backward()
    """
    require_spmd("pipeline_loss")
    require_callable("loss_function", loss_function)
    require_kind("model", model, nn.Module, write="the module that has the pipeline")
    found = [module for module in model.modules() if isinstance(module, Pipeline)]
    if len(found) != 1:
        raise WrapError(
            f"pipeline_loss takes a model with one pipeline; got a {type(model).__name__} with "
            f"{len(found)}. Call spmd.pipeline on the list of the model's blocks first."
        )
    (stages,) = found
    if stages.schedule != "1f1b" or not torch.is_grad_enabled():
        loss = loss_function(model, *batch)
        require_kind("the loss", loss, torch.Tensor, write="a function that returns a 0-dim tensor")
        return loss
    schedule = _Schedule(stages, loss_function, model, batch)
    result: torch.Tensor = _LossAndGradients.apply(schedule, *schedule.trained)
    return result


class _LossAndGradients(torch.autograd.Function):
    """The loss, whose backward hands out gradients that the forward has computed."""

    @staticmethod
    def forward(ctx: Any, schedule: "_Schedule", *trained: torch.Tensor) -> torch.Tensor:
        loss, gradients = schedule.run()
        ctx.used = [g is not None for g in gradients]
        ctx.save_for_backward(*(g for g in gradients if g is not None))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        return (
            None,
            *(next(saved) * grads[0].to(torch.float32) if used else None for used in ctx.used),
        )


class _Stop(BaseException):
    """Ends the part of a loss function before the blocks. No Exception: models catch these.

    It holds no tensor: one in a traceback would live until the next garbage collection, and the
    program would compute it.
    """


@dataclass(frozen=True)
class _Reached:
    """The arguments with which a model calls its blocks.

    Attributes:
        x: the first argument.
        arguments: the other ones.
        keywords: by name.
    """

    x: torch.Tensor
    arguments: Any
    keywords: Any


class _Inside:
    """The tensors of a model in the region.

    Attributes:
        slots: for each slot its tensors by name.
        trained: the tensors that get gradients, in the order of the model's parameters.
    """

    def __init__(self, model: nn.Module, stages: Pipeline, trained: Sequence[torch.Tensor]) -> None:
        """Enters new leaf tensors, so that `gradients` can leave the region in the same way."""
        region = stages.region
        stacked = {id(t) for t in (*stages.parameters(), *stages.buffers())}
        self._leaves = [p.detach().requires_grad_() for p in trained]
        leaf_of = {id(p): leaf for p, leaf in zip(trained, self._leaves)}
        with torch.enable_grad():
            entered = {
                id(p): region.enter_parameter(leaf_of.get(id(p), p), stacked=id(p) in stacked)
                for p in (*model.parameters(), *stages.buffers())
            }
        self._entered = [entered[id(p)] for p in trained]
        own = {key: x.detach().requires_grad_(key in leaf_of) for key, x in entered.items()}
        self.trained = [own[id(p)] for p in trained]
        self.slots = [
            {
                name: own[id(tensor)]
                for name, tensor in (*slot.named_parameters(), *slot.named_buffers())
            }
            for slot in stages.slots
        ]
        in_slots = {module for slot in stages.slots for module in slot.modules()}
        self._others = [
            (ParameterRef(module, name, p), own[id(p)])
            for module in model.modules()
            if module not in in_slots
            for name, p in module._parameters.items()
            if p is not None
        ]

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Inside, the modules around the blocks have the region's parameters."""
        with swapped(self._others):
            yield

    def gradients(self, sums: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the model's parameters from those of `trained`, summed over devices."""
        pairs = [
            (entered, leaf, total)
            for entered, leaf, total in zip(self._entered, self._leaves, sums)
            if total is not None
        ]
        found = iter(
            torch.autograd.grad(
                [e for e, _, _ in pairs], [x for _, x, _ in pairs], [total for _, _, total in pairs]
            )
        )
        return [None if total is None else next(found) for total in sums]


class _Schedule:
    """One step of 1F1B.

    Attributes:
        trained: the model's parameters that get gradients.
    """

    def __init__(
        self,
        stages: Pipeline,
        loss_function: Callable[..., torch.Tensor],
        model: nn.Module,
        batch: Sequence[Any],
    ) -> None:
        self._stages, self._loss_function, self._model = stages, loss_function, model
        self._region: Region = stages.region
        self.trained = [p for p in model.parameters() if p.requires_grad]
        for name, module in model.named_modules():
            if unit_of(module) is not None:
                raise WrapError(
                    "schedule '1f1b' gathers the model's parameters itself; got "
                    f"{name or 'the model itself'!r}, which is a unit of fully_shard. "
                    "Mark its parameters with mark_sharding instead."
                )
        tensors = [x for x in batch if isinstance(x, torch.Tensor) and x.dim()]
        rows = {x.shape[0] for x in tensors}
        if len(rows) != 1:
            raise ValueError(
                "the tensors of a batch have the batch in dim 0; got "
                f"{sorted(rows) or 'no tensor'} rows. Give tensors with equally many rows."
            )
        stages.check_batch(rows.pop())
        m = stages.plan.num_microbatches
        split = [
            self._region.enter_batch(x).chunk(m)
            if isinstance(x, torch.Tensor) and x.dim()
            else (x,) * m
            for x in batch
        ]
        self._microbatches = list(zip(*split))

    # --- The model's parts, in the region ---------------------------------------------------------

    def _before(self, microbatch: int) -> _Reached:
        """The arguments of the blocks for a microbatch."""
        found: list[_Reached] = []

        def reach(x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
            found.append(_Reached(x, args, kwargs))
            raise _Stop

        with suppress(_Stop):
            self._called(reach, self._microbatches[microbatch])
        if found:
            return found[0]
        raise WrapError(
            "a loss function calls the model, and the model its blocks, for pipeline_loss; got "
            "one that does not. Write loss_function(model, *batch)."
        )

    def _after(self, y: torch.Tensor, batch: Sequence[Any]) -> torch.Tensor:
        """The loss from the result of the blocks."""
        num_calls = 0

        def give(x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            return y

        loss = self._called(give, batch)
        if num_calls != 1 or not isinstance(loss, torch.Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise WrapError(
                "a loss function calls the model once and returns a 0-dim tensor, for "
                f"pipeline_loss; got {num_calls} calls and {shape}. "
                "Return the mean over the rows, of one call."
            )
        return loss

    def _called(self, interception: Callable[..., torch.Tensor], batch: Sequence[Any]) -> Any:
        self._stages.interception = interception
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self._seeds[0])
                return self._loss_function(self._model, *batch)
        finally:
            self._stages.interception = None

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The stage's blocks.

        Each call uses the same seeds, into which `mixing` mixes the microbatch.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seeds[1])
            return self._stages.run(self._inside.slots, x, self._args, self._kwargs)

    # --- The ticks --------------------------------------------------------------------------------

    def run(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The loss, and the gradient of each of `trained`."""
        # Drawn as random operations draw theirs, so that a captured step draws them, too.
        self._seeds = [random_stream.draw(), random_stream.draw()]
        region, plan = self._region, self._stages.plan
        self._inside = _Inside(self._model, self._stages, self.trained)
        with inside(region.manual), self._inside.as_parameters():
            self._stage = region.stage()
            loss, sums = self._ticks(plan.num_stages, plan.num_microbatches)
            axes = region.manual.axes
            loss = all_reduce(loss, axes)
        # Gradients of stages' tensors stay on the stage; others are summed over stages too.
        return leave(loss, region.manual, ()), self._inside.gradients(sums)

    def _ticks(self, p: int, m: int) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        self._stages.num_runs, self._stages.num_useful_runs = 0, 2 * m
        inputs: dict[int, torch.Tensor] = {}  # of the stages, by tick
        sums: list[torch.Tensor | None] = [None] * len(self.trained)
        total = y = gradient = None
        for t in range(m + 2 * (p - 1)):
            if t < m + p - 1:
                inputs[t] = self._input(t, y)
                with random_stream.mixing(t - self._stage):
                    y = self._blocks(inputs[t])
            if t < p - 1:
                continue
            last = None
            if t < m + p - 1:
                assert y is not None
                loss, last = self._loss(y, t - (p - 1), sums)
                total = loss if total is None else total + loss
            gradient = self._backward(inputs, t, gradient, last, sums)
            inputs.pop(t - 2 * (p - 1), None)
            if t >= 2 * (p - 1):
                self._backward_before(t - 2 * (p - 1), gradient, sums)
            y, gradient = self._in_order(t, y, gradient, inputs, sums)
        assert total is not None
        return total, sums

    def _input(self, t: int, y: torch.Tensor | None) -> torch.Tensor:
        """The stages' inputs of a tick."""
        sent = None if y is None else self._region.sent_on(y)
        if t >= len(self._microbatches):
            assert sent is not None
            return sent
        with random_stream.mixing(torch.full_like(self._stage, t)):
            if sent is not None:
                return torch.where(self._stage == 0, self._before(t).x, sent)
            with torch.enable_grad():  # so that the check sees what requires gradients
                reached = self._before(t)
        self._args, self._kwargs = _checked(reached)
        return reached.x.detach()

    def _loss(
        self, y: torch.Tensor, microbatch: int, sums: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A device's part of a microbatch's loss, and its gradient.

        The microbatch is the one that the last stage completes. The stages divide its rows among
        them, if these divide evenly. Otherwise all compute the same, and the result of the last
        stage is used.
        """
        region, p = self._region, self._stages.plan.num_stages
        batch = self._microbatches[microbatch]
        weight = (self._stage == p - 1) / (len(self._microbatches) * region.num_batch_shards)
        with torch.enable_grad(), random_stream.mixing(torch.full_like(self._stage, microbatch)):
            y = y.detach().requires_grad_()
            if y.shape[0] % p == 0:
                weight = torch.ones_like(weight) / (
                    len(self._microbatches) * region.num_batch_shards * p
                )
                loss = self._after(region.shared_out(y), [self._rows(x) for x in batch])
            else:
                loss = self._after(y, batch)
        weight = weight.to(loss.dtype)
        (dy,) = self._add_gradients(loss, weight, sums, [y])
        assert dy is not None
        return loss.detach() * weight, dy

    def _rows(self, x: Any) -> Any:
        """The stage's rows of a tensor of the batch."""
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        p = self._stages.plan.num_stages
        parts = x.reshape(p, x.shape[0] // p, *x.shape[1:])
        return parts.index_select(0, self._stage.reshape(1)).squeeze(0)

    def _backward(
        self,
        inputs: Mapping[int, torch.Tensor],
        t: int,
        gradient: torch.Tensor | None,
        last: torch.Tensor | None,
        sums: list[torch.Tensor | None],
    ) -> torch.Tensor:
        """The gradients of the stages' inputs, from those that the next stages sent back.

        A stage that has no backward in this tick gets zeros, and so adds zeros.
        """
        p, stage = self._stages.plan.num_stages, self._stage
        newest = max(inputs)
        x = inputs[min(t, newest)]
        for s in range(p - 1):
            # From the tick of the microbatch's forward; from any other if no stage has a backward.
            its_tick = min(max(t - 2 * (p - 1 - s), min(inputs)), newest)
            x = torch.where(stage == s, inputs[its_tick], x)
        nothing = torch.zeros_like(x)
        sent = nothing if gradient is None else self._region.sent_on(gradient, backward=True)
        sent = torch.where(stage == p - 1, nothing if last is None else last, sent)
        with torch.enable_grad(), random_stream.mixing(t - 2 * (p - 1) + stage):
            x = x.detach().requires_grad_()
            y = self._blocks(x)
            (dx,) = self._add_gradients(y, sent, sums, [x])
        assert dx is not None
        return dx

    def _backward_before(
        self, microbatch: int, gradient: torch.Tensor, sums: list[torch.Tensor | None]
    ) -> None:
        """Adds the gradients of the part before the blocks, which is the first stage's."""
        with torch.enable_grad(), random_stream.mixing(torch.full_like(self._stage, microbatch)):
            x = self._before(microbatch).x
            if x.requires_grad:
                own = torch.where(self._stage == 0, gradient, torch.zeros_like(gradient))
                self._add_gradients(x, own.to(x.dtype), sums, [])

    def _add_gradients(
        self,
        result: torch.Tensor,
        gradient: torch.Tensor,
        sums: list[torch.Tensor | None],
        inputs: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Adds the gradients of `trained` to the sums, and returns those of the inputs."""
        trained = self._inside.trained
        with torch.autocast("xla", enabled=False):  # as a backward after `with autocast:`
            found = torch.autograd.grad(result, [*inputs, *trained], gradient, allow_unused=True)
        for i, own in enumerate(found[len(inputs) :]):
            before = sums[i]
            if own is not None:
                sums[i] = own if before is None else before + own
        return list(found[: len(inputs)])

    def _in_order(
        self,
        t: int,
        y: torch.Tensor | None,
        gradient: torch.Tensor,
        inputs: dict[int, torch.Tensor],
        sums: list[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Makes the next tick wait for this one: the compiler would run all forwards first.

        The saved inputs wait, too, from which later ticks recompute.
        """
        added = [i for i, each in enumerate(sums) if each is not None]
        following = list(self._microbatches[t + 1]) if t + 1 < len(self._microbatches) else []
        held = [gradient, *(sums[i] for i in added), *inputs.values(), *([] if y is None else [y])]
        held += [x for x in following if isinstance(x, torch.Tensor)]
        behind = iter(optimization_barrier(held))  # type: ignore[arg-type]
        gradient = next(behind)
        for i in added:
            sums[i] = next(behind)
        inputs.update({tick: next(behind) for tick in inputs})
        y = None if y is None else next(behind)
        if following:
            self._microbatches[t + 1] = tuple(
                next(behind) if isinstance(x, torch.Tensor) else x for x in following
            )
        return y, gradient


def _checked(reached: _Reached) -> tuple[Any, Any]:
    """The other arguments of the blocks: those of the first microbatch are used for all."""
    rows = reached.x.shape[0]
    for leaf in pytree.tree_leaves((reached.arguments, reached.keywords)):
        if isinstance(leaf, torch.Tensor) and (
            (leaf.dim() > 1 and 1 < leaf.shape[0] == rows) or leaf.requires_grad
        ):
            raise ValueError(
                "the first argument of the blocks alone has a batch or gradients, in schedule "
                f"'1f1b'; got another tensor of shape {tuple(leaf.shape)}, "
                f"requires_grad={leaf.requires_grad}. "
                "Compute it in the blocks, or choose schedule 'gpipe'."
            )
    return reached.arguments, reached.keywords
