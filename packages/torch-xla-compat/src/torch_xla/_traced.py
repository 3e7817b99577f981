"""Functions of this package in programs that torch.compile traces."""

from types import ModuleType

from spmd_core.dynamo.functions import trace_as_constant, trace_as_global_mesh, trace_as_mark
from spmd_core.torch_backend.after_import import after_import
from torch_xla import torch_xla
from torch_xla.core import xla_model
from torch_xla.distributed.spmd import xla_sharding


def _leave_out(module: ModuleType) -> None:
    """Makes Dynamo call this package's other functions without tracing them."""
    module.add(__name__.partition(".")[0])


def install() -> None:
    """Registers them once Dynamo is imported."""
    for function in (
        xla_sharding.mark_sharding,
        xla_sharding.annotate_custom_sharding,
        xla_sharding.clear_sharding,
    ):
        trace_as_mark(function)
    for copying in (
        xla_sharding.mark_sharding_with_gradients,
        xla_sharding.MarkShardingFunction.apply,
    ):
        trace_as_mark(copying, in_place=False)
    trace_as_global_mesh(xla_sharding.get_global_mesh)
    for constant in (torch_xla.device, xla_model.xla_device):
        trace_as_constant(constant)
    after_import("torch._dynamo.trace_rules", _leave_out)
