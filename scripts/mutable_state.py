"""Prints the objects of modules that change after import, from the comments that stand at them.

The comment says what protects the object from threads and what takes its changes back:

    # Guarded by: the graph lock. Cleared by: compile_cache.clear().

*The graph lock* is `lock` of `spmd_core/graph/recorders.py`. A cut holds it, and so does the
recording of every operation but a view, which changes only its own handle and the caches of views.
*The GIL*: each change is one assignment, or one call of a built-in container, which no other thread
sees half done. *Imports*: changed only while modules are imported.

Results of pure functions are kept by `functools.lru_cache`, which is bounded, and `functools.cache`
(one result for each overload, in `recording/schema.py`). They lock themselves and are never
cleared: what they read of the process, the devices, does not change after the start. A `Library` of
torch's is filled at import and stays. `tests/system/test_state.py` holds the comments complete.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "packages/spmd-core/src/spmd_core",
    ROOT / "packages/spmd-data/src/spmd_data",
    ROOT / "packages/torch-xla-compat/src/torch_xla",
)
GUARDS = (
    "the graph lock",
    "the GIL",
    "imports",
    "its own lock",
    "thread-local storage",
    "the context",
    "nothing",
)
# What makes an object that is changed in place. A container that is filled where it is written is a
# table.
_CONTAINERS = {"dict", "list", "set"}
_MAKERS = {
    *_CONTAINERS,
    "deque",
    "OrderedDict",
    "Counter",
    "WeakValueDictionary",
    "WeakKeyDictionary",
    "WeakIdKeyDictionary",
    "WeakSet",
    "ContextVar",
    "count",
    "local",
}
_COMMENT = re.compile(r"(?:(.*?)\.? )?Guarded by: (.+)\. Cleared by: (.+)\.")


class State(NamedTuple):
    """An object that changes; `guard` and `clear` are None where no comment says them."""

    file: str
    name: str
    what: str
    guard: str | None
    clear: str | None


def states(source: Path) -> Iterator[State]:
    """The objects of a package's modules and classes that change, or that a comment describes."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        rebound = {name for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names}
        classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef) and not _is_fixed(n)}
        bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.ClassDef))]
        for node in (node for body in bodies for node in body):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = _COMMENT.fullmatch(_comment_above(lines, node.lineno))
            for name in (t.id for t in targets if isinstance(t, ast.Name)):
                if found or name in rebound or _changes(node.value, classes):
                    what, guard, clear = found.groups() if found else ("", None, None)
                    file = path.relative_to(source.parent).as_posix()
                    yield State(file, name, what or "", guard, clear)


def _is_fixed(node: ast.ClassDef) -> bool:
    """Whether the instances of a class never change: named tuples, enums, frozen dataclasses."""
    words = " ".join(map(ast.unparse, [*node.bases, *node.decorator_list]))
    return any(word in words for word in ("NamedTuple", "Enum", "frozen=True"))


def _changes(value: ast.expr | None, classes: set[str]) -> bool:
    """Whether an expression makes an empty container, or an object of one of the classes."""
    if isinstance(value, ast.Dict | ast.List):
        return not ast.unparse(value).strip("{}[]")
    if not isinstance(value, ast.Call):
        return False
    maker = getattr(value.func, "attr", getattr(value.func, "id", None))
    return maker in classes or (maker in _MAKERS and not (value.args and maker in _CONTAINERS))


def _comment_above(lines: list[str], line: int) -> str:
    """The comment that ends above a line, without its marks."""
    first = line - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(each.strip().lstrip("# ") for each in lines[first : line - 1])


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    print("| file | name | what it is | guarded by | cleared by |\n|---|---|---|---|---|")
    for source in PACKAGES:
        for state in states(source):
            print("| " + " | ".join(map(str, state)) + " |")


if __name__ == "__main__":
    main()
