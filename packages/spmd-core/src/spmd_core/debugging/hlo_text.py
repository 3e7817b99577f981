"""A parser for XLA's HLO text: computations, their instructions, and how often each runs.

The input is text that XLA printed, the output plain values. It needs neither devices nor this
project's programs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) (?:\(.*\) -> .* )?\{$")
_END = re.compile(r"^\}(?:, execution_thread=.*| //.*)?$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<rest>.*)$")
ARRAY = re.compile(r"\b(?P<dtype>pred|(?:bf|f|s|u|c)\d+\w*)\[(?P<dims>[\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?P<role>to_apply|calls|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)="
)
_BRACKET, _BRACKET_OR_COMMA = re.compile(r"[()\[\]{}]"), re.compile(r"[()\[\]{},]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a module; `attributes` is the text after the operands."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @cached_property
    def op_name(self) -> str:
        """The `op_name` of the metadata; may be empty.

        In programs of this project: the torch operation, its scope and jax's primitive.
        """
        found = re.search(r'metadata=\{[^}]*op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return "" if found is None else found[1]


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The computations of a module, and the name of the entry computation.

    Each computation is a dict of its instructions by name, in the order of the text. An element of
    a tuple that is read as `tuple#1`, as XLA prints it from jax 0.12 on, is an instruction of that
    name, `get-tuple-element`, before its first reader.

    Raises:
        ValueError: an element of what is no tuple.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        header = None if line.startswith(" ") else _HEADER.match(line)
        if header is not None:
            current = computations[header["name"]] = {}
            entry = header["name"] if header["entry"] else entry
        elif _END.match(line):
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                for name in instruction.operands:
                    if "#" in name and name not in current:
                        current[name] = _element_of(name, current)
                current[instruction.name] = instruction
    return computations, entry


def _element_of(name: str, computation: dict[str, Instruction]) -> Instruction:
    of, _, index = name.rpartition("#")
    whole = computation.get(of)
    if whole is None or not index.isdigit() or not whole.type.startswith("("):
        found = "nothing before it" if whole is None else f"a {whole.type}"
        raise ValueError(f"`{name}` in XLA's text reads an element of {found}, not of a tuple.")
    kind = split(whole.type[1 : closing(whole.type, 0)])[int(index)]
    return Instruction(name, kind, "get-tuple-element", (of,), f", index={index}")


def _whole_lines(text: str) -> Iterator[str]:
    """The lines, with each instruction in one: attributes of a TPU's kernels have line breaks."""
    whole = ""
    for line in text.splitlines():
        if whole.startswith(" ") and line and not line.startswith(" ") and not _END.match(line):
            whole += line
        else:
            yield whole
            whole = line
    yield whole


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    rest = found["rest"]
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opened = rest.index("(", end)
    closed = closing(rest, opened)
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in split(rest[opened + 1 : closed]))
    return Instruction(
        found["name"], rest[:end], rest[end:opened].strip(), operands, rest[closed + 1 :]
    )


def closing(text: str, opened: int) -> int:
    """The position of the bracket that closes the one at `opened`."""
    depth = 0
    for found in _BRACKET.finditer(text, opened):
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def split(text: str) -> list[str]:
    """The parts between the commas outside of all brackets, without XLA's comments."""
    parts, depth, start = [], 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for found in _BRACKET_OR_COMMA.finditer(text):
        if found[0] != ",":
            depth += 1 if found[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [part for part in [*parts, text[start:].strip()] if part]


def num_bytes(type_text: str) -> int:
    """The bytes of all arrays in a type such as `f32[8,4]{1,0}` or `(f32[], bf16[2])`.

    Tokens have no bytes.
    """
    return sum(_array_bytes(found["dtype"], found["dims"]) for found in ARRAY.finditer(type_text))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.ceil(math.prod(int(n.lstrip("<=")) for n in dims.split(",") if n) * bits / 8)


def executions(
    computations: dict[str, dict[str, Instruction]],
    entry: str,
    *,
    per_call: Callable[[str, int | None], int | None] | None = None,
) -> dict[str, int | None]:
    """The number of executions of each computation in one run of the module.

    None if the number depends on data (a branch, a loop of unknown length).

    Args:
        computations: from `parse`.
        entry: likewise.
        per_call: the number of executions for each execution of the caller, from the role of the
            called computation (`body`, `true_computation`, ...) and the length of the loop, None if
            it is unknown. By default `executions_per_call`.
    """
    per_call = per_call or executions_per_call
    counts: dict[str, int | None] = defaultdict(int, {entry: 1})
    # XLA prints a called computation before its callers.
    for name in reversed(computations):
        for instruction in computations[name].values():
            length = None
            if instruction.opcode == "while":
                length = _loop_length(instruction, computations[name], computations)
            for role, called in _calls(instruction.attributes):
                times = per_call(role, length)
                before, own = counts[called], counts[name]
                counts[called] = (
                    None if before is None or own is None or times is None else before + own * times
                )
    return counts


def _calls(attributes: str) -> Iterator[tuple[str, str]]:
    for found in _CALLED.finditer(attributes):
        rest = attributes[found.end() :]
        names = (
            rest[1 : rest.index("}")]
            if rest.startswith("{")
            else re.split(r"[,\s]", rest, maxsplit=1)[0]
        )
        for name in names.split(","):
            yield found["role"], name.strip().lstrip("%")


def executions_per_call(role: str, length: int | None) -> int | None:
    """How often an instruction executes a computation that it calls; None if that depends on data.

    Args:
        role: the computation's.
        length: that of the loop, if the instruction is one and its length is known.
    """
    if role in ("true_computation", "false_computation", "branch_computations"):
        return None
    if role not in ("body", "condition"):
        return 1
    return None if length is None else length + (role == "condition")


def _loop_length(
    loop: Instruction,
    computation: dict[str, Instruction],
    computations: dict[str, dict[str, Instruction]],
) -> int | None:
    """How often a loop's body runs; None if that depends on data.

    XLA prints it, but not for a TPU. There it is read from the loop: a counter that starts at a
    constant, is increased by a constant, and compared with a constant.
    """
    written = _TRIP_COUNT.search(loop.attributes)
    if written is not None:
        return int(written[1])
    called = dict(_calls(loop.attributes))
    condition, body = computations[called["condition"]], computations[called["body"]]
    start = computation.get(loop.operands[0])
    test, end = list(condition.values())[-1], list(body.values())[-1]
    if start is None or (start.opcode, end.opcode, test.opcode) != ("tuple", "tuple", "compare"):
        return None
    counted = _element(test.operands[0], condition)
    if counted is None or "direction=LT" not in test.attributes:
        return None

    def constant(name: str, inside: dict[str, Instruction]) -> int | None:
        """A value inside of the loop that is the same number in each run."""
        index = _element(name, inside)
        if index is None:
            return _number(name, inside)
        kept = _element(end.operands[index], body) == index
        return _number(start.operands[index], computation) if kept else None

    added = _source(end.operands[counted], body)
    if added is None or added.opcode != "add":
        return None
    steps = [constant(n, body) for n in added.operands if _element(n, body) != counted]
    first, limit = (
        _number(start.operands[counted], computation),
        constant(test.operands[1], condition),
    )
    if len(steps) != 1 or not steps[0] or steps[0] < 0 or first is None or limit is None:
        return None
    return max(-(-(limit - first) // steps[0]), 0)


def _source(name: str, computation: dict[str, Instruction]) -> Instruction | None:
    """The instruction that computes a value, looking through copies."""
    found = computation.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.get(found.operands[0])
    return found


def _number(name: str, computation: dict[str, Instruction]) -> int | None:
    found = _source(name, computation)
    if found is None or found.opcode != "constant":
        return None
    return int(found.operands[0]) if re.fullmatch(r"-?\d+", found.operands[0]) else None


def _element(name: str, computation: dict[str, Instruction]) -> int | None:
    """Which element of the loop's tuple a value is."""
    found = _source(name, computation)
    if found is None or found.opcode != "get-tuple-element":
        return None
    of = computation.get(found.operands[0])
    index = re.search(r"\bindex=(\d+)", found.attributes)
    return int(index[1]) if of is not None and of.opcode == "parameter" and index else None
