"""The fields of `spmd_core.config`, with the comments that describe them, defaults and types."""

import ast
import re
from pathlib import Path

from spmd_core.config import Config

ROOT = Path(__file__).parents[2]
_SOURCE = ROOT / "packages/spmd-core/src/spmd_core/config.py"


def page() -> str:
    """A definition for each field, in the order of the class."""
    lines = _SOURCE.read_text().splitlines()
    (body,) = [
        node.body
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.ClassDef) and node.name == Config.__name__
    ]
    shown = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation)
            default = ast.unparse(node.value) if node.value else ""
            default = "{}" if default.startswith("field(") else default.replace(" ** ", "**")
            text = " ".join(_comment_above(lines, node.lineno - 1))
            shown.append(
                f":::{{py:attribute}} spmd_core.config.{node.target.id}\n:type: {kind}\n"
                f":value: {default}\n\n{_code(text)}\n:::\n"
            )
    return "\n".join(shown)


def variables_read() -> set[str]:
    """The environment variables with our prefix that the sources of `spmd_core` mention."""
    names: set[str] = set()
    for path in _SOURCE.parent.rglob("*.py"):
        names |= set(re.findall(r"\bSPMD_[A-Z][A-Z_]+\b", path.read_text()))
    return names


def _comment_above(lines: list[str], at: int) -> list[str]:
    """The lines of the comment that ends above line number `at`, counted from 0."""
    start = at
    while lines[start - 1].strip().startswith("#"):
        start -= 1
    return [line.strip().removeprefix("#").strip() for line in lines[start:at]]


def _code(text: str) -> str:
    """Names of variables and settings in the text as code."""
    return re.sub(r"(?<![`\w\"])((?:SPMD|XLA)_[A-Z_]+(?:=\d)?)", r"`\1`", text)
