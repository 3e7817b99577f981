"""The tensors of a state by name: those of modules, of optimizers, and in structures.

A pipeline's stacked parameters have the names of the plain model, one for each row. The state of an
optimizer goes by the names of its parameters, and so fits a model with other parameters beside
them, in another order, or stacked in another way.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spmd_core.checkpoint import plain
from spmd_core.checkpoint.plain import KIND, TENSOR, joined
from spmd_core.errors import CheckpointError
from spmd_core.modules.pipeline import Pipeline
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.weight_saving import identity
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Entry:
    """A tensor that has a name of its own, or a row of one.

    Attributes:
        tensor: on any device.
        row: its position in the tensor's first dim; None: the whole.
    """

    tensor: torch.Tensor
    row: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what has the name."""
        return tuple(self.tensor.shape if self.row is None else self.tensor.shape[1:])


@dataclass
class Arrays:
    """The arrays of a state, each once, by name.

    Attributes:
        entries: what each one is; names are paths in the state, joined by dots.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    _names: dict[Any, str] = field(default_factory=dict)

    def pack(self, path: str, tensor: torch.Tensor, row: int | None = None) -> dict[str, Any]:
        """What stands for a tensor in JSON; a tensor that has a name already keeps that."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            what = "of device meta" if tensor.is_meta else f"of layout {tensor.layout}"
            raise CheckpointError(
                f"a checkpoint holds dense tensors with values; got one {what} at {path!r}. "
                "Convert it first, for instance by tensor.to_dense() or module.to_empty()."
            )
        if "/" in path:  # "a/c" would lie among the chunks of "a"
            raise CheckpointError(
                f"names of tensors have no slash, which is a folder's; got {path!r}. Rename that "
                "key of the state."
            )
        entry = Entry(tensor, row)
        name = self._names.setdefault((identity(tensor), tuple(tensor.shape), row), path)
        if self.entries.setdefault(name, entry) is not entry and name == path:
            known = self.entries[name]
            if identity(known.tensor) != identity(tensor) or known.row != row:
                raise CheckpointError(
                    "each tensor of a state has a name of its own, the keys that lead to it joined "
                    f"by dots; got two for {path!r}. Rename one of the keys."
                )
        return {
            KIND: TENSOR,
            "name": name,
            "shape": list(entry.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.type,
            "sharding": _sharding(entry),
        }


def _sharding(entry: Entry) -> str:
    """How a tensor is split, for those who read the checkpoint; empty where nothing is said."""
    sharding = entry.tensor.sharding if isinstance(entry.tensor, XLAShardedTensor) else None
    return "" if sharding is None else _sharding_text(sharding, entry.row is not None)


@functools.lru_cache(maxsize=1024)  # each tensor of each save asks
def _sharding_text(sharding: Sharding, is_row: bool) -> str:
    return f"{sharding.partition_spec[is_row:]} on {sharding.mesh}"


def packed(state: Mapping[str, Any]) -> tuple[dict[str, Any], Arrays]:
    """A state as JSON, with its arrays beside it.

    Raises:
        CheckpointError: a part holds what a checkpoint cannot hold.
    """
    check_names(state)
    arrays = Arrays()
    modules = modules_of(state)
    names = parameter_names(modules)
    parts = {}
    for name, part in state.items():
        parts[name] = (
            _module(name, modules[name], arrays)
            if name in modules
            else _part(name, part, arrays, names, state)
        )
    return parts, arrays


def _part(
    name: str, part: Any, arrays: Arrays, names: "dict[int, Named]", state: Mapping[str, Any]
) -> Any:
    if isinstance(part, torch.optim.Optimizer):
        return _optimizer(name, part, arrays, names)
    if isinstance(part, torch.Generator):
        return plain.encode(name, part.get_state(), arrays.pack)
    if is_stateful(part):
        return plain.encode(name, part.state_dict(), arrays.pack)
    if is_optimizer_state(part):
        return _optimizer_state(name, part, arrays, indexed(part, state))
    return plain.encode(name, part, arrays.pack)


def check_names(state: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a state that is no dict, or whose parts have other names."""
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            "a state is a dict of parts by name, such as {'model': model, 'optimizer': optimizer}; "
            f"got {'an empty one' if isinstance(state, Mapping) else type(state).__name__}. "
            "Pass such a dict."
        )
    for name in state:
        if not isinstance(name, str) or not name.isidentifier():
            raise CheckpointError(
                "the parts of a state have names like those of Python's variables; got "
                f"{name!r}. Rename it: no dots, no slashes."
            )


def is_stateful(part: Any) -> bool:
    """Whether an object saves and loads its own state."""
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


# --- Modules --------------------------------------------------------------------------------------


ModuleItems = tuple[dict[str, Entry], dict[str, Any]]
"""A module's parameters and persistent buffers by name, and what else its state dict has."""


def modules_of(state: Mapping[str, Any]) -> dict[str, ModuleItems]:
    """What the modules of a state have, by the part's name."""
    return {name: module_items(part) for name, part in state.items() if isinstance(part, nn.Module)}


def module_items(module: nn.Module) -> ModuleItems:
    """What a module has."""
    rows = _rows(module)
    tensors: dict[str, Entry] = {}
    others: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if "/" in name:
            raise CheckpointError(
                f"names of tensors have no slash, which is a folder's; got {name!r} of a "
                f"{type(module).__name__}. Rename that module or parameter."
            )
        if isinstance(value, torch.Tensor):
            tensors[name] = rows.get(name) or Entry(value)
        else:
            others[name] = value
    return tensors, others


def _rows(module: nn.Module) -> dict[str, Entry]:
    """The plain model's names of the rows of stacked tensors."""
    found: dict[str, Entry] = {}
    for path, pipeline in module.named_modules():
        if not isinstance(pipeline, Pipeline):
            continue
        prefix = path.removesuffix("0")  # the one module in the list of blocks
        stacking = pipeline.stacking
        for slot, block in enumerate(pipeline.slots):
            for name, tensor in block.state_dict(keep_vars=True).items():
                for stage in range(stacking.num_stages):
                    index = stacking.block_index(slot, stage)
                    found[f"{prefix}{index}.{name}"] = Entry(tensor, stage)
    return found


def _module(path: str, items: ModuleItems, arrays: Arrays) -> dict[str, Any]:
    tensors, others = items
    made = {n: arrays.pack(joined(path, n), e.tensor, e.row) for n, e in tensors.items()}
    return made | {n: plain.encode(joined(path, n), v, arrays.pack) for n, v in others.items()}


# --- Optimizers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """The names of a parameter.

    Attributes:
        names: one; of a stacked parameter one for each row.
        is_stacked: whether it is one.
    """

    names: tuple[str, ...]
    is_stacked: bool = False


def parameter_names(modules: Mapping[str, ModuleItems]) -> dict[int, Named]:
    """The names of all parameters of modules, by their ids.

    Args:
        modules: what each part has that is one.
    """
    found: dict[int, Named] = {}
    stacked: dict[int, dict[int, str]] = {}
    for part, (tensors, _) in modules.items():
        for name, entry in tensors.items():
            if entry.row is None:
                found.setdefault(id(entry.tensor), Named((f"{part}.{name}",)))
            else:
                rows = stacked.setdefault(id(entry.tensor), {})
                rows.setdefault(entry.row, f"{part}.{name}")
    for key, rows in stacked.items():
        found[key] = Named(tuple(rows[i] for i in sorted(rows)), is_stacked=True)
    return found


def optimizer_names(
    path: str, optimizer: torch.optim.Optimizer, names: Mapping[int, Named]
) -> list[list[Named]]:
    """The names of an optimizer's parameters, for each group.

    Raises:
        CheckpointError: a parameter belongs to none of the modules in the state.
    """
    given = [group.get("param_names") for group in optimizer.param_groups]
    if not names and not all(given):  # parameters of no module: by their positions
        numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
        return [[Named((str(next(numbers)),)) for _ in g["params"]] for g in optimizer.param_groups]
    found = []
    unknown = []
    for number, group in enumerate(optimizer.param_groups):
        own: list[Named] = []
        for position, parameter in enumerate(group["params"]):
            named = names.get(id(parameter))
            if named is None and given[number]:
                named = Named((group["param_names"][position],))
            if named is None:
                unknown.append(f"{list(parameter.shape)} at {position} of group {number}")
            else:
                own.append(named)
        found.append(own)
    if unknown:
        raise CheckpointError(
            "an optimizer's state goes by the names of its parameters, so the module that has them "
            f"is in the same state; got {len(unknown)} of {path!r} that are in none: "
            f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}. Add the module: "
            "{'model': model, 'optimizer': optimizer}."
        )
    return found


def _optimizer(
    path: str, optimizer: torch.optim.Optimizer, arrays: Arrays, names: Mapping[int, Named]
) -> dict[str, Any]:
    by_group = optimizer_names(path, optimizer, names)
    state = _optimizer_state(path, optimizer.state_dict(), arrays, by_group)
    return state | {"shapes": parameter_shapes(optimizer, by_group)}


def parameter_shapes(
    optimizer: torch.optim.Optimizer, by_group: list[list[Named]]
) -> dict[str, list[int]]:
    """The shape of each parameter, or of its rows, by name."""
    return {
        name: list(parameter.shape[1:] if named.is_stacked else parameter.shape)
        for group, own in zip(optimizer.param_groups, by_group)
        for parameter, named in zip(group["params"], own)
        for name in named.names
    }


def is_optimizer_state(part: Any) -> bool:
    """Whether this is what `Optimizer.state_dict()` returns."""
    return (
        isinstance(part, Mapping)
        and {"state", "param_groups"} <= set(part)
        and isinstance(part["state"], Mapping)
        and isinstance(part["param_groups"], list)
        and all(isinstance(group, Mapping) and "params" in group for group in part["param_groups"])
    )


def indexed(optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> list[list[Named]]:
    """The names in an optimizer's state dict, for each group: those that it has, else positions.

    Args:
        optimizer: the state dict; of an optimizer that was given `model.named_parameters()`, it has
            their names.
        state: all parts by name. A name that one module there has, or one dict of tensors, is that
            parameter's.
    """
    owners: dict[str, list[str]] = {}
    for part, value in state.items():
        is_module = isinstance(value, nn.Module)
        held = module_items(value)[0] if is_module else value if isinstance(value, Mapping) else ()
        for name in held:
            owners.setdefault(str(name), []).append(part)
    found = []
    for group in optimizer["param_groups"]:
        names = group.get("param_names")
        if names is None:
            found.append([Named((str(number),)) for number in group["params"]])
            continue
        parts = [owners.get(name, []) for name in names]
        found.append(
            [
                Named((f"{of[0]}.{name}" if len(of) == 1 else name,))
                for name, of in zip(names, parts)
            ]
        )
    return found


def _optimizer_state(
    path: str,
    state: Mapping[str, Any],
    arrays: Arrays,
    by_group: list[list[Named]],
) -> dict[str, Any]:
    """An optimizer's state dict as JSON, by names.

    Args:
        path: where it stands.
        state: the state dict.
        arrays: gets its tensors.
        by_group: the names of the parameters, for each group.
    """
    groups = state["param_groups"]
    name_of = {i: n for g, own in zip(groups, by_group) for i, n in zip(g["params"], own)}
    made: dict[str, Any] = {}
    others = []
    for index, values in state["state"].items():
        named = name_of.get(index) if isinstance(index, int) else None
        if named is None:
            at = joined(path, index)
            others.append([plain.encode(at, each, arrays.pack) for each in (index, values)])
            continue
        for row, name in enumerate(named.names):
            at = f"{path}.{name}"
            made[name] = {
                slot: arrays.pack(f"{at}.{slot}", value, row)
                if has_rows(named, value)
                else plain.encode(f"{at}.{slot}", value, arrays.pack)
                for slot, value in values.items()
            }
    return {
        KIND: OPTIMIZER,
        "state": made,
        "others": others,
        "groups": [
            {
                "params": [name for named in own for name in named.names],
                "options": plain.encode(
                    f"{path}.param_groups.{number}",
                    {k: v for k, v in group.items() if k not in ("params", "param_names")},
                    arrays.pack,
                ),
            }
            for number, (group, own) in enumerate(zip(groups, by_group))
        ],
        "top": plain.encode(
            path,
            {k: v for k, v in state.items() if k not in ("state", "param_groups")},
            arrays.pack,
        ),
    }


def has_rows(named: Named, value: Any) -> bool:
    """Whether a value in a parameter's state has a row for each of its names.

    Raises:
        CheckpointError: the parameter is stacked, and the value is a tensor of another first dim.
    """
    if not named.is_stacked or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if value.shape[0] != len(named.names):
        raise CheckpointError(
            "what an optimizer keeps for a pipeline's stacked parameter has a row for each stage, "
            f"or is one number; got shape {list(value.shape)} for the {len(named.names)} stages of "
            f"{named.names[0]!r}. Use an optimizer that works on each element."
        )
    return True
