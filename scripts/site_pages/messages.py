"""Finds the texts of exceptions and warnings in the sources, with gaps for what a call got."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.site_pages import texts

ROOT = Path(__file__).parents[2]
SOURCES = {
    "spmd_core": ROOT / "packages/spmd-core/src/spmd_core",
    "spmd_data": ROOT / "packages/spmd-data/src/spmd_data",
    "torch_xla": ROOT / "packages/torch-xla-compat/src/torch_xla",
}
# Those of our own invariants, and those that never leave a function.
_INTERNAL = ("AssertionError", "GrowthRefusedError", "StopIteration", "WrittenError", "SystemExit")
# What was got may end with a text of another library, which ends with its line.
_CURE = r"(?:\.|(?<=›)(?= [A-Z]))(?: (?P<cure>.*))"
_RULE = re.compile(rf"^(?P<rule>.*?)[;,:] got (?P<got>.*?)(?:{_CURE}?)?$")
_SEEN = re.compile(rf"^(?P<rule>[^.;]*); (?P<got>.*?){_CURE}$")
_SENTENCE = re.compile(r"\.(\s|$)")


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


@cache
def messages() -> tuple[Message, ...]:
    """All texts of the three packages, each once, in the order of the files."""
    found: dict[Message, None] = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            source = f"{package}/{path.relative_to(folder).as_posix()}"
            for kind, text in _of_file(path):
                found[Message(kind, " ".join(text.split()), source)] = None
    return (*found,)


def _of_file(path: Path) -> Iterator[tuple[str, str]]:
    module = texts.of_module(path, tuple(SOURCES.items()))
    for scope in ast.walk(texts.parsed(path)):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            calls = [one for one in texts.own(scope) if isinstance(one, ast.Call)]
            for kind, text in _raised(calls, module, scope):
                is_form = _is_refusal(getattr(scope, "name", "")) and text.endswith("›")
                words = re.sub(r"‹[^›]*›", "", text).split()
                if len(words) > 2 and _SENTENCE.search(text) and not is_form:
                    yield kind, text


def _raised(
    nodes: Iterable[ast.AST], outer: texts.Names, scope: ast.AST | None = None
) -> Iterator[tuple[str, str]]:
    """Class and text of what calls among the nodes make, with what they pass to refusals.

    Args:
        nodes: the nodes.
        outer: what names stand for there, or outside of the scope.
        scope: the function or module that has the nodes, if it gives names texts.
    """
    names = None if scope is not None else outer
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        kind, called = _kind(node), node.func.id if isinstance(node.func, ast.Name) else ""
        if not ((kind and node.args) or _is_refusal(called)):
            continue
        if names is None:
            names = outer.within(scope)
        if kind:
            yield from ((kind, text) for text in texts.texts(node.args[0], names))
        elif called in names.functions:
            function, theirs = names.functions[called]
            # The function itself, or one that it returns.
            yield from _raised(ast.walk(function), texts.given(node, function, names, theirs))


def _is_refusal(name: str) -> bool:
    return name.strip("_").startswith("refuse")


def _kind(call: ast.Call) -> str | None:
    """The class of exception that a call makes, "Warning" for one that warns, else None."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "warn":
        return "Warning"
    is_error = name.endswith("Error") and not name.startswith("_") and name not in _INTERNAL
    return name if is_error and name[0].isupper() else None
