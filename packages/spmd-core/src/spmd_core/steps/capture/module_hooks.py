"""Hooks of modules: those of all modules, and what a call of a module without hooks never reads."""

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spmd_core.steps.capture import code_names

# Hooks of torch's that run for all modules and all optimizers.
GLOBAL_HOOKS = tuple(
    (name, value)
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, value in vars(sys.modules[module]).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
# What only saving and loading read of a module, and the names by which a step does that.
_SAVED = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
)  # fmt: skip
_SAVES = frozenset({"state_dict", "load_state_dict"})
# By the hooks of a module: which of these get keyword arguments, or are always called.
_OF_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}


def unread(attributes: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """The empty dicts and sets of a module on whose contents no call of it depends.

    A model has thousands of them, and to look at each takes longer than all else that is compared.

    Args:
        attributes: the module's.
        known: the names that the code of a step uses.
    """
    if not (_SAVES.isdisjoint(known) and code_names.DYNAMIC.isdisjoint(known)):
        return
    names = [*_SAVED]
    if not any(hooks for _, hooks in GLOBAL_HOOKS):
        for hooks, others in _OF_HOOKS.items():
            if not attributes.get(hooks, True):  # a call looks for each hook in the others
                names += others
    for name in names:
        if name not in known and not attributes.get(name, True):
            yield name
