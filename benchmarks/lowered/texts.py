"""Keeps the StableHLO of lowered programs, by which two versions of the lowering are compared.

As a plugin of pytest this keeps all programs that a run of tests lowers:

    SPMD_LOWERED=before python -m pytest -p benchmarks.lowered.texts packages/spmd-core/tests
    git switch other-branch
    SPMD_LOWERED=after python -m pytest -p benchmarks.lowered.texts packages/spmd-core/tests
    python -m benchmarks.lowered.texts before after

`benchmarks.lowered.recipes` does the same for the steps of the recipes.

Programs are the same if their texts are, as MLIR prints them without locations. Two others may
compute the same: `graph_hash` does not depend on the order of operations that do not depend on each
other, on what nobody reads, on the names of functions, or on the order in which an optimization
barrier takes its operands.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.options import existing

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "before", type=existing("folder"), help="the folder of one version's programs"
    )
    parser.add_argument("after", type=existing("folder"), help="that of the other one's")
    args = parser.parse_args()

import jax
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

_BARRIER = "stablehlo.optimization_barrier"
_OUTPUT = os.environ.get("SPMD_LOWERED", "")
_INDEX = "index.json"
# The hashes of the programs' texts by the label of what lowers them, in the order of lowering.
found: dict[str, list[str]] = {}
_label = [""]


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]


class _Hasher:
    """Hashes the functions of one module."""

    def __init__(self, module: Any) -> None:
        operations = [op.operation for op in module.body.operations]
        self._functions = {
            str(op.attributes["sym_name"]): op for op in operations if op.name == "func.func"
        }
        others = sorted(str(op) for op in operations if op.name != "func.func")
        self._known: dict[str, str] = {}
        self.hash = _hash(*others, self._function('"main"'))

    def _function(self, name: str) -> str:
        if name not in self._known:
            op = self._functions[name]
            self._known[name] = _hash(*self._attributes(op), *self._regions(op, {}, 0))
        return self._known[name]

    def _attributes(self, op: Any) -> list[str]:
        names = [name if isinstance(name, str) else name.name for name in op.attributes]
        return [f"{n}={op.attributes[n]}" for n in sorted(names) if n not in ("sym_name", "callee")]

    def _regions(self, op: Any, values: dict[Any, str], depth: int) -> Iterator[str]:
        for region in op.regions:
            for block in region.blocks:
                inner = dict(values)
                for i, argument in enumerate(block.arguments):
                    inner[argument] = f"argument {depth} {i} {argument.type}"
                last = ""
                for child in block.operations:
                    last = self._operation(child.operation, inner, depth)
                yield last

    def _operation(self, op: Any, values: dict[Any, str], depth: int) -> str:
        operands = [values[x] for x in op.operands]
        if op.name == _BARRIER:
            made = _hash(op.name, *sorted(operands))
            values.update((x, _hash(made, own)) for x, own in zip(op.results, operands))
            return made
        called = ""
        if op.name == "func.call":
            called = self._function(f'"{op.attributes["callee"].value}"')
        own = [called, *self._attributes(op), *self._regions(op, values, depth + 1)]
        made = _hash(op.name, *own, *(x.type for x in op.results), *operands)
        values.update((x, f"{made} {i}") for i, x in enumerate(op.results))
        return made


def graph_hash(text: str) -> str:
    """The hash of what a module computes."""
    with mlir.make_ir_context():
        return _Hasher(ir.Module.parse(text)).hash


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Inside, all lowered programs are kept in a folder under the current label."""
    folder.mkdir(parents=True, exist_ok=True)
    lower = jax.stages.Traced.lower

    def lowering(traced: Any, *args: Any, **options: Any) -> Any:
        lowered = lower(traced, *args, **options)
        if traced.fun_name == "dims_of_kernel":  # no program: `program.dim_rules` asks
            return lowered
        text = str(lowered.compiler_ir("stablehlo"))
        name = _hash(text)
        found.setdefault(_label[0], []).append(name)
        path = folder / f"{name}.mlir.gz"
        if not path.exists():
            path.write_bytes(gzip.compress(text.encode(), 1))
        return lowered

    jax.stages.Traced.lower = lowering  # type: ignore
    try:
        yield
    finally:
        jax.stages.Traced.lower = lower  # type: ignore
        (folder / _INDEX).write_text(json.dumps(found, indent=1))


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """Inside, lowered programs have this label."""
    before, _label[0] = _label[0], label
    try:
        yield
    finally:
        _label[0] = before


# pytest's hooks.

_recording = contextlib.ExitStack()


def pytest_sessionstart() -> None:
    if _OUTPUT:
        _recording.enter_context(recorded(Path(_OUTPUT)))


def pytest_runtest_setup(item: Any) -> None:
    _label[0] = item.nodeid


def pytest_sessionfinish() -> None:
    _recording.close()


def main(before: Path, after: Path) -> int:
    """Prints which programs differ; returns 0 if all compute the same."""
    old, new = (json.loads((folder / _INDEX).read_text()) for folder in (before, after))
    same, compared = 0, {}
    for label in [*old, *(label for label in new if label not in old)]:
        pairs = [*zip(old.get(label, []), new.get(label, []))]
        if len(old.get(label, [])) != len(new.get(label, [])):
            print(f"{label}: {len(old.get(label, []))} programs, then {len(new.get(label, []))}")
        for number, pair in enumerate(pairs):
            if pair[0] == pair[1]:
                same += 1
            elif pair not in compared:
                texts = [
                    gzip.decompress((folder / f"{name}.mlir.gz").read_bytes()).decode()
                    for folder, name in zip((before, after), pair)
                ]
                compared[pair] = graph_hash(texts[0]) == graph_hash(texts[1])
                if not compared[pair]:
                    lines = [text.count("\n") for text in texts]
                    print(f"{label}, program {number}: {pair[0]} of {lines[0]} lines is now")
                    print(f"    {pair[1]} of {lines[1]} lines")
    equal = sum(compared.values())
    print(
        f"{same} programs have the same text, {equal} others compute the same, "
        f"{len(compared) - equal} differ"
    )
    return int(equal < len(compared))


if __name__ == "__main__":
    sys.exit(main(args.before, args.after))
