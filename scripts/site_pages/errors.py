"""The glossary of errors: each class, and the messages that it is raised with."""

import inspect
import re
from collections.abc import Sequence

from scripts.site_pages.messages import Message, messages
from spmd_core import errors
from spmd_data import MissingShardingError


def page() -> str:
    """A section for each class: ours in the order of `errors.py`, then Python's, then warnings."""
    found = messages()
    own = [name for name, value in vars(errors).items() if _is_error(value)]
    own.append(MissingShardingError.__name__)
    others = sorted({one.kind for one in found} - {*own, "Warning"})
    parts = [_contents([*own, *others, "Warning"], found)]
    for name in own:
        kind = getattr(errors, name, MissingShardingError)
        bases = [base.__name__ for base in kind.__bases__ if base.__name__ != "SpmdError"]
        also = f" Also a {' and a '.join(bases)}." if name != "SpmdError" and bases else ""
        parts.append(_section(name, f"{inspect.getdoc(kind)}{also}", found))
    parts += [_section(name, "Python's own.", found) for name in others]
    parts.append(_section("Warning", "What is warned of, and goes on.", found))
    return "\n".join(parts)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _contents(names: list[str], found: Sequence[Message]) -> str:
    counts = {name: sum(one.kind == name for one in found) for name in names}
    listed = ", ".join(
        f"[{name}](#{_anchor(name)}) ({count})" for name, count in counts.items() if count
    )
    return f"{sum(counts.values())} messages: {listed}.\n"


def _anchor(name: str) -> str:
    return name.lower()


def _section(name: str, text: str, found: Sequence[Message]) -> str:
    shown = [f"## {name}\n\n{text}\n"]
    # Texts that differ in what was got are one entry.
    entries: dict[tuple[str, str, str], list[str]] = {}
    for message in (one for one in found if one.kind == name):
        rule, got, cure = (_escaped(part) for part in message.parts())
        entries.setdefault((rule, cure, message.source), []).append(got)
    for (rule, cure, source), gots in entries.items():
        lines = [f"*got* {got}" for got in gots if got]
        lines += [f"*do:* {cure}"] if cure else []
        lines.append(f"`{source}`{{.source}}")
        shown.append(f"**{rule}**\n: " + "\\\n  ".join(lines) + "\n")
    return "\n".join(shown)


def _escaped(text: str) -> str:
    """The text of a message as Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|$~])", r"\\\1", text.strip().rstrip("."))
