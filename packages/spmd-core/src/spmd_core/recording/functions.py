"""Records a function of tensors on stand-ins: its operations become a subgraph of another one.

A loop's body or a branch runs on the device, as often as values there say. So Python calls it once,
on stand-ins: tensors with a spec and a sharding, whose values are leaves without data. Operations
on them are recorded as always, into a graph of their own that no cut sees. Tensors of the enclosing
program that the function closes over become arguments, too: each call of torch in the function gets
a stand-in in their place. So autograd, which records the function as well, ends at stand-ins, and a
write in place to such a tensor reaches its stand-in, where it is found and refused.

The stand-in of a marked tensor begins with its mark, and its gradients get that mark as those of
any marked tensor: what a loop's body computes is split as it is outside, in each iteration.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from spmd_core import source_lines
from spmd_core.errors import ControlFlowError
from spmd_core.graph import recorders
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.strides import is_dense
from spmd_core.graph.subgraphs import StandIn, Subgraph
from spmd_core.graph.values import Entry, OpResult, Spec, Value, origin_of, take_serial
from spmd_core.ops.kernels.traits import SAME
from spmd_core.program.leaves import host_placement
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.recording import positions
from spmd_core.recording.calls import known
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap

# The innermost hooks for saved tensors, or None. Under a release without the function, recordings
# always have hooks of their own.
_top_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: True
)
# What holds no tensors.
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
# What reads the attribute `grad`.
_get_gradient: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]


@dataclass(frozen=True)
class Captured:
    """A tensor of the enclosing program that a function closes over.

    Attributes:
        tensor: the tensor.
        stand_in: what the function got in its place; the tensor itself if no call of torch read it.
        parameter: the value of the stand-in before its mark.
    """

    tensor: XLAShardedTensor
    stand_in: XLAShardedTensor
    parameter: Value


class FunctionRecording:
    """One recording of a function.

    Attributes:
        what: the function, in errors: "the function of a scan".
        captured: the tensors that it closes over, in the order of their first use.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._captured: dict[int, Captured] = {}
        self._stand_ins: list[tuple[XLAShardedTensor, Storage, str]] = []
        # Storages whose value is a leaf, which tells nothing of where it was made.
        self._own: set[Storage] = set()
        self._start = take_serial()
        self._follows_autograd = torch.is_grad_enabled()

    @property
    def captured(self) -> list[Captured]:
        return [*self._captured.values()]

    def argument(
        self,
        spec: Spec,
        sharding: Sharding | None,
        *,
        requires_grad: bool = False,
        name: str = "an argument",
    ) -> tuple[XLAShardedTensor, Value]:
        """A stand-in for an argument, and its value before its mark. Call it inside of `active`.

        Args:
            spec: of the stand-in; strides that leave gaps become contiguous.
            sharding: its mark; None for none.
            requires_grad: whether autograd follows it.
            name: for errors about writes to it; "" if the function may write to it.
        """
        if not is_dense(spec.shape, spec.strides):
            spec = spec.logical
        with lock:
            leaf = Storage.of_leaf(spec, StandIn(self.what, self._start), host_placement())
            parameter = leaf.value
            storage = leaf
            if sharding is not None:
                storage = Storage(_marked(parameter, sharding), spec)
                storage.sharding = sharding
            self._own.add(storage)
            tensor = wrap(storage)
        if requires_grad:
            with torch._C.DisableTorchFunction():  # as in `check_writes`
                tensor.requires_grad_()
        self._stand_ins.append((tensor, storage, name))
        return tensor, parameter

    def inside(self, tensor: Any) -> Any:
        """The stand-in of a tensor that the function closes over; anything else as it is."""
        if not isinstance(tensor, XLAShardedTensor) or self.is_own(tensor):
            return tensor
        if ~id(tensor) in self._captured:
            return tensor
        found = self._captured.get(id(tensor))
        if found is None:
            refuse_tangent(tensor)
            handle = tensor._handle
            stand_in, parameter = self.argument(
                handle.spec,
                handle.sharding,
                requires_grad=tensor.requires_grad and self._follows_autograd,
                name="a tensor from outside",
            )
            found = self._captured[id(tensor)] = Captured(tensor, stand_in, parameter)
        return found.stand_in

    def is_own(self, tensor: XLAShardedTensor) -> bool:
        """Whether the function has made a tensor, or got it as an argument."""
        storage = tensor._handle.storage
        value = storage.value
        if storage in self._own:
            return True
        if isinstance(value.data, StandIn):  # of a function in this one
            return value.data.start > self._start
        return value.data is None and (value.parent or value).serial > self._start

    def capture(self, tensor: XLAShardedTensor) -> None:
        """Notes a tensor that the function reads itself, by no call of torch, as an argument."""
        with lock:
            value = read(tensor._handle)
        # Apart from its stand-in, which other calls may have got.
        self._captured.setdefault(~id(tensor), Captured(tensor, tensor, value))

    def note(self, results: Any) -> None:
        """Notes tensors that the function has made, or got from a call of torch."""
        if isinstance(results, XLAShardedTensor):
            self._own.add(results._handle.storage)
        elif results is not None and not isinstance(results, _PLAIN):
            for result in pytree.tree_leaves(results):
                if isinstance(result, XLAShardedTensor):
                    self._own.add(result._handle.storage)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this thread records the function."""
        around, _thread.current = _thread.current, self
        try:
            with (
                recorders.recording_inside(self.what, self._require_own),
                _hooks_of_its_own(),
                _Substitution(self),
            ):
                yield
        finally:
            _thread.current = around

    def _require_own(self, tensor: XLAShardedTensor) -> None:
        if not self.is_own(tensor):
            raise self._refused_write("a tensor from outside", tensor)

    def _refused_write(self, name: str, tensor: XLAShardedTensor) -> ControlFlowError:
        return ControlFlowError(
            f"{self.what} computes new tensors, as its writes would be lost between runs; "
            f"got a write in place to {name}, of {tensor._handle.spec!r}. "
            "Return the new value, or write to a clone()."
        )

    def check_writes(self) -> None:
        """Raises ControlFlowError if the function has written to an argument, or to its `grad`."""
        with torch._C.DisableTorchFunction():  # else each attribute is a call for `_Substitution`
            for tensor, storage, name in self._stand_ins:
                if tensor.is_leaf and tensor.grad is not None:
                    raise ControlFlowError(
                        f"{self.what} returns what it computes, and backward() adds to the grad "
                        f"of tensors; got one for {name or 'an argument'}, of "
                        f"{tensor._handle.spec!r}. "
                        "Call torch.autograd.grad, and return the gradients or carry their sum."
                    )
                # `set_`, `t_`, `resize_` and `.data =` give a tensor another handle.
                if name and (storage.version or tensor._handle is not storage):
                    raise self._refused_write(name, tensor)

    def close(self) -> "list[weakref.ref[Storage]]":
        """Forgets the tensors of the function, which has recorded all that it will.

        Returns:
            References to their storages.
        """
        made = [weakref.ref(x) for x in self._own if self._has_made(x.value)]
        self._captured.clear()
        self._stand_ins.clear()
        self._own.clear()
        return made

    def _has_made(self, value: Value) -> bool:
        """Whether a value is a stand-in of this function, or computed by it."""
        if value.data is not None:
            return isinstance(value.data, StandIn) and value.data.start == self._start
        return (value.parent or value).serial > self._start

    def own_nodes(
        self,
        values: Sequence[Value],
        known: Sequence[Value] = (),
        replaced: Mapping[Value, Value] = MappingProxyType({}),
    ) -> list[Value]:
        """The operations of the function that values depend on, in the order of recording.

        Args:
            values: the values.
            known: values whose operations are left out, unless another one needs them.
            replaced: for values the others that are read in their place.
        """
        stop = set(known)
        found: dict[Value, None] = {}
        pending = [value for value in values if value not in stop]
        while pending:
            value = pending.pop()
            value = replaced.get(value, value)
            node = value.parent or value
            if node in found or not self.is_recorded(node):
                continue
            found[node] = None
            pending += [x for x in node.inputs if x not in stop]
        return sorted(found, key=lambda node: node.serial)

    def is_recorded(self, node: Value) -> bool:
        """Whether an operation was recorded for the function, and not before."""
        return node.data is None and node.serial > self._start

    def subgraph(
        self,
        parameters: Sequence[Value],
        outputs: Sequence[Value],
        replaced: Mapping[Value, Value] = MappingProxyType({}),
    ) -> tuple[Subgraph, list[Value], list[Any]]:
        """What computes some values from others.

        Args:
            parameters: those that are given.
            outputs: those that are computed.
            replaced: for values the others that are read in their place.

        Returns:
            The subgraph; the values from outside that are its last parameters, behind those given;
            and its scalar inputs.
        """
        nodes = self.own_nodes(outputs, parameters, replaced)
        numbers = {value: -i - 1 for i, value in enumerate(parameters)}
        outer: list[Value] = []
        recorded = []
        count = 0

        def number(value: Value) -> int:
            value = replaced.get(value, value)
            if value not in numbers and isinstance(value, OpResult) and value.parent in first:
                return first[value.parent] + value.index
            if value not in numbers:
                outer.append(value)
                numbers[value] = -len(parameters) - len(outer)
            return numbers[value]

        first: dict[Value, int] = {}
        for node in nodes:
            inputs = tuple(number(value) for value in node.inputs)
            recorded.append((node.entry, inputs))
            first[node] = count
            numbers.setdefault(node, count)
            count += len(node.entry.outs)
        results = tuple(number(value) for value in outputs)
        specs = tuple(value.spec.logical for value in (*parameters, *outer))
        origins = tuple(map(origin_of, nodes)) if source_lines.is_used() else ()
        scalars = [number for node in nodes for number in node.numbers]
        return Subgraph(specs, tuple(recorded), results, origins), outer, scalars


class _ThreadState(threading.local):
    """What a thread records.

    Attributes:
        current: the innermost function; None outside of any.
    """

    current: FunctionRecording | None = None


# The function that this thread records.
# Guarded by: thread-local storage. Cleared by: the end of the recording.
_thread = _ThreadState()


def inside(tensor: XLAShardedTensor) -> XLAShardedTensor:
    """What the function that this thread records has in place of a tensor; else the tensor."""
    if _thread.current is None:
        return tensor
    found: XLAShardedTensor = _thread.current.inside(tensor)
    return found


def closed_over() -> list[XLAShardedTensor]:
    """The tensors from outside that the function which this thread records has read so far."""
    return [] if _thread.current is None else [x.tensor for x in _thread.current.captured]


def refuse_tangent(tensor: torch.Tensor) -> None:
    """Raises ControlFlowError for a tensor with a tangent of forward-mode autograd."""
    if unpack_dual(tensor).tangent is not None:
        raise ControlFlowError(
            "loops and branches have gradients, and no derivatives in forward mode; got a tensor "
            f"of shape {tuple(tensor.shape)} with a tangent. Call torch.autograd.grad, or pass "
            "the primal: torch.autograd.forward_ad.unpack_dual(t).primal."
        )


def _hooks_of_its_own() -> AbstractContextManager[Any]:
    """Keeps stand-ins from hooks for saved tensors, such as those of a checkpoint around a loop.

    These get the loop's operands. Only where there are such hooks, as autograd does not notice
    writes in place to tensors that hooks have saved.
    """
    if not _top_hooks(True):
        return nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class _Substitution(TorchFunctionMode):
    """Gives each call of torch stand-ins in place of tensors from outside."""

    def __init__(self, recording: FunctionRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _thread.current is not self._recording:  # the mode of a function in this one calls
            return func(*args, **kwargs)
        if func == _get_gradient and not self._recording.is_own(args[0]):
            # A tensor from outside has its gradient, of which the function gets a stand-in.
            return self._recording.inside(func(*args))
        args = [self._inside(x) for x in args]
        kwargs = {name: self._inside(x) for name, x in kwargs.items()}
        if func is torch.Tensor.__getitem__:
            func = positions.get_item
        results = func(*args, **kwargs)
        self._recording.note(results)
        return results

    def _inside(self, argument: Any) -> Any:
        """An argument with stand-ins in it. Most hold no others, and pytrees take longer."""
        if isinstance(argument, torch.Tensor):
            return self._recording.inside(argument)
        if argument is None or isinstance(argument, _PLAIN):
            return argument
        return pytree.tree_map(self._recording.inside, argument)


def _marked(value: Value, sharding: Sharding) -> Value:
    """A value with a mark, as `mark_sharding` records it."""
    entry = known(
        (MARK_SHARDING, value.spec, sharding, None, None),
        lambda: Entry(
            MARK_SHARDING,
            lambda context, inputs, numbers: inputs,
            (value.spec,),
            sharding=sharding,
            traits=SAME,
        ),
    )
    return Value(entry, (value,), ())
