"""The parts of a state, each compared with what was saved of it, and how each gets its values."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmd_core.checkpoint import entries, plain
from spmd_core.checkpoint.entries import OPTIMIZER, Entry, ModuleItems, Named
from spmd_core.checkpoint.plain import KIND, TENSOR, joined
from spmd_core.checkpoint.restoring import Node, Restoration
from spmd_core.errors import CheckpointError
from spmd_core.graph.storage import Storage
from spmd_core.steps.weight_saving import identity
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def plan(
    state: Mapping[str, Any], saved: Mapping[str, Any], restoration: Restoration
) -> dict[str, Any]:
    """Compares a state with a saved one; returns what it will be.

    Args:
        state: the parts by name.
        saved: what was saved of each.
        restoration: gets what is to be done, and what is missing.
    """
    entries.check_names(state)
    modules = entries.modules_of(state)
    names = entries.parameter_names(modules)
    restoration.extra += [name for name in saved if name not in state]
    result = dict(state)
    for name, part in state.items():
        if name not in saved:
            restoration.missing.append(name)
        elif isinstance(part, nn.Module):
            _module(name, part, modules[name], saved[name], restoration)
        else:
            result[name] = _part(name, part, saved[name], names, state, restoration)
    restoration.leave_partly()
    return result


def _part(
    name: str,
    part: Any,
    saved: Any,
    names: Mapping[int, Named],
    state: Mapping[str, Any],
    restoration: Restoration,
) -> Any:
    if isinstance(part, torch.optim.Optimizer):
        by_group = entries.optimizer_names(name, part, names)
        _Optimizer(name, saved, by_group, restoration).into(part)
    elif isinstance(part, torch.Generator):
        random = _value(name, {}, saved, restoration)
        restoration.afterwards.append(lambda: part.set_state(random))
    elif entries.is_stateful(part):
        value = _value(name, part.state_dict(), saved, restoration)
        restoration.afterwards.append(lambda: part.load_state_dict(value))
    elif entries.is_optimizer_state(part) and _is(saved, OPTIMIZER):
        return _Optimizer(name, saved, entries.indexed(part, state), restoration).state_dict(part)
    else:
        if isinstance(part, Mapping) and isinstance(saved, Mapping):
            _compare_keys(name, part, saved, restoration)
        return _value(name, part, saved, restoration)
    return part


def _is(node: Any, kind: str) -> bool:
    return isinstance(node, Mapping) and node.get(KIND) == kind


def nodes(saved: Any) -> Iterator[Node]:
    """All that stands for tensors in a saved state."""
    if isinstance(saved, list):
        for item in saved:
            yield from nodes(item)
    elif isinstance(saved, Mapping):
        if saved.get(KIND) == TENSOR:
            yield saved
        else:
            for item in saved.values():
                yield from nodes(item)


def _compare_keys(
    path: str, part: Mapping[Any, Any], saved: Mapping[str, Any], restoration: Restoration
) -> None:
    """Notes keys that are missing; of a dict of tensors alone also those that are there besides."""
    if KIND in saved:
        return
    restoration.missing += [joined(path, key) for key in part if key not in saved]
    if part and all(isinstance(value, torch.Tensor) for value in part.values()):
        restoration.extra += [joined(path, key) for key in saved if key not in part]


def _value(path: str, current: Any, saved: Any, restoration: Restoration) -> Any:
    """The saved value, whose tensors are the current ones where there are some at their paths."""
    here: dict[str, torch.Tensor] = {}
    plain.encode(path, current, here.setdefault)

    def unpack(path: str, node: Node) -> torch.Tensor:
        tensor = here.get(path)
        if tensor is None:
            dtype = getattr(torch, node["dtype"])
            tensor = restoration.new(node["shape"], dtype, on_device=node["device"] == "xla")
        restoration.fill(path, node, Entry(tensor))
        return tensor

    return plain.decode(path, saved, unpack)


# --- Modules --------------------------------------------------------------------------------------


def _module(
    path: str, module: nn.Module, items: ModuleItems, saved: Any, restoration: Restoration
) -> None:
    if not isinstance(saved, Mapping) or KIND in saved:
        restoration.problems.append(f"no module's state: {path}")
        return
    tensors, others = items
    own = {identity(t) for t in (*module.parameters(), *module.buffers())}
    loaded: dict[str, Any] = {}
    groups: dict[Any, list[str]] = {}
    for name, entry in tensors.items():
        key = identity(entry.tensor), tuple(entry.tensor.shape), entry.row
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        there = [name for name in names if _is(saved.get(name), TENSOR)]
        if not there:
            restoration.missing.append(joined(path, names[0]))
        for name in there:
            entry = tensors[name]
            if identity(entry.tensor) not in own:  # made by a hook of `state_dict`
                tensor = restoration.new(entry.shape, entry.tensor.dtype, like=entry.tensor)
                loaded[name], entry = tensor, Entry(tensor)
            restoration.fill(joined(path, name), saved[name], entry)
    for name, value in others.items():
        if name not in saved:
            restoration.missing.append(joined(path, name))
        else:
            loaded[name] = _value(joined(path, name), value, saved[name], restoration)
    restoration.extra += [
        joined(path, name) for name in saved if name not in tensors and name not in others
    ]
    if loaded:
        restoration.afterwards.append(lambda: module.load_state_dict(loaded, strict=False))


# --- Optimizers -----------------------------------------------------------------------------------


class _Optimizer:
    """The saved state of an optimizer, for one that has the same parameters by name.

    Args:
        path: where it stands.
        saved: what was saved.
        by_group: the names of the parameters here.
        restoration: gets what is to be done.
    """

    def __init__(
        self, path: str, saved: Any, by_group: list[list[Named]], restoration: Restoration
    ) -> None:
        self._path, self._by_group, self._restoration = path, by_group, restoration
        self._saved = saved
        if not _is(saved, OPTIMIZER):
            restoration.problems.append(f"no optimizer's state: {path}")
            self._saved = {"groups": [], "state": {}, "others": [], "top": {}}
            return
        self._saved = saved = self._by_name(saved)
        here = [name for own in by_group for named in own for name in named.names]
        there = [name for group in saved["groups"] for name in group["params"]]
        restoration.missing += [joined(path, name) for name in here if name not in set(there)]
        restoration.extra += [joined(path, name) for name in there if name not in set(here)]
        if len(saved["groups"]) != len(by_group):
            restoration.problems.append(
                f"{len(saved['groups'])} groups of parameters in {path}, for {len(by_group)} here"
            )

    def _by_name(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was saved by positions by the names that are here, or the other way round.

        torch's own rule: the n-th of a group is the n-th of that group.
        """
        here = [[name for named in own for name in named.names] for own in self._by_group]
        there = [group["params"] for group in saved["groups"]]
        if _are_positions(here) == _are_positions(there):
            return saved
        is_stacked = any(named.is_stacked for own in self._by_group for named in own)
        if is_stacked or [*map(len, here)] != [*map(len, there)]:
            self._restoration.problems.append(
                f"by positions on one side, and by names on the other: {self._path}, groups of "
                f"{[*map(len, there)]} parameters for {[*map(len, here)]}; save the optimizer "
                "itself beside its module, or make it of model.named_parameters()"
            )
            return saved
        new = {a: b for old, own in zip(there, here) for a, b in zip(old, own)}
        return {
            **saved,
            "state": {new[name]: values for name, values in saved["state"].items()},
            "shapes": {new[name]: shape for name, shape in saved.get("shapes", {}).items()},
            "groups": [{**group, "params": own} for group, own in zip(saved["groups"], here)],
        }

    def into(self, optimizer: torch.optim.Optimizer) -> None:
        """Plans its state into an optimizer, whose own state may not be born yet."""
        for name, shape in entries.parameter_shapes(optimizer, self._by_group).items():
            before = self._saved.get("shapes", {}).get(name, shape)
            if before != shape:
                self._restoration.problems.append(
                    f"another shape: {joined(self._path, name)}, {before} for {shape}"
                )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = self._state([dict(optimizer.state.get(p) or {}) for p in parameters], parameters)
        groups = self._groups([{} for _ in optimizer.param_groups], optimizer.param_groups)
        self._restoration.afterwards.append(
            lambda: optimizer.load_state_dict(
                {"state": state, "param_groups": groups, **self._top()}
            )
        )

    def state_dict(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict, in whose place the current one is given."""
        count = sum(len(own) for own in self._by_group)
        known = current["state"]
        state = self._state([dict(known.get(i) or {}) for i in range(count)], [None] * count)
        groups = self._groups([{} for _ in current["param_groups"]], current["param_groups"])
        return {"state": state, "param_groups": groups, **self._top()}

    def _top(self) -> dict[str, Any]:
        found: dict[str, Any] = _value(self._path, {}, self._saved["top"], self._restoration)
        return found

    def _groups(
        self, made: list[dict[str, Any]], current: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The groups with the saved options; an option that was not saved stays."""
        start = 0
        for number, (group, own) in enumerate(zip(made, current)):
            group.update((k, v) for k, v in own.items() if k != "params")
            if number < len(self._saved["groups"]):
                path = f"{self._path}.param_groups.{number}"
                options = self._saved["groups"][number]["options"]
                group.update(_value(path, dict(group), options, self._restoration))
            count = len(self._by_group[number])
            group["params"] = [*range(start, start + count)]
            start += count
        return made

    def _state(
        self, current: list[dict[str, Any]], parameters: list[torch.Tensor] | list[None]
    ) -> dict[Any, Any]:
        """The state by index."""
        found: dict[Any, Any] = {}
        there = {name for group in self._saved["groups"] for name in group["params"]}
        names = [named for own in self._by_group for named in own]
        for index, (named, known, parameter) in enumerate(zip(names, current, parameters)):
            saved = [self._saved["state"].get(name) for name in named.names]
            if known and not there.intersection(named.names):
                found[index] = known  # a parameter that the saved run did not have
            if all(values is None for values in saved):
                continue
            if any(values is None for values in saved):
                lacking = [n for n, values in zip(named.names, saved) if values is None]
                self._restoration.missing += [f"{joined(self._path, n)} (state)" for n in lacking]
                continue
            found[index] = {
                slot: self._slot(slot, named, saved, known.get(slot), parameter)
                for slot in saved[0]
            }
        for key, values in self._saved["others"]:
            key = plain.decode(self._path, key, _no_tensor)
            found[key] = _value(joined(self._path, key), {}, values, self._restoration)
        return found

    def _slot(
        self,
        slot: str,
        named: Named,
        saved: list[Any],
        known: Any,
        parameter: torch.Tensor | None,
    ) -> Any:
        """One value of a parameter's state."""
        node = saved[0][slot]
        path = f"{self._path}.{named.names[0]}.{slot}"
        if not _is(node, TENSOR):
            return _value(path, known, node, self._restoration)
        dtype, shape = getattr(torch, node["dtype"]), tuple(node["shape"])
        has_rows = named.is_stacked and len(shape) > 0
        if has_rows:
            shape = (len(named.names), *shape)
        tensor = known if isinstance(known, torch.Tensor) else None
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            # torch keeps the number of steps on the CPU, unless the optimizer is told otherwise.
            like = None if slot == "step" and node["device"] == "cpu" else parameter
            tensor = self._restoration.new(shape, dtype, like=like)
        elif isinstance(tensor, XLAShardedTensor) and not isinstance(tensor._handle, Storage):
            tensor = self._restoration.new(shape, dtype, like=tensor)
        for row, name in enumerate(named.names if has_rows else named.names[:1]):
            at = f"{self._path}.{name}.{slot}"
            self._restoration.fill(at, saved[row][slot], Entry(tensor, row if has_rows else None))
        return tensor


def _are_positions(groups: list[list[str]]) -> bool:
    return all(name.isdecimal() for group in groups for name in group)


def _no_tensor(path: str, node: Node) -> Any:
    raise CheckpointError(f"a key is no tensor; got one at {path!r}. Save the state again.")
