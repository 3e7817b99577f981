"""`XLAShardedTensor`: a torch tensor on device `xla`, made of metadata and a handle to a value."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from spmd_core.arguments import checked
from spmd_core.errors import DeviceMismatchError, ShardError, SpmdError, UnsupportedOpError
from spmd_core.graph import recorders
from spmd_core.graph.storage import Handle, View, address
from spmd_core.graph.values import Spec
from spmd_core.runtime.jax_sharding import sharding_text
from spmd_core.sharding.partition_spec import PartitionSpecLike
from spmd_core.sharding.sharding import Sharding, ShardingType, from_text
from spmd_core.sharding.xla_text import REPLICATED
from spmd_core.tensor import changes, shards, stored_bytes
from spmd_core.tensor.device_storage import DeviceStorage
from spmd_core.tensor.gradient_sharding import GradientSharding
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.shards import XLAShard

_new = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided
_as_strided_ = torch.ops.aten.as_strided_.default
# Selects torch's kernel of `as_strided_` that only sets a tensor's metadata; torch registers it for
# all devices but XLA.
_METADATA_KEYS = torch._C.DispatchKeySet(
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
)


class XLAShardedTensor(torch.Tensor):
    """A tensor on device `xla`, with or without a sharding; behaves as the whole (global) tensor.

    Tensors come from torch's own functions (`torch.randn(..., device="xla")`, `.to("xla")`).
    Operations are recorded and return at once; reading a value on the host (`.cpu()`, `.item()`,
    `print`) computes everything pending and waits.

    The constructor, `XLAShardedTensor(elem, mesh_shape, partition_spec)`, moves an existing tensor
    to the device.

    Args:
        elem: any tensor; a tensor on the device is returned itself.
        mesh_shape: with `partition_spec`, marks the tensor over a mesh of this shape, which has the
            first devices and axes without names.
        partition_spec: see `mark_sharding`.
        requires_grad: whether autograd tracks the tensor, which then stays a leaf.

    Raises:
        TypeError: `elem` is no tensor, or only one of `mesh_shape` and `partition_spec` is given.
    """

    # Libraries for several frameworks look at the first part of a tensor's `__module__`. So it is
    # in torch, whose module for this device has the class.
    __module__ = "torch.xla"

    _handle: Handle
    # Set by `marks.marking`: constrains the gradients of a marked leaf. None until it is imported.
    _on_requires_grad: Callable[["XLAShardedTensor"], None] | None = None
    # Set by `marks.marking`: marks a tensor over a mesh of the given shape.
    _mark_over: Callable[["XLAShardedTensor", Sequence[int], PartitionSpecLike], None]
    # Shared with the hook that constrains this tensor's gradients; None without that hook.
    _gradient_sharding: "GradientSharding | None" = None
    # Whether changes are counted (`tensor.changes`): of these, and where `note` is called below.
    _is_watched = False
    __dict__ = changes.noting("__dict__")
    _backward_hooks = changes.noting("_backward_hooks")
    _post_accumulate_grad_hooks = changes.noting("_post_accumulate_grad_hooks")
    # Set by `marks.dtensor`: torch's DTensor interface.
    device_mesh: Any
    placements: Any
    redistribute: Callable[..., "XLAShardedTensor"]
    full_tensor: Callable[..., "XLAShardedTensor"]
    to_local: Callable[..., "XLAShardedTensor"]
    from_local: Callable[..., "XLAShardedTensor"]
    _spec: Any
    invalidate_spec_cache: Callable[["XLAShardedTensor"], None]
    # Operations are intercepted below autograd only: above it, gradients would be lost.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: Sequence[int] | None = None,
        partition_spec: PartitionSpecLike | None = None,
        requires_grad: bool = False,
    ) -> "XLAShardedTensor":
        if not isinstance(elem, torch.Tensor):
            raise TypeError(
                f"XLAShardedTensor takes a tensor; got {type(elem).__name__}. "
                "Pass one, or use torch.tensor(data, device='xla') for other data."
            )
        if (mesh_shape is None) != (partition_spec is None):
            raise TypeError(
                "mesh_shape and partition_spec go together; "
                f"got {mesh_shape} and {partition_spec}. "
                "Give both, or neither and mark the tensor later."
            )
        tensor = elem if isinstance(elem, XLAShardedTensor) else elem.detach().to(XLA_DEVICE)
        assert isinstance(tensor, XLAShardedTensor)
        if mesh_shape is not None and partition_spec is not None:
            XLAShardedTensor._mark_over(tensor, mesh_shape, partition_spec)
        return tensor.requires_grad_() if requires_grad else tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SpmdError(
            f"the dispatcher is not installed, so {func} cannot be recorded. "
            "Import spmd_core, not one of its modules alone."
        )

    @property
    def sharding(self) -> Sharding | None:
        """The canonical sharding, marked or inherited; None if the partitioner may choose."""
        return self._handle.sharding

    @property
    def sharding_spec(self) -> str:
        """XLA's text of the sharding, such as `{devices=[4,2]0,1,2,3,4,5,6,7}`. Does not wait.

        For a computed tensor without a mark, this is the sharding that the partitioner chose. `''`
        if the tensor has no sharding.
        """
        sharding = self._handle.sharding
        if sharding is not None:
            return sharding.text
        value = self._handle.storage.value
        if (
            value.data is None
            or value.placement.jax_sharding is None
            or self._handle is not self._handle.storage
        ):
            return ""
        return sharding_text(value.placement.jax_sharding, len(value.spec.shape))

    @property
    def sharding_type(self) -> ShardingType:
        """Tiled, partial or replicated: the type of `sharding_spec`.

        Raises ShardError if the tensor has no sharding.
        """
        sharding = self._handle.sharding
        if sharding is not None:
            return sharding.type
        text = self.sharding_spec
        if not text:
            raise ShardError(
                "sharding_type needs a tensor with a sharding; this one has none. "
                "Call spmd.mark_sharding(tensor, mesh, partition_spec) first."
            )
        return from_text(text, self.dim()).type

    @property
    def partition_spec(self) -> PartitionSpecLike | None:
        """The partition spec, one entry per dim; None without a sharding."""
        return None if self._handle.sharding is None else self._handle.sharding.partition_spec

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """The shape of the mesh that the tensor is marked over; None without a sharding."""
        return (
            None if self._handle.sharding is None else tuple(self._handle.sharding.mesh.mesh_shape)
        )

    @property
    def global_tensor(self) -> torch.Tensor:
        """The tensor itself, which is the global tensor."""
        return self

    @property
    def local_shards(self) -> list[XLAShard]:
        """CPU copies of the blocks on this process's devices, padding included, by device id.

        Cuts, uploads and waits.

        Raises:
            ShardError: the tensor has no sharding.
        """
        return shards.read_local(shards.sharded_storage(self._handle, "local_shards"))

    def load_local_shards_(self, new_shards: Sequence[XLAShard]) -> "XLAShardedTensor":
        """Replaces the blocks on this process's devices, in place; returns the tensor.

        The whole tensor is never assembled on the host. Does not wait.

        Args:
            new_shards: one for each local device, as `local_shards` returns them: `data` has the
                shape of a stored block, padding included.

        Raises:
            TypeError: `new_shards` is no list of these.
            ShardError: the tensor has no sharding, or is replicated (use `copy_`); a device has no
                shard or two; a block differs from the stored one in shape or dtype; or devices that
                hold the same block get different data.
            RuntimeError: the tensor is a leaf that requires grad, and gradients are recorded.
        """
        storage = shards.sharded_storage(self._handle, "load_local_shards_")
        if self.requires_grad and self.is_leaf and torch.is_grad_enabled():
            raise RuntimeError(
                "a leaf that requires grad can't be written in place while gradients are recorded; "
                "got load_local_shards_ on one. "
                "Call it under torch.no_grad()."
            )
        shards.write_local(storage, new_shards)
        torch.autograd.graph.increment_version(self)
        return self

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        if tensor_contents is not None:
            return f"XLAShardedTensor({tensor_contents})"
        text = repr(self.detach().cpu()).removesuffix(")")
        parts = [text, f"device='{self.device}'"]
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        text = ", ".join(parts) + ")"
        if self._handle.sharding is not None:
            text = f"XLAShardedTensor({text}, sharding={self._handle.sharding.partition_spec})"
        elif self.sharding_spec not in ("", REPLICATED):
            text = f"XLAShardedTensor({text}, sharding='{self.sharding_spec}')"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    def tolist(self) -> Any:
        """The values as nested Python lists. Waits for the device."""
        return self.detach().cpu().tolist()

    @checked()
    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as a numpy array; needs `force=True`, as on any other device."""
        if not force:
            raise TypeError(
                "can't convert an xla tensor to numpy: it is not in host memory. "
                "Use tensor.detach().cpu().numpy() or numpy(force=True)."
            )
        return self.detach().cpu().numpy(force=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Raises BufferError: the next program may take over the tensor's buffers."""
        raise BufferError(
            "DLPack shares memory, and programs may take over the memory of an xla tensor; "
            f"got a tensor of shape {tuple(self.shape)}. "
            "Pass tensor.detach().cpu(), or spmd.to_jax(tensor) to jax."
        )

    def __dlpack_device__(self) -> Any:
        """Raises BufferError, like `__dlpack__`."""
        self.__dlpack__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that the user created (graph leaves) can be deep-copied; "
                "this one has a grad_fn. Use detach() or clone()."
            )
        with torch._C.DisableTorchFunctionSubclass():
            copied: torch.Tensor = wrap(_copy_of(self._handle, memo))
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            else:
                copied.requires_grad_(self.requires_grad)
        copied.__class__ = self.__class__  # it may be a user's subclass
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(attributes_of(self), memo))
        # torch's Parameter does not copy its gradient.
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as torch's own tensors do, with the location "xla:0"; waits for the device.

        Tensors of one storage share it in the file.
        """
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter.__reduce_ex__(self, protocol)
        function, arguments = stored_bytes.reduced(self, self._handle)
        state, cls = self.__getstate__(), getattr(self, "_user_class", torch.Tensor)
        if state is None and cls is torch.Tensor:
            return function, arguments
        return torch._tensor._rebuild_from_type_v2, (function, cls, arguments, state)

    def __getstate__(self) -> dict[str, Any] | None:
        return attributes_of(self) or None

    # torch implements the following in C++, which would not update the handle.

    @property
    def data(self) -> torch.Tensor:
        """A tensor over the same storage, outside autograd and its version counter."""
        return wrap_alias(self._handle)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, XLAShardedTensor):
            raise TypeError(
                f"the data of an xla tensor must be an xla tensor; got one on {new.device}. "
                "Assign new.to('xla')."
            )
        recorder = recorders.current()
        if recorder.require_own is not None:  # in a function that a loop or a branch runs
            recorder.require_own(self)
        with torch._C.DisableTorchFunctionSubclass():
            if new.is_inference() is not self.is_inference():
                # torch's setter refuses a pair that differs in this.
                new._handle.storage.inference = self.is_inference()
                new = wrap_alias(new._handle)
            torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._handle = new._handle
        changes.note(self)
        if self._gradient_sharding is not None:
            self._gradient_sharding.follow(new._handle)

    def data_ptr(self) -> int:
        """A number that is equal for tensors that begin at the same location of one storage.

        No memory lies there: programs compare the number to find tied weights.
        """
        return address(self._handle)

    def untyped_storage(self) -> Any:
        """A stand-in for the storage that all views of a tensor share.

        It has `data_ptr()`, `nbytes()`, `size()` and `device`, and no bytes.
        """
        return DeviceStorage(self._handle.storage)

    def storage(self) -> Any:
        """Raises UnsupportedOpError: torch's typed storage would expose the elements' memory."""
        raise UnsupportedOpError(
            "an xla tensor has no storage whose elements Python can reach; "
            f"got storage() of a tensor of shape {tuple(self.shape)}. "
            "Use untyped_storage().data_ptr() to tell storages apart, or tensor.cpu().storage()."
        )

    def is_shared(self) -> bool:
        """True, as torch says of every tensor that is not in host memory."""
        return True

    def share_memory_(self) -> "XLAShardedTensor":
        """Does nothing, as torch does for every tensor that is not in host memory.

        Another process gets a copy of the tensor.
        """
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd tracks the tensor."""
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> "XLAShardedTensor":
        """As torch's method; from here on, gradients of a marked leaf follow its sharding."""
        with torch._C.DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        changes.note(self)
        if (
            requires_grad
            and self._handle.sharding is not None
            and XLAShardedTensor._on_requires_grad is not None
        ):
            XLAShardedTensor._on_requires_grad(self)
        return self

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> "XLAShardedTensor":
        """The tensor itself: AOTAutograd asks for a gradient of the class that it traced with.

        It traces tensors of the device as plain ones.
        """
        return self


def _copy_of(handle: Handle, memo: dict[Any, Any]) -> Handle:
    """A handle of the same form over a copy of the storage, the same copy for all its views."""
    storage = handle.storage
    key = ("spmd_core storage", id(storage))
    if key not in memo:
        with torch.no_grad():
            memo[key] = wrap(storage).clone()._handle  # type: ignore[attr-defined]
    copied: Handle = memo[key]
    for view in handle.chain() if isinstance(handle, View) else ():
        copied = View(copied, copied.storage, view.link, view.offset)
        copied.sharding = view.sharding
    return copied


# The attributes of a tensor that are this project's or torch's.
_INTERNAL = ("_handle", "_gradient_sharding", "_is_param", "_is_watched")


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user gave a tensor."""
    return {name: a for name, a in tensor.__dict__.items() if name not in _INTERNAL}


def device_tensor(
    t: Any, what: str, *, advice: str = "Move it first: t = t.to('xla')."
) -> XLAShardedTensor:
    """The tensor itself, if it is on device `xla`; `what` names the caller.

    Raises:
        DeviceMismatchError: it is on another device, or not a tensor.
    """
    if not isinstance(t, XLAShardedTensor):
        got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise DeviceMismatchError(f"{what} needs a tensor on device 'xla'; got {got}. {advice}")
    return t


def wrap(handle: Handle) -> XLAShardedTensor:
    """A new tensor over a handle."""
    spec = handle.spec
    # By position, as parsing keyword arguments takes time: class, size, strides, offset, memory
    # format, dtype, layout, device.
    tensor = _new(
        XLAShardedTensor,
        spec.size,
        spec.strides,
        handle.offset,
        None,
        spec.dtype,
        _STRIDED,
        XLA_DEVICE,
    )
    tensor._handle = handle
    return tensor


def wrap_alias(handle: Handle) -> XLAShardedTensor:
    """A new tensor over a handle whose storage other tensors have, too.

    It is an inference tensor if and only if those are, whatever the mode: torch's C++ gives all of
    them one version counter, or none.
    """
    inference = handle.storage.inference
    handle.storage.aliased = True
    if inference is torch.is_inference_mode_enabled():
        return wrap(handle)
    with torch.inference_mode(inference):
        return wrap(handle)


def replace_handle(tensor: XLAShardedTensor, handle: Handle) -> None:
    """Gives a tensor another handle, of any shape and strides, in place: for `t_()` and others."""
    spec = handle.spec
    if tensor._handle.spec.num_elements < spec.num_elements:
        # The kernel checks the metadata against the size of the storage that the tensor was made
        # with; torch's setter replaces that storage, too.
        tensor.data = wrap(handle)
        return
    with torch._C._DisableTorchDispatch():
        _as_strided_.redispatch(_METADATA_KEYS, tensor, spec.size, spec.strides, handle.offset)
    tensor._handle = handle
    changes.note(tensor)


def _rebuild_parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """Unpickles parameters of earlier versions."""
    return torch.nn.Parameter(data.to(XLA_DEVICE), requires_grad)


# A pickle names the public package, wherever this file lies. Set before torch lists the function.
_rebuild_parameter.__module__ = "spmd_core"
torch.serialization.add_safe_globals([_rebuild_parameter])


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a tensor on any device."""
    return tensor._handle.spec if isinstance(tensor, XLAShardedTensor) else Spec.from_tensor(tensor)
