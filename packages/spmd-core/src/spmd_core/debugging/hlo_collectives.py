"""The collectives of a compiled module, from XLA's HLO text: bytes, groups and executions of each.

Input is text that XLA printed, output are plain values. Neither devices nor this project's programs
are needed.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmd_core.debugging.hlo_text import Instruction, closing, executions, num_bytes, parse, split
from spmd_core.sharding.xla_text import ints, iota

Groups = tuple[tuple[int, ...], ...]
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPCODES = {suffixed: kind for kind in KINDS for suffixed in (kind, f"{kind}-start")}
# Between TPU slices the hosts carry the data: a `send` and a `recv` whose attributes name the
# collective.
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(?P<type>\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="(?P<name>[^"]+)"')
_TARGET = "_xla_megascale_target="
# The result type of these is (operands, results, ...); that of the others has only the results.
_STARTS_WITH_OPERANDS = ("all-gather-start", "collective-permute-start")
# The computation of libtpu's fusion for a reduce-scatter.
_SCATTERED = "all-reduce-scatter"
_CHANNEL = re.compile(r"\bchannel_id=(?P<id>\d+)")
_CALLED = re.compile(r"\bcalls=%?(?P<name>[^\s,]+)")
_BY_PARTITIONER = 'is_spmd_generated="true"'
_IOTA = re.compile(r"\[(?P<dims>[\d,]+)\](?:<=\[(?P<reshape>[\d,]+)\])?(?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*\)?)\))? "
    r"\{(?P<over>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")


@dataclass(frozen=True)
class CollectiveInstruction:
    """One collective of a compiled module.

    Attributes:
        name: the name of the instruction.
        kind: one of `KINDS`; an asynchronous start has the kind of the collective it starts.
        result_bytes: bytes of the result on each device (of all results, for a tuple).
        operand_bytes: bytes of the operands on each device.
        groups: the devices of each group, as the module numbers them; for a permute the (source,
            target) pairs. None if the text has an unknown form, and between slices.
        groups_text: XLA's text of the groups; between slices, of the transfer's target.
        executions: number of executions in one run of the program; None if it depends on data.
        op_names: the `op_name`s of the instruction; if it has none, those of the instructions that
            read it, else those of its operands.
        is_between_slices: whether the network between TPU slices carries it; the other collectives
            of such a module are inside of a slice.
    """

    name: str
    kind: str
    result_bytes: int
    operand_bytes: int
    groups: Groups | None
    groups_text: str
    executions: int | None
    op_names: tuple[str, ...]
    is_between_slices: bool = False


def collectives(text: str, num_devices: int) -> tuple[CollectiveInstruction, ...]:
    """The collectives of a compiled module, in the order of the text.

    An asynchronous collective is listed once, at its start; libtpu fuses its start, its end, and
    what is computed meanwhile, and all these fusions have it. A TPU's all-reduce of which each
    device keeps a part counts as a reduce-scatter: libtpu fuses the two.

    Args:
        text: the module.
        num_devices: how many devices the module numbers: all, or those of one TPU slice if the
            program is over several.
    """
    computations, entry = parse(text)
    counts = executions(computations, entry)
    found: list[CollectiveInstruction] = []
    fused, begun = _fused(computations), set[str]()
    for name, instructions in computations.items():
        readers = _Readers(instructions)
        for instruction in instructions.values() if counts[name] != 0 else ():
            if instruction.opcode in _OPCODES:
                channel = _CHANNEL.search(instruction.attributes)
                if channel is not None and name in fused:
                    if channel["id"] in begun:
                        continue
                    begun.add(channel["id"])
                made = _collective(instruction, readers, counts[name], num_devices)
                scatters = name.startswith(_SCATTERED)
                found.append(_scattered(made, instructions) if scatters else made)
            elif instruction.opcode == "send" and _TRANSFER.search(instruction.attributes):
                found.append(_transfer(instruction, readers, counts[name]))
    return tuple(found)


class _Readers:
    """Which instructions read which, in the order of the text.

    Args:
        computation: the instructions.
    """

    def __init__(self, computation: dict[str, Instruction]) -> None:
        self.computation = computation

    @cached_property
    def _of(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.computation.values():
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    def of(self, instruction: Instruction) -> Iterator[Instruction]:
        """The readers of an instruction; for an asynchronous start, those of its end."""
        for other in self._of.get(instruction.name, ()):
            is_part = instruction.opcode == "recv-done" and other.opcode == "get-tuple-element"
            if other.opcode.endswith("-done") or is_part:
                yield from self.of(other)
            else:
                yield other


def _fused(computations: dict[str, dict[str, Instruction]]) -> set[str]:
    """The computations of fusions."""
    return {
        called["name"]
        for instructions in computations.values()
        for instruction in instructions.values()
        if instruction.opcode == "fusion"
        and (called := _CALLED.search(instruction.attributes)) is not None
    }


def _transfer(send: Instruction, readers: _Readers, count: int | None) -> CollectiveInstruction:
    """A collective between TPU slices, from its `send` and the `recv` of the same name."""
    named = _TRANSFER.search(send.attributes)
    assert named is not None
    received = [
        other
        for other in readers.computation.values()
        if other.opcode == "recv" and _rendezvous(other) == _rendezvous(send)
    ]
    # Their types are (array, context, token).
    result_bytes = sum(num_bytes(split(other.type[1:-1])[0]) for other in received)
    rest = send.attributes.partition(_TARGET)[2]
    target = rest[: closing(rest, 0) + 1] if rest.startswith("{") else split(rest)[0]
    names = [name for one in (send, *received) for name in _op_names(one, readers)]
    return CollectiveInstruction(
        send.name,
        _TRANSFERS.get(named["type"], named["type"].lower().replace("_", "-")),
        result_bytes,
        num_bytes(split(send.type[1:-1])[0]),
        None,
        target,
        count,
        tuple(dict.fromkeys(names)),
        is_between_slices=True,
    )


def _rendezvous(instruction: Instruction) -> str:
    found = _RENDEZVOUS.search(instruction.attributes)
    return "" if found is None else found["name"]


def _scattered(
    found: CollectiveInstruction, computation: dict[str, Instruction]
) -> CollectiveInstruction:
    """A libtpu fusion's all-reduce with the part of its result that the fusion keeps."""
    last = next(reversed(computation.values()))
    if found.kind != "all-reduce" or last.opcode != "dynamic-slice":
        return found
    return replace(found, kind="reduce-scatter", result_bytes=num_bytes(last.type))


def _collective(
    instruction: Instruction, readers: _Readers, count: int | None, num_devices: int
) -> CollectiveInstruction:
    result, computation = instruction.type, readers.computation
    if instruction.opcode in _STARTS_WITH_OPERANDS:
        result = split(result[1:-1])[1]
    kind = _OPCODES[instruction.opcode]
    groups, groups_text = (
        _pairs(instruction.attributes)
        if kind == "collective-permute"
        else replica_groups(instruction.attributes, num_devices)
    )
    operand_bytes = sum(
        num_bytes(computation[name].type) for name in instruction.operands if name in computation
    )
    return CollectiveInstruction(
        instruction.name,
        kind,
        num_bytes(result),
        operand_bytes,
        groups,
        groups_text,
        count,
        tuple(_op_names(instruction, readers)),
    )


def _op_names(instruction: Instruction, readers: _Readers) -> Iterator[str]:
    """The first names with `::` among the instruction's, its readers' and its operands'.

    A name without `::` is that of an argument or of the compiler, not of a torch operation. A
    gather that the partitioner inserted has the name of its operand in jaxlib 0.12, and that of its
    reader in 0.10; so readers come first.
    """
    behind, computation = list(readers.of(instruction)), readers.computation
    read = [computation[name] for name in instruction.operands if name in computation]
    order = [[instruction], behind, read]
    if instruction.opcode.startswith("all-gather") and _BY_PARTITIONER in instruction.attributes:
        order = [behind, [instruction], read]
    for candidates in order:
        names = list(dict.fromkeys(c.op_name for c in candidates if "::" in c.op_name))
        if names:
            yield from names
            return


def replica_groups(attributes: str, num_devices: int) -> tuple[Groups | None, str]:
    """The groups of a collective, from XLA's list, iota or mesh form; and their text."""
    at = attributes.find("replica_groups=")
    if at < 0:
        return (tuple(range(num_devices)),), ""
    rest = attributes[at + len("replica_groups=") :]
    if rest.startswith("{"):
        inner = rest[: closing(rest, 0) + 1]
        groups = tuple(ints(group) for group in re.findall(r"\{([\d,\s]+)\}", inner[1:-1]))
        return groups or (tuple(range(num_devices)),), inner
    by_mesh = _MESH.match(attributes, at)
    if by_mesh is not None:
        return _groups_of_mesh(by_mesh), by_mesh[0].removeprefix("replica_groups=")
    by_iota = _IOTA.match(rest)
    if by_iota is None or by_iota["reshape"] is None:
        return None, split(rest)[0]
    table = iota(
        ints(by_iota["dims"]),
        ints(by_iota["reshape"]),
        ints(by_iota["order"]) if by_iota["order"] else None,
    )
    return tuple(tuple(row) for row in table.tolist()), by_iota[0]


def _groups_of_mesh(found: re.Match[str]) -> Groups | None:
    """Groups along axes, or parts of axes, of a mesh that XLA made for itself.

    `'x':(2)4` is the part of size 4 after a part of size 2.
    """
    sizes = {axis["name"]: int(axis["size"]) for axis in _MESH_AXIS.finditer(found["axes"])}
    numbers = np.arange(math.prod(sizes.values()))
    if found["ids"]:
        by_iota = _IOTA.match(found["ids"])
        dims = ints(by_iota["dims"]) if by_iota is not None else ()
        order = ints(by_iota["order"]) if by_iota is not None and by_iota["order"] else None
        numbers = (
            iota((numbers.size,), dims, order)
            if by_iota is not None
            else np.array(ints(found["ids"].rstrip(")")))
        )
    shape: list[int] = []
    along: list[int] = []
    over = {axis["name"]: axis for axis in _MESH_AXIS.finditer(found["over"])}
    if len(over) != len(_MESH_AXIS.findall(found["over"])):
        return None  # two parts of one axis
    for name, size in sizes.items():
        part = over.get(name)
        if part is not None and part["part"]:
            before, own = int(part["before"]), int(part["part"])
            shape += [before, own, size // before // own]
            along.append(len(shape) - 2)
        else:
            shape.append(size)
            along += [len(shape) - 1] if part is not None else []
    rest = [dim for dim in range(len(shape)) if dim not in along]
    grid = (
        numbers.reshape(shape)
        .transpose(*rest, *along)
        .reshape(-1, math.prod(shape[dim] for dim in along))
    )
    return tuple(tuple(row) for row in grid.tolist())


def _pairs(attributes: str) -> tuple[Groups | None, str]:
    found = re.search(r"source_target_pairs=(\{(?:\{\d+,\d+\},?)*\})", attributes)
    if found is None:
        return None, ""
    return tuple(ints(pair) for pair in re.findall(r"\{(\d+,\d+)\}", found[1])), found[1]
