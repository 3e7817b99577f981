"""Marks along some axes of a mesh: how these split a tensor, whatever the other axes do.

The styles of tensor parallelism are about one axis, as DTensor over a slice of a mesh. The batch
may be split over others, which the partitioner derives from the data's marks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, read
from spmd_core.marks.constraints import constrained, constrained_copy
from spmd_core.program.mark_names import MARK_ALONG, MARK_SUM
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


@dataclass(frozen=True)
class AxisLayout:
    """How some axes of a mesh split a tensor.

    Attributes:
        mesh: the mesh.
        axes: the axes, major first.
        dim: the dim that they split, negative to count from the last; None if each device along
            them has the whole tensor.
        is_sum: whether the value is a sum over features that the axes split, so that it is
            reduce-scattered, or all-reduced where `dim` is None. A hint: values are the same.
    """

    mesh: Mesh
    axes: tuple[int, ...]
    dim: int | None = None
    is_sum: bool = False

    def sharding(self, ndim: int) -> Sharding:
        """The sharding of tensors of this rank, if no other axis splits them.

        Raises:
            IndexError: they have no such dim.
        """
        if self.dim is None:
            return Sharding.of(self.mesh, (), ndim)
        if not -ndim <= self.dim < ndim:
            raise IndexError(
                "Shard names a dim of the tensor; "
                f"got dim {self.dim} for a tensor of rank {ndim}. Use {-ndim} to {ndim - 1}."
            )
        return Sharding.of(self.mesh, ((),) * (self.dim % ndim) + (self.axes,), ndim)


class Redistribute(torch.autograd.Function):
    """The same values in a layout; the backward gives the gradient a layout of its own.

    `apply(x, layout, layout of the gradient)`. Can be differentiated any number of times. Does not
    wait.
    """

    @staticmethod
    def forward(
        ctx: Any, x: XLAShardedTensor, to: AxisLayout, of_gradient: AxisLayout
    ) -> XLAShardedTensor:
        ctx.layouts = of_gradient, to
        return constrained_to(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Redistribute.apply(grads[0], *ctx.layouts), None, None


def constrain(x: XLAShardedTensor, layout: AxisLayout) -> None:
    """Constrains a tensor's present value, in place; as `marking.constrain`, along some axes."""
    handle, sharding = x._handle, layout.sharding(x.dim())
    with lock:
        value = constrained(read(handle), sharding, MARK_ALONG, along=layout.axes)
        if isinstance(handle, Storage):
            handle.write(value)
        else:
            handle.value = value


def constrained_to(x: XLAShardedTensor, layout: AxisLayout) -> XLAShardedTensor:
    """A new tensor of the same values in a layout. Not differentiable."""
    name, summed_over = (MARK_SUM, layout.axes) if layout.is_sum else (MARK_ALONG, None)
    sharding = layout.sharding(x.dim())
    with lock:
        return wrap(constrained_copy(x, sharding, name, along=layout.axes, summed_over=summed_over))
