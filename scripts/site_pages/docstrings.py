"""Docstrings in Google style as Markdown."""

import inspect
import re

_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples?|Fields):\s*(.*)$")
# The beginning of an item: `name: text`, `*names: text`, or `a, b: text`.
_ITEM = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?): ?(.*)$")
_ITEMISED = ("Args", "Attributes", "Raises", "Fields")


def markdown(doc: str) -> str:
    """The docstring, whose sections are bold words, lists and blocks of code."""
    parts: list[str] = []
    name, lines = "", []
    for line in inspect.cleandoc(doc).splitlines():
        found = _SECTION.match(line)
        if found:
            parts.append(_section(name, lines))
            name, lines = found[1], [found[2]] if found[2] else []
        else:
            lines.append(line)
    parts.append(_section(name, lines))
    return "\n\n".join(part for part in parts if part)


def _section(name: str, lines: list[str]) -> str:
    text = inspect.cleandoc("\n".join(["", *lines])).strip()
    if not text:
        return ""
    if not name:
        return _escaped(text)
    if name.startswith("Example"):
        return f"**{name}**\n\n{_examples(text)}"
    if name in _ITEMISED:
        return f"**{name}**\n\n{_items(text)}"
    return f"**{name}**: {_escaped(text)}"


def _items(text: str) -> str:
    shown: list[str] = []
    for line in text.splitlines():
        found = _ITEM.match(line)
        if found:
            shown.append(f"- `{found[1]}`: {_escaped(found[2])}")
        elif line.startswith(" ") and shown:
            shown.append(f"  {_escaped(line.strip())}")
        else:
            shown.append(_escaped(line))
    return "\n".join(shown)


def _examples(text: str) -> str:
    """Sessions are blocks of code; what stands between them is text."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        is_code = block.lstrip().startswith(">>>") or block.startswith("    ")
        blocks.append(f"```pycon\n{inspect.cleandoc(block)}\n```" if is_code else _escaped(block))
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    """Angle brackets and stars are no markup, but in code; indented blocks are code."""
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):
            lines.append(line)
            continue
        pieces = re.split(r"(`+[^`]*`+)", line)
        lines.append(
            "".join(
                piece if piece.startswith("`") else re.sub(r"([<*\[\]|$])", r"\\\1", piece)
                for piece in pieces
            )
        )
    return "\n".join(lines)
