"""`pipeline`: a model's equal blocks as the stages of a pipeline over a mesh axis.

Stages pass activations on by collective-permutes, one microbatch per stage and tick
(`modules.pipeline_plan`), inside a manual region (`modules.pipeline_region`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import require_int
from spmd_core.errors import MeshError, SpmdError, WrapError
from spmd_core.manual.region import current_region, inside
from spmd_core.modules.checkpointing import checkpointed
from spmd_core.modules.pipeline_plan import PipelinePlan
from spmd_core.modules.pipeline_region import Region
from spmd_core.modules.pipeline_stages import (
    Stacking,
    check_equal,
    checkpointing_of,
    stack,
    stacked_slots,
    unstack,
)
from spmd_core.runtime.devices import global_runtime_device_count, require_spmd
from spmd_core.sharding.mesh import Mesh, check_devices, given_or_global
from spmd_core.tensor.sharded_tensor import device_tensor

SCHEDULES = ("gpipe", "1f1b", "circular")


class Pipeline(nn.Module):
    """The blocks of all stages, in place of a model's blocks; made by `pipeline`.

    Its parameters are stacked: `slots[k]` is the stage's k-th block, with a first dim of stages in
    front of the dims of each parameter (`parameter.num_stacked_dims` is 1). `state_dict()` of the
    model has the plain model's names and shapes, and `load_state_dict` takes them.

    Attributes:
        schedule: "gpipe", "1f1b" or "circular".
        plan: the ticks.
        stacking: which block is where.
        region: the mesh axes.
        slots: the modules.
        num_runs: how many runs of a chunk of blocks the last recorded program has on each device:
            in a forward, and in `pipeline_loss` with schedule "1f1b" forwards and backwards.
        num_useful_runs: how many of these work on a microbatch; the others fill bubbles.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    def __init__(
        self,
        slots: Sequence[nn.Module],
        stacking: Stacking,
        plan: PipelinePlan,
        region: Region,
        schedule: str,
    ) -> None:
        super().__init__()
        self.slots = nn.ModuleList(slots)
        self.stacking, self.plan, self.region, self.schedule = stacking, plan, region, schedule
        self.num_runs = self.num_useful_runs = 0
        # Around a call that has the tensors as arguments: a recomputation must not read the
        # module's.
        self._checkpoints = [checkpointing_of(slot) for slot in slots]
        self.interception: Callable[..., torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the plain model's blocks give for `x`, one after the other.

        Args:
            x: on device `xla`, with the batch in dim 0.
            args: passed to each block unchanged; tensors must not have the batch in dim 0.
            kwargs: likewise.

        Returns:
            A tensor of the shape and dtype of `x`. Its rows are split over the batch's axes, and
            over the stages too where these divide a device's rows.

        Raises:
            ValueError: the batch does not divide, or another argument has the batch in dim 0.
            SpmdError: with schedule "1f1b" and gradients, outside of `pipeline_loss`; or inside
                of a `shard_map`.
        """
        if self.interception is not None:
            return self.interception(x, args, kwargs)
        if self.schedule == "1f1b" and torch.is_grad_enabled():
            raise SpmdError(
                "schedule '1f1b' runs backwards among the forwards, so it computes the loss "
                "itself; got a forward with gradients enabled. Call "
                "spmd.pipeline_loss(loss_function, model, *batch), or choose schedule 'gpipe'."
            )
        if current_region.get() is not None:
            raise SpmdError(
                "manual regions do not nest; got a pipeline inside a shard_map. "
                "Call the model outside of it."
            )
        x = device_tensor(x, "a pipeline", advice="Move the batch with .to('xla').")
        self.check_batch(x.shape[0] if x.dim() else 0)
        _refuse_rows((args, kwargs), x.shape[0])
        return self._forward(x, args, kwargs)

    def check_batch(self, rows: int) -> None:
        """Raises ValueError if microbatches x parts of the batch do not divide the rows."""
        m, parts = self.plan.num_microbatches, self.region.num_batch_shards
        if rows == 0 or rows % (m * parts):
            raise ValueError(
                "num_microbatches x the devices that split the batch divides the batch; "
                f"got {rows} rows for {m} microbatches on {parts} parts. "
                f"Choose a batch of {m * parts * max(1, -(-rows // (m * parts)))}, or another "
                "num_microbatches."
            )

    def _forward(self, x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        region, plan = self.region, self.plan
        parameters = self.local_parameters()
        microbatches = region.enter_batch(x).chunk(plan.num_microbatches)
        # Enters the region, so that the gradient of such a tensor is summed over the devices.
        args, kwargs = pytree.tree_map_only(torch.Tensor, region.enter_whole, (args, kwargs))
        done = []
        self.num_runs, self.num_useful_runs = 0, plan.num_microbatches * plan.rounds
        with inside(region.manual):
            stage = region.stage()
            # All stages start with rows of the batch: from zeros, a block might compute infinities.
            state = microbatches[0]
            for t, tick in enumerate(plan.ticks()):
                if t > 0:
                    state = region.sent_on(state)
                    if tick.entering is not None:
                        state = torch.where(stage == 0, microbatches[tick.entering], state)
                chunk = self.chunk(parameters, tick.round)
                if tick.behind != tick.round:
                    is_ahead = stage <= tick.last_ahead
                    chunk = [
                        {name: torch.where(is_ahead, a, late[name]) for name, a in ahead.items()}
                        for ahead, late in zip(chunk, self.chunk(parameters, tick.behind))
                    ]
                state = self.run(chunk, state, args, kwargs)
                if tick.leaving is not None:
                    done.append(state)
            result = torch.cat(done)
        return region.leave_last(result)

    def local_parameters(self) -> list[dict[str, torch.Tensor]]:
        """For each slot the stage's own tensors by name, in the manual region; gathered."""
        return [
            {
                name: self.region.enter_parameter(tensor, stacked=True)
                for name, tensor in (*slot.named_parameters(), *slot.named_buffers())
            }
            for slot in self.slots
        ]

    def chunk(
        self, parameters: list[dict[str, torch.Tensor]], round: int
    ) -> list[dict[str, torch.Tensor]]:
        """The tensors of the slots that run in a round."""
        n = self.stacking.blocks_per_chunk
        return parameters[round * n : (round + 1) * n]

    def run(
        self, chunk: list[dict[str, torch.Tensor]], x: torch.Tensor, args: Any, kwargs: Any
    ) -> torch.Tensor:
        """A chunk of blocks on one microbatch, in the region.

        The modules are those of the first round: they differ in their tensors alone.
        """
        self.num_runs += 1
        for slot, tensors, options in zip(self.slots, chunk, self._checkpoints):
            x = _called(slot, tensors, options, x, args, kwargs)
        return x

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return (
            f"schedule={self.schedule!r}, stages={self.plan.num_stages}, "
            f"microbatches={self.plan.num_microbatches}, rounds={self.plan.rounds}"
        )


def _called(
    slot: nn.Module,
    tensors: dict[str, torch.Tensor],
    checkpoint: dict[str, Any] | None,
    x: torch.Tensor,
    args: Any,
    kwargs: Any,
) -> torch.Tensor:
    """One block's result, of its tensors; checkpointed if there are options for it."""
    versions = {name: tensor._version for name, tensor in tensors.items()}

    def call(x: torch.Tensor) -> Any:
        return torch.func.functional_call(slot, tensors, (x, *args), kwargs)

    result = call(x) if checkpoint is None else checkpointed(call, x, **checkpoint)
    if not isinstance(result, torch.Tensor) or result.shape != x.shape:
        got = (
            f"shape {tuple(result.shape)} for {tuple(x.shape)}"
            if isinstance(result, torch.Tensor)
            else f"a {type(result).__name__}"
        )
        raise WrapError(
            "a block of a pipeline returns one tensor of the shape of its first argument; "
            f"got {got} from a {type(slot).__name__}. Return the tensor alone, and keep layers "
            "that change the shape outside of the blocks."
        )
    written = [name for name, tensor in tensors.items() if tensor._version != versions[name]]
    if written:
        raise WrapError(
            "a block of a pipeline does not write to its tensors, which are copies here; got a "
            f"{type(slot).__name__} that writes to {written[0]!r}. Use layers without running "
            "statistics, or call eval()."
        )
    # Autocast may have changed the dtype; all ticks pass on the same one.
    return result if result.dtype == x.dtype else result.to(x.dtype)


def _refuse_rows(arguments: Any, rows: int) -> None:
    """Raises ValueError for a tensor beside the first argument that has the batch in dim 0."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and 1 < leaf.shape[0] == rows:
            raise ValueError(
                "the first argument of a pipeline's blocks alone has a batch; got another tensor "
                f"of shape {tuple(leaf.shape)} for a batch of {rows}. Pass what is the same for "
                "all rows, or put what differs into the first argument."
            )


def pipeline(
    blocks: nn.ModuleList | nn.Sequential,
    mesh: Mesh | None = None,
    *,
    axis: str = "pipe",
    num_microbatches: int,
    schedule: str = "gpipe",
    rounds: int = 1,
    batch_axes: Sequence[str] = (),
) -> Pipeline:
    """Makes the equal blocks of a model the stages of a pipeline over a mesh axis, in place.

    The axis has p stages, and each gets an equal part of the L blocks. A batch is cut into m
    microbatches. In each tick all stages run their blocks, each on another microbatch, and send the
    results to the next stage. The model's own code stays: a loop over `blocks`, or the call of a
    Sequential, finds one module there that does what all blocks did. The values are those of the
    plain model (up to the order of sums over microbatches).

    Parameters are stacked, with a first dim of p that the axis splits. Their other dims keep the
    marks that the blocks' parameters have, so mark these before: over an axis of `batch_axes`
    (fsdp), a stage's parameters are gathered once in a step and their gradients reduce-scattered
    once, however many microbatches there are; another axis (tensor) goes on splitting the work.
    Make the optimizer afterwards. Optimizers that work on each element do what they do for the
    plain model; a choice by `p.ndim` is of `p.ndim - getattr(p, "num_stacked_dims", 0)`.
    `state_dict()` and `load_state_dict()` of the model have the plain model's names and shapes; an
    optimizer's state has the stacked shapes.

    Dropout draws another mask for each stage, microbatch and block. A seed reproduces them on the
    same mesh with the same schedule; they are not the plain model's.

    Blocks under `checkpoint_module` keep only their inputs, for each tick.

    Args:
        blocks: L modules of equal structure, each from one tensor with the batch in dim 0 to one of
            the same shape. They may take more arguments, which are the same for all rows.
        mesh: over all devices; by default the global one.
        axis: the name of the mesh axis of the stages.
        num_microbatches: m. With the devices along `batch_axes`, it divides the batch.
        schedule: "gpipe": all forwards, then all backwards; a stage keeps m microbatches'
            activations. "1f1b": backwards begin as soon as they can, and a stage keeps the inputs
            of at most 2p - 1 microbatches, whatever m is, and computes again in backward what it
            needs; the loss is computed by `pipeline_loss`. "circular": as gpipe, and each stage has
            `rounds` chunks of blocks that do not follow each other.
        rounds: v, the chunks of a stage, for "circular" at least 2.
        batch_axes: the mesh axes that split the batch, such as ("data", "fsdp"); major first.

    Returns:
        The module that is now the only one in `blocks`. The fraction of a stage's ticks in which it
        has nothing to do is `plan.bubble_fraction`: (p-1) / (m+p-1), in "circular"
        (p-1) / (v·m+p-1) if p divides m.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        MeshError: there is no mesh, or it lacks an axis.
        TypeError: `blocks` is no ModuleList or Sequential.
        WrapError: p·v does not divide L; blocks differ, share tensors or are units of fully_shard;
            or they are a pipeline already.
        ValueError: another schedule, or numbers that do not fit it.

    Example:
        >>> from torch import nn
        >>> from spmd_core import Mesh
        >>> mesh = Mesh(range(8), (2, 4), ("pipe", "data"))
        >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        >>> stages = pipeline(model, mesh, num_microbatches=4, batch_axes=("data",))
        >>> model(torch.ones(32, 16, device="xla")).shape, stages.plan.bubble_fraction
        (torch.Size([32, 16]), 0.2)
    """
    require_spmd("pipeline")
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        raise TypeError(
            "a pipeline is made of the blocks in a ModuleList or Sequential; "
            f"got {type(blocks).__name__}. Put the blocks into one of these."
        )
    mesh = given_or_global(mesh, "a pipeline")
    region = _region(mesh, axis, batch_axes)
    plan = _plan(region.num_stages, num_microbatches, schedule, rounds)
    if any(isinstance(block, Pipeline) for block in blocks):
        raise WrapError(
            "blocks become a pipeline once; got a container that is one already. "
            "Build the model anew for another schedule."
        )
    stacking = Stacking.of(len(blocks), plan)
    check_equal(list(blocks))
    made = Pipeline(
        stacked_slots(list(blocks), stacking, region), stacking, plan, region, schedule
    ).train(blocks[0].training)
    for key in list(blocks._modules):
        del blocks._modules[key]
    blocks.append(made)
    blocks.register_state_dict_post_hook(unstack)
    blocks.register_load_state_dict_pre_hook(stack)
    return made


def _region(mesh: Mesh, axis: str, batch_axes: Sequence[str]) -> Region:
    check_devices(mesh, global_runtime_device_count())
    names = mesh.axis_names or ()
    if axis not in names:
        raise MeshError(
            f"the mesh needs an axis {axis!r}, along which the stages lie; got {mesh!r}. "
            f"Name one of its axes {axis!r}, or pass axis=."
        )
    is_list = isinstance(batch_axes, (list, tuple))
    if not is_list or any(name not in names or name == axis for name in batch_axes):
        others = tuple(name for name in names if name != axis)
        raise MeshError(
            "batch_axes are other axes of the mesh, which split the batch; "
            f"got {batch_axes!r} for {mesh!r}. Give a tuple of some of {others!r}."
        )
    return Region(
        mesh, names.index(axis), tuple(mesh.get_axis_name_idx(name) for name in batch_axes)
    )


def _plan(num_stages: int, num_microbatches: int, schedule: str, rounds: int) -> PipelinePlan:
    if schedule not in SCHEDULES:
        raise ValueError(
            f"the schedule of a pipeline is one of {', '.join(SCHEDULES)}; got {schedule!r}. "
            "Choose one of them."
        )
    num_microbatches = require_int("num_microbatches", num_microbatches)
    if num_microbatches < 1:
        raise ValueError(
            f"a batch has at least one microbatch; got num_microbatches={num_microbatches}. "
            f"Choose at least {num_stages}, the number of stages."
        )
    rounds = require_int("rounds", rounds)
    if (rounds < 2) if schedule == "circular" else (rounds != 1):
        raise ValueError(
            "schedule 'circular' has at least 2 rounds, and the others have 1; "
            f"got rounds={rounds} for {schedule!r}. "
            + ("Pass rounds=2." if schedule == "circular" else "Leave rounds out.")
        )
    return PipelinePlan(num_stages, num_microbatches, rounds)
