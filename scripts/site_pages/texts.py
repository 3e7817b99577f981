"""Which texts an expression of the sources may have, with gaps for what a call got.

A conditional has the texts of all its branches, a name those of all its assignments, a call of a
function of this project those that it returns.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_MOST = 24  # texts of one expression
_DEEPEST = 4  # calls in calls
_FEW = 3  # words: a part that has fewer in all branches makes no text of its own


@dataclass
class Names:
    """What names stand for at some place: texts, and functions of this project with their names."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, tuple[ast.FunctionDef, "Names"]] = field(default_factory=dict)
    depth: int = 0  # of calls that are read

    def within(self, scope: ast.AST) -> "Names":
        """Those inside of a function, whose own names come first."""
        own = Names(dict(self.texts), self.functions)
        if isinstance(scope, ast.FunctionDef):
            for argument in (*scope.args.args, *scope.args.kwonlyargs):
                own.texts.pop(argument.arg, None)
        _assign(scope, own, is_certain=True)
        return own


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file."""
    return ast.parse(path.read_text())


@cache
def of_module(path: Path, roots: tuple[tuple[str, Path], ...]) -> Names:
    """The names of a module, with those that it imports from the packages `roots`."""
    names = Names()
    tree = parsed(path)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            _import(node, names, roots)
        elif isinstance(node, ast.FunctionDef):
            names.functions[node.name] = (node, names)
    _assign(tree, names, is_certain=True)
    return names


def texts(node: ast.AST | None, names: Names) -> list[str]:
    """The texts of an expression; none if it is not one that can be read here."""
    found: Iterator[str] | Sequence[str] = ()
    if isinstance(node, ast.Constant):
        found = [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.Name):
        found = names.texts.get(node.id, [])
    elif isinstance(node, ast.JoinedStr):
        found = _joined([_part(one, names) for one in node.values])
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [texts(one, names) or [gap(one)] for one in (node.left, node.right)]
        found = _joined(both)
    elif isinstance(node, ast.IfExp):
        found = _either([node.body, node.orelse], names)
    elif isinstance(node, ast.BoolOp):
        found = _either(node.values, names)
    elif isinstance(node, ast.Call) and names.depth < _DEEPEST:
        found = _called(node, names)
    return [*dict.fromkeys(itertools.islice(found, _MOST))]


def given(call: ast.Call, function: ast.FunctionDef, names: Names, outer: Names) -> Names:
    """The names inside of a function, in which a call gives its parameters texts.

    Args:
        call: the call.
        function: the function that it calls.
        names: those at the call.
        outer: those of the function's module.
    """
    parameters = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
    arguments = dict(zip(parameters, call.args))
    arguments |= {one.arg: one.value for one in call.keywords if one.arg}
    inner = Names(dict(outer.texts), outer.functions, names.depth + 1)
    for name in parameters:
        argument = arguments.get(name)
        inner.texts[name] = texts(argument, names) or [gap(argument) if argument else f"‹{name}›"]
    _assign(function, inner, is_certain=True)
    return inner


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    waiting = [*ast.iter_child_nodes(scope)][::-1]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            waiting += [*ast.iter_child_nodes(node)][::-1]


def gap(node: ast.AST) -> str:
    """`‹name›` for a name or an attribute, `‹…›` for more."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        words = "type" if name == "__name__" else name.strip("_").lower().replace("_", " ")
        return f"‹{words}›"
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return gap(node.args[0])
    return "‹…›"


def _part(node: ast.AST, names: Names) -> list[str]:
    """The texts of a part of an f-string: one, with a gap, where they are of a few words only."""
    if not isinstance(node, ast.FormattedValue):
        return texts(node, names) or [""]
    inside = node.value
    found = texts(inside, names)
    if isinstance(inside, ast.Constant) or len(found) == 1:
        return found or [gap(inside)]
    if isinstance(inside, (ast.IfExp, ast.BoolOp)) and all(len(t.split()) < _FEW for t in found):
        shown = [one.strip() for one in found if one.strip()]
        return [f"‹{' or '.join(shown)}›" if len(shown) == 2 else "‹…›"]
    return found or [gap(inside)]


def _either(nodes: Sequence[ast.AST], names: Names) -> list[str]:
    """The texts of all, with a gap for those without; none if there are no others."""
    found = [texts(node, names) for node in nodes]
    if not any(found):
        return []
    return [text for node, some in zip(nodes, found) for text in some or [gap(node)]]


def _joined(parts: Sequence[Sequence[str]]) -> Iterator[str]:
    return ("".join(one) for one in itertools.product(*parts))


def _called(node: ast.Call, names: Names) -> list[str]:
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "format":
        patterns = texts(function.value, names)
        return [re.sub(r"\{[^{}]*\}", _formatted(node, names), one) for one in patterns]
    if not isinstance(function, ast.Name) or function.id not in names.functions:
        return []
    definition, outer = names.functions[function.id]
    inner = given(node, definition, names, outer)
    returned = [one.value for one in own(definition) if isinstance(one, ast.Return) and one.value]
    return _either(returned, inner)


def _formatted(call: ast.Call, names: Names) -> str:
    if len(call.args) != 1:
        return "‹…›"
    return (texts(call.args[0], names) or [gap(call.args[0])])[0]


def _assign(node: ast.AST, names: Names, *, is_certain: bool) -> None:
    """Gives names the texts of the assignments inside, in their order.

    Args:
        node: what has them.
        names: where the texts go.
        is_certain: whether what `node` has always runs; else earlier texts stay.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.expr)):
            continue
        target = (
            child.targets[0] if isinstance(child, ast.Assign) else getattr(child, "target", None)
        )
        if isinstance(target, ast.Name) and isinstance(
            child, (ast.Assign, ast.AnnAssign, ast.AugAssign)
        ):
            before = names.texts.get(target.id, [])
            found = (texts(child.value, names) if child.value else []) or [gap(target)]
            if isinstance(child, ast.AugAssign):
                found = [a + b for a in before for b in found][:_MOST]
            names.texts[target.id] = found if is_certain else [*dict.fromkeys([*before, *found])]
        _assign(child, names, is_certain=is_certain and isinstance(child, ast.With))


def _import(node: ast.ImportFrom, names: Names, roots: tuple[tuple[str, Path], ...]) -> None:
    package, *parts = str(node.module).split(".")
    folder = dict(roots).get(package)
    if folder is None:
        return
    path = folder.joinpath(*parts)
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    wanted = {one.name: one.asname or one.name for one in node.names}
    if not path.exists():
        return
    tree = parsed(path)
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    constants = {
        target.id
        for one in tree.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    if not (defined | constants) & set(wanted):
        return
    theirs = of_module(path, roots)
    for name, known_as in wanted.items():
        if name in theirs.functions:
            names.functions[known_as] = theirs.functions[name]
        if theirs.texts.get(name):
            names.texts[known_as] = theirs.texts[name]
