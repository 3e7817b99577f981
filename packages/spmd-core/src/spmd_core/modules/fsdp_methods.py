"""The methods that torch's `FSDPModule` adds to a module, for the units of `fully_shard`.

A tensor here is the whole one, and the compiler places gathers and reductions. So most of these
methods, which say when a process communicates, have nothing to change: the values are the same with
and without. Those that would change values are refused, with what to write instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from spmd_core.errors import UnsupportedOpError, WrapError
from spmd_core.modules.fsdp_unit import Unit, unit_of


class Handle:
    """What `unshard(async_op=True)` returns: there is nothing to wait for."""

    def wait(self) -> None:
        """Returns at once."""


class FsdpMethods:
    """The methods of one unit; its module has each as an attribute.

    Attributes:
        module: the unit's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    # --- What changes something -------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets `fully_shard`'s argument of that name from the next forward on."""
        _require_bool("set_reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    # --- What says when to communicate, which the compiler decides --------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing: gradients that one program adds up are reduced once.

        See `config.reduce_gradients_once`.
        """
        _require_bool("set_requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Changes nothing, as `set_requires_gradient_sync`."""
        _require_bool("set_requires_all_reduce", requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing, as `set_requires_gradient_sync`; FSDP1's and DDP's method."""
        yield

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: a backward leaves nothing behind for the next one."""
        _require_bool("set_is_last_backward", is_last_backward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing: no parameter stays gathered after backward."""
        _require_bool("set_reshard_after_backward", reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Changes nothing: backward gathers the parameters that it reads."""
        _require_bool("set_unshard_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Changes nothing: XLA's scheduler begins gathers early."""
        _require_units("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Changes nothing: XLA's scheduler begins gathers early."""
        _require_units("set_modules_to_backward_prefetch", modules)

    def unshard(self, async_op: bool = False) -> Handle | None:
        """Changes nothing: a parameter is the whole tensor, inside of forward and outside."""
        return Handle() if async_op else None

    def reshard(self) -> None:
        """Changes nothing, as `unshard`."""

    def reset_iter_state(self) -> None:
        """Changes nothing: a forward or backward that raised leaves no state behind."""

    def set_post_optim_event(self, event: Any) -> None:
        """Changes nothing: a program reads the parameters that the update has written."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Changes nothing: a parameter has one address, gathered or not."""
        _require_bool("set_keep_unsharded_storage", keep)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Changes nothing: a backward leaves nothing to finalize."""
        _require_bool("set_manual_backward_finalization", enabled)

    def finalize_backward(self, *, async_op: bool = False) -> Handle | None:
        """Changes nothing, as `set_manual_backward_finalization`."""
        return Handle() if async_op else None

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Changes nothing: reductions are sums."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Changes nothing: the compiler plans memory."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Changes nothing: the compiler plans memory."""

    # --- What would change values -----------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Takes 1, as gradients are sums. Raises UnsupportedOpError for other factors."""
        if factor != 1:
            _refuse(
                f"set_gradient_divide_factor({factor!r})",
                "a loss is that of the whole batch, so its gradients are divided by nothing",
                f"Divide the loss: (loss / {factor!r}).backward().",
            )

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """As `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Takes False: one program uses the same parameters on all devices."""
        if reduce_scatter_unused_params:
            _refuse(
                "set_reduce_scatter_unused_params(True)",
                "the gradient of a parameter that a backward does not reach stays None",
                "Leave it out; write parameter.grad = torch.zeros_like(parameter) for zeros.",
            )

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        """Raises UnsupportedOpError."""
        _refuse(
            "set_all_reduce_hook",
            "the partitioner reduces gradients inside of the program",
            "Register the hook on parameters: "
            "parameter.register_post_accumulate_grad_hook(lambda p: hook(p.grad)).",
        )

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Raises UnsupportedOpError."""
        _refuse_collectives("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Raises UnsupportedOpError."""
        _refuse_collectives("set_custom_reduce_scatter")

    def set_separate_reduce_scatter_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOpError."""
        _refuse_collectives("set_separate_reduce_scatter_group")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raises UnsupportedOpError."""
        _refuse_collectives("set_symm_mem_for_comm")

    def _units(self, recurse: bool) -> list[Unit]:
        modules = self.module.modules() if recurse else [self.module]
        return [unit for m in modules if (unit := unit_of(m)) is not None]


NAMES = tuple(name for name in vars(FsdpMethods) if not name.startswith("_"))


def install(module: nn.Module) -> None:
    """Gives a unit's module the methods, but those whose names its class has."""
    methods = FsdpMethods(module)
    for name in NAMES:
        if not hasattr(type(module), name):
            module.__dict__[name] = getattr(methods, name)


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False; got {value!r}. Write {name}(True).")


def _require_units(name: str, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module) or unit_of(module) is None:
            raise WrapError(
                f"{name} takes a list of units; got a {type(module).__name__} that is none. "
                "Call fully_shard(module, mesh) first."
            )


def _refuse(what: str, why: str, instead: str) -> NoReturn:
    raise UnsupportedOpError(f"{why}; got {what}. {instead}")


def _refuse_collectives(what: str) -> NoReturn:
    _refuse(
        what,
        "the partitioner puts the collectives into the program",
        "Leave the call out; spmd.config.compiler_options has XLA's options for them.",
    )
