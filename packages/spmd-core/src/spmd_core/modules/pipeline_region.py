"""The manual region of a pipeline: how parameters, batches and results enter and leave it.

The region is manual over the pipeline's axis and over the axes that split the batch. So each device
sums the gradients of its own part of all microbatches, and devices add them up once, when the
gradients leave. Other axes of the mesh, such as a tensor axis, are left to the partitioner.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import torch
from jax import lax

from spmd_core.graph.values import Entry, Spec
from spmd_core.manual.collectives import all_reduce, all_to_all, collective_permute
from spmd_core.manual.region import inside, manual_axes
from spmd_core.manual.shard_map import axis_index, enter, leave
from spmd_core.marks.marking import constrain, mark_sharding
from spmd_core.recording.calls import known, record_own
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Manual
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# For dims of a tensor, the mesh axes that split each.
_Split: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Gather:
    """An all-gather along one dim, over manual axes; `others` are split by the partitioner.

    Attributes:
        axes: the names of the manual axes, major first.
        size: the number of devices along them.
        dim: the dim of the local tensor.
        others: for each dim the names of other axes that split it.
    """

    axes: tuple[str, ...]
    size: int
    dim: int
    others: tuple[tuple[str, ...], ...]

    def record(self, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """Gathers, or if transposed, sums over the axes and keeps this device's part of the dim."""
        assert isinstance(x, XLAShardedTensor)
        spec, shape = x._handle.spec, list(x.shape)
        shape[self.dim] = (
            shape[self.dim] // self.size if transposed else shape[self.dim] * self.size
        )
        name = "spmd::reduce_scatter" if transposed else "spmd::all_gather"

        def collective(block: jax.Array) -> jax.Array:
            if transposed:
                return lax.psum_scatter(block, self.axes, scatter_dimension=self.dim, tiled=True)
            return lax.all_gather(block, self.axes, axis=self.dim, tiled=True)

        def kernel(context: Any, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [collective(inputs[0])]

        def make() -> Entry:
            # On blocks: the partitioner would gather the other axes for a collective over some.
            out = Spec.contiguous(tuple(shape), spec.dtype)
            return Entry(name, kernel, (out,), block_axes=self.others)

        result: torch.Tensor = record_own(known((name, spec, self), make), (x,))
        return result


class _Gathered(torch.autograd.Function):
    """A parameter's whole value. The transpose: this device's shard of the gradients' sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: _Gather, transposed: bool) -> torch.Tensor:
        ctx.gather, ctx.transposed = gather, transposed
        return gather.record(x, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gathered.apply(grads[0], ctx.gather, not ctx.transposed), None, None


@dataclass(frozen=True)
class Region:
    """The mesh axes of a pipeline, by index.

    Attributes:
        mesh: the mesh, over all devices.
        axis: the axis of the stages.
        batch_axes: the axes that split the batch, major first.
    """

    mesh: Mesh
    axis: int
    batch_axes: tuple[int, ...]

    @cached_property
    def manual(self) -> Manual:
        """The manual axes."""
        return manual_axes(self.mesh, (self.axis, *self.batch_axes))

    @property
    def num_stages(self) -> int:
        """Devices along the axis of the stages."""
        return self.mesh.mesh_shape[self.axis]

    @property
    def num_batch_shards(self) -> int:
        """Into how many parts the batch is split."""
        return self.size(self.batch_axes)

    def size(self, axes: tuple[int, ...]) -> int:
        """The number of positions along some axes."""
        return Manual(self.mesh, axes).size

    def stage(self) -> torch.Tensor:
        """The device's stage: a 0-dim int64 tensor; for code in the region."""
        return axis_index(self.axis)

    def sent_on(self, x: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
        """What the stage before (or after) sends, as the stages form a ring. In the region."""
        p, step = self.num_stages, -1 if backward else 1
        return collective_permute(x, self.axis, [(i, (i + step) % p) for i in range(p)])

    def enter_batch(self, x: torch.Tensor) -> torch.Tensor:
        """A device's rows of a tensor with the batch in dim 0; each stage gets all of them."""
        return enter(x, self.manual, (self.batch_axes or None,))

    def enter_whole(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that is replicated in the region."""
        return enter(x, self.manual, ())

    def enter_parameter(self, parameter: torch.Tensor, *, stacked: bool) -> torch.Tensor:
        """A parameter, gathered over the batch's axes; the other axes go on splitting it.

        Its gradient is summed over the devices, and where those axes split it, reduce-scattered.

        Args:
            parameter: on device `xla`.
            stacked: whether dim 0 is that of the stages, which the result does not have.
        """
        splits = self._splits(parameter)
        mine = [tuple(a for a in axes if a in self.manual.axes) for axes in splits]
        if stacked:
            mine[0] = (self.axis,)
        for dim, axes in enumerate(mine):
            if parameter.shape[dim] % self.size(axes):
                mine[dim] = ()  # uneven blocks: left to the partitioner
        x: torch.Tensor = enter(parameter, self.manual, tuple(axes or None for axes in mine))
        with inside(self.manual):
            if stacked:
                x, mine, splits = x.squeeze(0), mine[1:], splits[1:]
            # As the shape will be: the others split each dim evenly, or are left out.
            shape = [n * self.size(axes) for n, axes in zip(x.shape, mine)]
            others: _Split = tuple(
                rest if shape[dim] % self.size(rest) == 0 else ()
                for dim, rest in enumerate(
                    tuple(a for a in axes if a not in self.manual.axes and self.size((a,)) > 1)
                    for axes in splits
                )
            )
            names = jax_axis_names(self.mesh)
            for dim, axes in enumerate(mine):
                kept = tuple(a for a in axes if self.size((a,)) > 1)
                if kept:
                    gather = _Gather(
                        tuple(names[a] for a in kept),
                        self.size(kept),
                        dim,
                        tuple(
                            tuple(names[a] for a in by) if d != dim and not mine[d] else ()
                            for d, by in enumerate(others)
                        ),
                    )
                    x = _Gathered.apply(x, gather, False)
            if any(others):
                spec = tuple(axes or None for axes in others)
                x = mark_sharding(x, self.mesh, spec, inplace=False)
        return x

    def _splits(self, x: torch.Tensor) -> _Split:
        sharding = x.sharding if isinstance(x, XLAShardedTensor) else None
        if sharding is None or sharding.mesh != self.mesh:
            return ((),) * x.dim()
        return sharding.dims

    def leave_last(self, x: torch.Tensor) -> torch.Tensor:
        """The global tensor of the last stage's rows, split over the stages if they divide evenly.

        Each stage then continues with a part of the rows, so that no computation is duplicated.

        Args:
            x: local, with a device's rows in dim 0.
        """
        rows, p = x.shape[0], self.num_stages
        axes = self.batch_axes
        with inside(self.manual):
            if rows % p == 0:
                x, axes = self.shared_out(x), (*axes, self.axis)
            else:
                last = self.stage() == p - 1
                x = all_reduce(torch.where(last, x, torch.zeros_like(x)), self.axis)
        whole: torch.Tensor = leave(x, self.manual, (axes or None,))
        return constrain(whole, self.mesh, (axes or None,)) if axes else whole

    def shared_out(self, x: torch.Tensor) -> torch.Tensor:
        """The stage's part of the rows of the last stage's `x`. In the region."""
        p = self.num_stages
        parts = x.reshape(p, x.shape[0] // p, *x.shape[1:])
        return all_to_all(parts, self.axis, 0, 0)[p - 1]
