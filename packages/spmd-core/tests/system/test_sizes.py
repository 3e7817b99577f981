"""Files and functions are short; a function that is long says why in its docstring.

A file has at most 500 lines, a function at most 80, its signature included and its docstring not:
docstrings of public functions describe each argument.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
LONGEST_FILE, LONGEST_FUNCTION = 500, 80
# What is longer, with the words of its docstring that say why.
LONG_FUNCTIONS = {
    "packages/spmd-core/src/spmd_core/ops/kernels/flash.py backward": "One function, although long",
}


def sources() -> Iterator[tuple[str, str]]:
    """The path and the text of each source that is no test."""
    for folder in ("benchmarks", "examples", "scripts", *ROOT.glob("packages/*/src")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "tests" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def long_functions(text: str) -> dict[str, str]:
    """The docstrings of the functions that are too long, by the function's name."""
    found = {}
    if text.count("\n") <= LONGEST_FUNCTION:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            first = node.body[0]
            described = first.end_lineno - first.lineno + 1 if docstring else 0
            if node.end_lineno - node.lineno + 1 - described > LONGEST_FUNCTION:
                found[node.name] = docstring
    return found


def test_files_are_short():
    found = dict(sources())
    assert len(found) > 400
    assert {name for name, text in found.items() if text.count("\n") > LONGEST_FILE} == set()


def test_functions_are_short():
    long = {
        f"{name} {function}": docstring
        for name, text in sources()
        for function, docstring in long_functions(text).items()
    }
    assert {n for n, why in long.items() if LONG_FUNCTIONS.get(n, "no reason") not in why} == set()


def test_a_docstring_does_not_count():
    body = "    x = 1\n" * LONGEST_FUNCTION
    described = '    """A.\n' + "    B.\n" * 90 + '    """\n'
    assert long_functions(f"def f():\n{body}") == {"f": ""}
    assert list(long_functions(f"def f():\n{described}{body}")) == ["f"]
    assert long_functions(f"def f():\n{described}{body[10:]}") == {}
