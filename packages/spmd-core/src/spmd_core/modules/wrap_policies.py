"""Which modules become units of their own: policies, as torch and FairScale have them, and the walk that asks them."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

Policy = Callable[..., bool]
"""`policy(module, recurse, unwrapped_params) -> bool`: with `recurse`, whether to look at the children, else whether to wrap the module.

`unwrapped_params` counts the elements of the module's parameters that are in no unit yet. torch calls the same argument `nonwrapped_numel`; the
policies here take either name, and policies are called by position.
"""

EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
"""What `size_based_auto_wrap_policy` never wraps: containers, which have no forward."""

FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
"""What `size_based_auto_wrap_policy` does not look into: its forward reads the parameters of its children itself."""


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every module that has a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    lambda_fn: Callable[[nn.Module], bool] = lambda module: False,
    *,
    nonwrapped_numel: int | None = None,
) -> bool:
    """Wraps the modules for which `lambda_fn(module)` is true."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    transformer_layer_cls: Collection[type[nn.Module]] = (),
    *,
    nonwrapped_numel: int | None = None,
) -> bool:
    """Wraps the modules of the given classes, each block of a transformer for instance.

    Example:
        >>> from functools import partial
        >>> policy = partial(
        ...     transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ... )
        >>> policy(nn.TransformerEncoderLayer(8, 2), False, 0), policy(nn.Linear(8, 8), False, 0)
        (True, False)
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
    *,
    nonwrapped_numel: int | None = None,
) -> bool:
    """Wraps a module as soon as `min_num_params` elements of parameters have come together in it.

    Args:
        module: the module.
        recurse: whether to look at the children, or to decide on the module.
        unwrapped_params: elements of the module's parameters that are in no unit yet.
        min_num_params: how many of them make a unit.
        force_leaf_modules: classes whose children are never wrapped; None: `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes that are never wrapped; None: `EXCLUDE_WRAP_MODULES`.
        nonwrapped_numel: torch's name for `unwrapped_params`.
    """
    num_params = unwrapped_params if nonwrapped_numel is None else nonwrapped_numel
    leaves = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return num_params >= min_num_params and not isinstance(
        module, tuple(leaves if recurse else excluded)
    )


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Any,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Puts `wrapper_cls(child, **kwargs)` in the place of each module that the policy names, children first. A shared module is wrapped once.

    A module without a forward of its own (`nn.ModuleList`) is never wrapped, whatever the policy says.

    Args:
        module: the root. It is changed in place.
        auto_wrap_policy: a `Policy`, one of torch's functions of the same names, or torch's `ModuleWrapPolicy` or `CustomPolicy`; what a
            `CustomPolicy` returns for a module goes over `kwargs`.
        wrapper_cls: makes a unit of a module.
        ignored_modules: are neither wrapped nor looked into.
        ignored_params: do not count.
        only_wrap_children: leave the root itself, as its caller wraps it.
        kwargs: for `wrapper_cls`.

    Returns:
        The module, or what stands in its place; and how many elements of parameters are in units.

    Raises:
        TypeError: the policy can neither be called nor run.
        ValueError: a module inside is a `wrapper_cls` already.
    """
    if not callable(auto_wrap_policy) and not hasattr(auto_wrap_policy, "_run_policy"):
        raise TypeError(
            f"a wrap policy is a function of (module, recurse, unwrapped_params) or one of torch's policies; got "
            f"{type(auto_wrap_policy).__name__}. Write for instance partial(transformer_auto_wrap_policy, transformer_layer_cls={{Block}})."
        )
    ignored = set(ignored_modules)
    if isinstance(wrapper_cls, type):
        for name, child in module.named_modules():
            if isinstance(child, wrapper_cls) and child not in ignored:
                raise ValueError(
                    f"a wrap policy starts from modules that are not wrapped; got {name or 'the root'!r}, which is a {wrapper_cls.__name__} "
                    "already. Wrap by hand and leave the policy out, or leave the wrapping to the policy."
                )
    if not callable(auto_wrap_policy):
        # torch's name for it is private, and the only way to ask a CustomPolicy.
        targets = auto_wrap_policy._run_policy(module, ignored, kwargs)
        walk = _Walk(
            lambda child, recurse, _: recurse or child in targets,
            lambda child: wrapper_cls(child, **targets[child]),
            ignored,
            ignored_params,
        )
    else:
        walk = _Walk(
            auto_wrap_policy, lambda child: wrapper_cls(child, **kwargs), ignored, ignored_params
        )
    return walk.visit(module, only_children=only_wrap_children)


class _Walk:
    def __init__(
        self,
        policy: Policy,
        wrap: Callable[[nn.Module], nn.Module],
        ignored: set[nn.Module],
        ignored_params: Iterable[nn.Parameter],
    ) -> None:
        self.policy, self.wrap, self.ignored = policy, wrap, ignored
        self.ignored_params = {id(p) for p in ignored_params}
        self.done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(self, module: nn.Module, *, only_children: bool = False) -> tuple[nn.Module, int]:
        if module not in self.done:
            self.done[module] = self._visit(module, only_children)
        return self.done[module]

    def _visit(self, module: nn.Module, only_children: bool) -> tuple[nn.Module, int]:
        num_params = sum(p.numel() for p in module.parameters() if id(p) not in self.ignored_params)
        if not self.policy(module, True, num_params):
            return module, 0
        num_wrapped = 0
        # Not named_children(), which names a child once that stands in two places.
        for name, child in module._modules.items():
            if child is not None and child not in self.ignored:
                replacement, found = self.visit(child)
                module._modules[name] = replacement
                num_wrapped += found
        if (
            not only_children
            and has_forward(module)
            and self.policy(module, False, num_params - num_wrapped)
        ):
            return self.wrap(module), num_params
        return module, num_wrapped


def has_forward(module: nn.Module) -> bool:
    """Whether the module's class defines what it computes; containers such as `nn.ModuleList` do not."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
