"""How Sphinx builds the site: `scripts/docs.sh` calls it with the repository as its source folder.

The source folder is the whole repository, so that a link between two documents is right in a
clone, where people read the files, and on the site. A line `<!-- made by: NAME -->` of a page is
replaced with what `scripts/site_pages` writes at build time.
"""

import functools
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = [
    str(ROOT),
    *(str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")),
]
sys.path[:0] = _SOURCES

from scripts.site_pages import PAGES, text_forms  # noqa: E402 - needs the path above

project = "PyTorch SPMD"
author = "the authors of spmd-core"
copyright = "the authors; Apache-2.0"
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "*.md",
    "packages/*/README.md",
    "examples/*/README.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
]
exclude_patterns = [".*", "**/.*", "build", "dist", "results", "runs", "**/tests", "**/src"]
source_suffix = {".md": "myst-nb"}

# --- Pages: MyST, whose links and anchors are checked ---------------------------------------------
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
smartquotes = False  # the texts of errors and settings are to be searched for as they are
nitpicky = True
# Names of types in signatures are texts: most are torch's, whose pages the build does not read.
nitpick_ignore_regex = [("py:.*", ".*")]
python_display_short_literal_types = True
add_module_names = False
maximum_signature_line_length = 88

# --- Notebooks: run by the build, and again where their text has changed -------------------------
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/notebooks")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Their kernel is this Python, whatever kernels the user has, with the packages of this clone.
_KERNEL = ROOT / "build/jupyter/kernels/python3/kernel.json"
_KERNEL.parent.mkdir(parents=True, exist_ok=True)
_KERNEL.write_text(
    json.dumps(
        {
            "argv": [
                *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
                "--log-level=ERROR",
            ],
            "display_name": "Python 3",
            "language": "python",
            "env": {"PYTHONPATH": os.pathsep.join(_SOURCES)},
        }
    )
)
os.environ["JUPYTER_PATH"] = str(ROOT / "build/jupyter")

# --- Looks ----------------------------------------------------------------------------------------
html_theme = "furo"
html_title = "PyTorch SPMD"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ea", "color-brand-content": "#8fbcf0"},
}

# Lines of a table of contents that are left out while their page is not there.
_WHERE_THERE = ("../auto_sharding",)
_MADE_BY = re.compile(r"^<!-- made by: (\w+) -->$", re.M)


@functools.cache
def _part(name):
    return PAGES[name]()


def _with_made(text):
    return _MADE_BY.sub(lambda found: _part(found[1]), text)


def _made(app, docname, source):
    """Replaces each line that names a function of `scripts/site_pages` with what that writes."""
    source[0] = _with_made(source[0])
    for name in _WHERE_THERE:
        if not (ROOT / "docs/guides" / f"{name}.md").exists():
            source[0] = source[0].replace(f"\n{name}\n", "\n")


def _outdated(app, env, added, changed, removed):
    """The pages that are made: from sources, whose changes Sphinx does not see."""
    return [
        name
        for name in env.found_docs
        if name.startswith("docs/reference/")
        and _MADE_BY.search(Path(env.doc2path(name)).read_text())
    ]


def _write_text_forms(app, error):
    """Beside the pages of the site, their text in two files, and a page that leads to the front."""
    if error is None and app.builder.format == "html":
        text_forms.write(Path(app.outdir), app.env, ROOT, _with_made)


def setup(app):
    """Sphinx calls it once, before it reads the pages."""
    app.connect("source-read", _made)
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _write_text_forms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
