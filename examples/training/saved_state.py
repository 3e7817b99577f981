"""Checks that a saved run has the structure of the parts that load it; an error names the entry.

It compares names, kinds of values and shapes of tensors, before anything is changed.
"""

from collections.abc import Mapping
from typing import Any

import torch


class StateError(ValueError):
    """An entry of a saved run is not as it must be; the text names it."""


def check_run(saved: Any) -> None:
    """Checks the entries of a saved run, but not those of its parts.

    Raises:
        StateError: one is missing or of another kind.
    """
    kinds = {"step": int, "config": dict, "data": str, "random": torch.Tensor, "parts": dict}
    for name, kind in kinds.items():
        _check_kind(name, _entry(saved, name, ""), kind)
    if saved["step"] < 0:
        raise StateError(f"step must be at least 0; got {saved['step']}")
    _check_names("config", saved["config"])
    _check_names("parts", saved["parts"])
    try:
        torch.Generator().set_state(saved["random"])
    except (RuntimeError, TypeError) as error:
        raise StateError(f"random must be the state of torch's generator: {error}") from error


def check_parts(saved: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Checks the saved parts against those that shall take them.

    Raises:
        StateError: an entry is missing, or of another kind or shape.
    """
    for name, part in parts.items():
        state = _entry(saved["parts"], name, "parts")
        place = f"parts.{name}"
        if isinstance(part, torch.nn.Module):
            _check_alike(place, state, part.state_dict())
            unknown = sorted(state.keys() - part.state_dict().keys())
            if unknown:
                raise StateError(f"{place}.{unknown[0]} is nothing that this run has")
        elif isinstance(part, torch.optim.Optimizer):
            _check_optimizer(place, state, part, step=saved["step"])
        elif isinstance(part, torch.optim.lr_scheduler.LRScheduler):
            _check_alike(place, state, part.state_dict(), but=_of_releases)
            if state["last_epoch"] < 0:
                raise StateError(
                    f"{place}.last_epoch must be at least 0; got {state['last_epoch']}"
                )


def _of_releases(name: str) -> bool:
    """Whether torch's releases differ in having this entry of a schedule."""
    return name.startswith("_") and name not in ("_step_count", "_last_lr")


def _check_optimizer(
    place: str, state: Any, optimizer: torch.optim.Optimizer, *, step: int
) -> None:
    expected = optimizer.state_dict()
    groups = _entry(state, "param_groups", place)
    _check_alike(f"{place}.param_groups", groups, expected["param_groups"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = _entry(state, "state", place)
    _check_kind(f"{place}.state", found, dict)
    keeps_state = bool(optimizer.defaults.get("momentum", True))
    if step and parameters and keeps_state and not found:
        raise StateError(
            f"{place}.state must have what {step} steps have gathered; got no parameter's"
        )
    known: frozenset[Any] | None = None
    for index, values in found.items():
        entry = f"{place}.state.{index}"
        if type(index) is not int or not 0 <= index < len(parameters):
            raise StateError(f"{entry} is of no parameter; the optimizer has {len(parameters)}")
        _check_names(entry, values)
        names = frozenset(values)
        if known is not None and names != known:
            raise StateError(
                f"{entry} must have the entries of the others, {_listed(known)}; got "
                f"{_listed(names)}"
            )
        known = names
        shape = tuple(parameters[index].shape)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and tuple(value.shape) not in (shape, (), (1,)):
                raise StateError(
                    f"{entry}.{name} must have the parameter's shape {list(shape)}; got "
                    f"{list(value.shape)}"
                )


def _check_alike(place: str, state: Any, expected: Any, *, but: Any = lambda name: False) -> None:
    """Checks that a state has the entries of another, of their kinds and shapes."""
    if isinstance(expected, Mapping):
        _check_names(place, state)
        for name, value in expected.items():
            if name in state or not but(name):
                _check_alike(f"{place}.{name}", _entry(state, name, place), value, but=but)
    elif isinstance(expected, list | tuple):
        _check_kind(place, state, list | tuple)
        if len(state) != len(expected):
            raise StateError(f"{place} must have {len(expected)} items; got {len(state)}")
        for i, value in enumerate(expected):
            _check_alike(f"{place}.{i}", state[i], value, but=but)
    elif isinstance(expected, torch.Tensor):
        _check_kind(place, state, torch.Tensor)
        if state.shape != expected.shape:
            raise StateError(
                f"{place} must have the shape {list(expected.shape)}; got {list(state.shape)}"
            )
        if state.dtype != expected.dtype:
            raise StateError(f"{place} must be of {expected.dtype}; got {state.dtype}")
    elif isinstance(expected, bool):
        _check_kind(place, state, bool)
    elif isinstance(expected, int | float):
        _check_kind(place, state, int | float)


def _entry(state: Any, name: Any, place: str) -> Any:
    full = f"{place}.{name}" if place else str(name)
    if not isinstance(state, Mapping):
        raise StateError(f"{place or 'the file'} must be a dict; got {_kind(state)}")
    if name not in state:
        raise StateError(f"{full} is missing")
    return state[name]


def _check_kind(place: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(sorted(k.__name__ for k in getattr(kind, "__args__", (kind,))))
        raise StateError(f"{place} must be of type {names}; got {_kind(value)}")


def _check_names(place: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise StateError(f"{place} must be a dict whose keys are names; got {_kind(value)}")


def _kind(value: Any) -> str:
    return type(value).__name__


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "none"
