"""Wrap policies, as in torch and FairScale: which modules inside a model become FSDP units."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from spmd_core.arguments import checked

Policy = Callable[..., bool]
"""`policy(module, recurse, unwrapped_params) -> bool`.

Returns whether to visit the children if `recurse` is true, else whether to wrap the module.
`unwrapped_params` is the number of elements of the module's parameters that are in no unit yet.
torch calls the same argument `nonwrapped_numel`; the policies here take either name, and policies
are called by position.
"""

EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
"""What `size_based_auto_wrap_policy` never wraps: containers, which have no forward."""

FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
"""What `size_based_auto_wrap_policy` does not visit: it reads its children's parameters itself."""


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every module that has a forward."""
    return True


@checked(nonwrapped_numel=0)
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


@checked(nonwrapped_numel=0)
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


@checked(min_num_params=0, nonwrapped_numel=0)
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
    """Wraps a module with at least `min_num_params` elements of parameters that are in no unit yet.

    Args:
        module: the module.
        recurse: whether to decide on visiting the children or on wrapping the module.
        unwrapped_params: number of elements of the module's parameters that are in no unit yet.
        min_num_params: the smallest number of elements that makes a unit.
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


@checked()
def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Any,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Replaces each module that the policy selects by `wrapper_cls(child, **kwargs)`.

    Children come first, and a shared module is wrapped once. A module without a forward of its own
    (`nn.ModuleList`) is never wrapped, whatever the policy returns.

    Args:
        module: the root. It is changed in place.
        auto_wrap_policy: a `Policy`, one of torch's functions of the same names, or torch's
            `ModuleWrapPolicy` or `CustomPolicy`; what a `CustomPolicy` returns for a module
            overrides `kwargs`.
        wrapper_cls: makes a unit of a module.
        ignored_modules: are neither wrapped nor visited.
        ignored_params: are not counted.
        only_wrap_children: whether to leave out the root, as its caller wraps it.
        kwargs: for `wrapper_cls`.

    Returns:
        The module or its replacement, and the number of elements of parameters that are in units.

    Raises:
        TypeError: the policy is neither a function nor one of torch's policies.
        ValueError: a module inside is a `wrapper_cls` already.
    """
    if not callable(auto_wrap_policy) and not hasattr(auto_wrap_policy, "_run_policy"):
        raise TypeError(
            "a wrap policy is a function of (module, recurse, unwrapped_params) or one of torch's "
            f"policies; got {type(auto_wrap_policy).__name__}. Write for instance "
            "partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})."
        )
    ignored = set(ignored_modules)
    if isinstance(wrapper_cls, type):
        for name, child in module.named_modules():
            if isinstance(child, wrapper_cls) and child not in ignored:
                raise ValueError(
                    "a wrap policy starts from modules that are not wrapped; "
                    f"got {name or 'the root'!r}, which is a {wrapper_cls.__name__} already. "
                    "Wrap by hand and leave the policy out, or leave the wrapping to the policy."
                )
    if not callable(auto_wrap_policy):
        # This method of torch is private, and the only way to apply a CustomPolicy.
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
    """One traversal of a module tree: wraps as a policy says, and remembers what it visited."""

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
        # Not named_children(), which yields a child only once if it has two names.
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
    """Whether the module defines a forward; containers such as `nn.ModuleList` do not."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
