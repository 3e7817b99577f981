"""`upload_sharded`: host data as a marked tensor, copied straight to its shards."""

import torch

from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Spec
from spmd_core.marks.marking import mark_sharding, start_upload
from spmd_core.program import leaves
from spmd_core.runtime import buffers, devices
from spmd_core.sharding.mesh import check_devices
from spmd_core.sharding.partition_spec import ShardingSpec
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


def upload_sharded(t: torch.Tensor, spec: ShardingSpec) -> XLAShardedTensor:
    """A new tensor on the device with the values of one on the host.

    `t.to("xla")`, `mark_sharding` and `start_upload` in one, without the copy in host memory
    between them. Returns when the host's memory may be written to again, so it waits for the
    transfer. For a thread that loads data.

    Args:
        t: a CPU tensor, of any shape and dtype. Autograd does not follow the transfer.
        spec: the sharding of the new tensor.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        MeshError: the mesh names a device that does not exist.
        PartitionSpecError: the spec does not fit the mesh or the tensor.
        UnsupportedOpError: see `mark_sharding`.
    """
    host = t.detach().resolve_conj().resolve_neg()
    if spec.minibatch and devices.num_processes() > 1:
        return mark_sharding(host, spec)
    if host.device.type != "cpu":
        return start_upload(mark_sharding(host.to("xla"), spec))
    devices.require_spmd("upload_sharded")
    check_devices(spec.mesh, devices.global_runtime_device_count())
    sharding = Sharding.of(spec.mesh, spec.partition_spec, host.dim())
    own = Spec.from_tensor(host) if _keeps(host) else Spec.contiguous(tuple(host.shape), host.dtype)
    placement = leaves.marked_placement(sharding)
    array = buffers.upload_and_wait(
        host, placement.device_sharding, sharding.padded_shape(own.shape)
    )
    storage = Storage.of_leaf(own, array, placement)
    storage.sharding = sharding
    return wrap(storage)


def _keeps(host: torch.Tensor) -> bool:
    """Whether the device's tensor has the same strides; `to` keeps these, and no others."""
    return (
        host.is_contiguous()
        or (host.ndim == 4 and host.is_contiguous(memory_format=torch.channels_last))
        or (host.ndim == 5 and host.is_contiguous(memory_format=torch.channels_last_3d))
    )
