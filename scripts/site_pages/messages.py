"""Finds the texts of exceptions and warnings in the sources, with gaps for what a call got."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    "spmd_core": ROOT / "packages/spmd-core/src/spmd_core",
    "spmd_data": ROOT / "packages/spmd-data/src/spmd_data",
    "torch_xla": ROOT / "packages/torch-xla-compat/src/torch_xla",
}
# Those of our own invariants, and those that never leave a function.
_INTERNAL = ("AssertionError", "GrowthRefusedError", "StopIteration", "WrittenError", "SystemExit")
_RULE = re.compile(r"^(?P<rule>.*?)[;,:] got (?P<got>.*?)(?:\.(?: (?P<cure>.*))?)?$")
_SEEN = re.compile(r"^(?P<rule>[^.;]*); (?P<got>.*?)\. (?P<cure>.*)$")


@dataclass(frozen=True)
class Message:
    """One text that a user may read.

    Attributes:
        kind: the class of the exception, or "Warning".
        text: the whole text; `‹name›` and `‹…›` stand for what a call got.
        source: the file, relative to its package's folder of sources.
    """

    kind: str
    text: str
    source: str

    def parts(self) -> tuple[str, str, str]:
        """The rule, what was got, and what to do; the last two may be empty."""
        found = _RULE.match(self.text)
        found = found or _SEEN.match(self.text)
        if not found:
            rule, _, cure = self.text.partition(". ")
            return rule, "", cure
        return found["rule"], found["got"], found["cure"] or ""


def messages() -> list[Message]:
    """All texts of the three packages, each once, in the order of the files."""
    found: dict[Message, None] = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            source = f"{package}/{path.relative_to(folder).as_posix()}"
            for kind, text in _of_file(ast.parse(path.read_text())):
                found[Message(kind, " ".join(text.split()), source)] = None
    return [*found]


def _of_file(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for scope in ast.walk(tree):
        if not isinstance(scope, (ast.FunctionDef, ast.Module)):
            continue
        texts = _constants(scope)
        for node in _own(scope):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind = _kind(node)
            if kind in ("refuse", "refused"):
                parts = [_text(one, texts) for one in node.args[:3]]
                if len(parts) == 3 and all(parts):
                    yield "NotImplementedError", f"{parts[0]} {parts[1]}. {parts[2]}"
            elif kind:
                text = _text(node.args[0], texts)
                if text and len(re.sub(r"‹[^›]*›", "", text).split()) > 2 and "." in text:
                    yield kind, text


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _own(child)


def _kind(call: ast.Call) -> str | None:
    """The class of exception that a call makes, "Warning" for one that warns, else None."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("refuse", "refused"):
        return name
    if name == "warn":
        return "Warning"
    is_error = name.endswith("Error") and not name.startswith("_") and name not in _INTERNAL
    return name if is_error and name[0].isupper() else None


def _constants(scope: ast.AST) -> dict[str, str]:
    """The texts that a function gives to names, each of one assignment."""
    texts: dict[str, str | None] = {}
    for node in _own(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            texts[name] = None if name in texts else _text(node.value, {})
    return {name: text for name, text in texts.items() if text}


def _text(node: ast.AST, texts: dict[str, str]) -> str | None:
    """The text of an expression, with gaps; None if it is not one that can be read here."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return texts.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(_gap_or_text(one, texts) for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_text(one, texts) or _gap(one) for one in (node.left, node.right))
        return left + right
    if isinstance(node, ast.IfExp):
        return _text(node.body, texts)
    return None


def _gap_or_text(node: ast.AST, texts: dict[str, str]) -> str:
    if isinstance(node, ast.FormattedValue):
        inside = node.value
        return (isinstance(inside, ast.Name) and texts.get(inside.id)) or _gap(inside)
    return _text(node, texts) or ""


def _gap(node: ast.AST) -> str:
    """`‹name›` for a name or an attribute, `‹…›` for more."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        words = "type" if name == "__name__" else name.strip("_").lower().replace("_", " ")
        return f"‹{words}›"
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return _gap(node.args[0])
    return "‹…›"
