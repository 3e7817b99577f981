"""Beside the site's pages: `llms.txt`, `llms-full.txt`, and a page that leads to the front."""

import re
from pathlib import Path
from typing import Any

_FRONT = """<!doctype html>
<meta charset="utf-8">
<title>PyTorch SPMD</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">PyTorch SPMD</a>
"""


def write(out: Path, env: Any, root: Path) -> None:
    """Writes the three files into the folder of the built site.

    `llms.txt` has a line for each page of the tables of contents, with its first sentence;
    `llms-full.txt` has the text of all of them, as the files have it.
    """
    (out / "index.html").write_text(_FRONT)
    names = _in_order(env, env.config.root_doc)
    short = [
        "# PyTorch SPMD on stock torch and jaxlib",
        "",
        f"> {_summary(root / 'README.md')}",
        "",
    ]
    whole = []
    for name in names:
        path = Path(env.doc2path(name))
        title = env.titles[name].astext() if name in env.titles else name
        short.append(f"- [{title}]({name}.html): {_summary(path)}")
        whole.append(f"<!-- {name}.md -->\n\n{path.read_text().strip()}\n")
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
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)
    for block in re.split(r"\n\s*\n", text):
        block = block.strip()
        if block and not re.match(r"[#<!:`|(+{-]", block):
            return " ".join(re.split(r"(?<=[.!?:])\s", " ".join(block.split()))[:1])
    return ""
