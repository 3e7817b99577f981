"""Beside the site's pages: `llms.txt`, `llms-full.txt`, and a page that leads to the front."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FRONT = """<!doctype html>
<meta charset="utf-8">
<title>PyTorch SPMD</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">PyTorch SPMD</a>
"""


def write(out: Path, env: Any, root: Path, with_made: Callable[[str], str]) -> None:
    """Writes the three files into the folder of the built site.

    `llms.txt` has a line for each page of the tables of contents, with its first sentence;
    `llms-full.txt` has the text of all of them, as the files have it, with what is made.

    Args:
        out: the folder.
        env: Sphinx's environment, which knows the tables of contents.
        root: the repository.
        with_made: puts what is made from sources into the text of a page.
    """
    (out / "index.html").write_text(_FRONT)
    names = _in_order(env, env.config.root_doc)
    short = [
        "# PyTorch SPMD on stock torch and jaxlib",
        "",
        f"> {_first_paragraph(root / 'README.md')}",
        "",
    ]
    whole = []
    for name in names:
        path = Path(env.doc2path(name))
        title = env.titles[name].astext() if name in env.titles else name
        short.append(f"- [{title}]({name}.html): {_summary(path)}")
        whole.append(f"<!-- {name}.md -->\n\n{with_made(path.read_text()).strip()}\n")
    (out / "llms.txt").write_text("\n".join(short) + "\n")
    (out / "llms-full.txt").write_text("\n\n".join(whole))


def _in_order(env: Any, root: str) -> list[str]:
    """The pages in the order of the tables of contents, each once."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in found:
            found[name] = None
            for child in env.toctree_includes.get(name, ()):
                visit(child)

    visit(root)
    return [*found]


def _summary(path: Path) -> str:
    """The first sentence of the first paragraph."""
    return re.split(r"(?<=[.!?])\s", _first_paragraph(path), maxsplit=1)[0]


def _first_paragraph(path: Path) -> str:
    """The first one that is no heading, code or table, in one line."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)
    text = re.sub(r"^(```+|:::+)[^\n]*\n.*?^\1$", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n", text):
        if block.strip() and not re.match(r"\s*(#|<|!|\||-|:|\()", block):
            return " ".join(block.split())
    return ""
