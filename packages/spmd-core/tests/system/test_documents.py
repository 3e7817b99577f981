"""What the documents point to exists."""

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[4]
# A path in backquotes with a folder or the name of a module or script, or the target of a link.
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|sh|ini|toml))`|`((?:[\w.-]+/)+[\w.-]+\.\w+)`")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_WRITTEN_BY_RUNS = ("results/resnet_spatial",)


def _tracked():
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listing.stdout.split()


def _missing(page, text, tracked):
    """The paths and links of a page that lead nowhere."""
    ends = {f"/{name}" for name in tracked}
    named = [first or second for first, second in _PATH.findall(text)]
    for path in named:
        known = any(end.endswith(f"/{path}") for end in ends)
        if not known and not path.startswith(_WRITTEN_BY_RUNS):
            yield path
    folder = (ROOT / page).parent
    for target in _LINK.findall(text):
        if "://" not in target and not (folder / target).exists():
            yield target


def test_every_path_in_a_document_exists():
    tracked = _tracked()
    pages = [name for name in tracked if PurePosixPath(name).suffix == ".md"]
    assert len(pages) > 20
    missing = {page: [*_missing(page, (ROOT / page).read_text(), tracked)] for page in pages}
    assert {page: paths for page, paths in missing.items() if paths} == {}


def test_what_to_read_first_in_each_folder_exists():
    rows = re.findall(
        r"^\| \d+ \| `(\w+)/` .*\| ([^|]+) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M
    )
    assert len(rows) > 10
    source = ROOT / "packages/spmd-core/src/spmd_core"
    named = [
        source / folder / name for folder, cell in rows for name in re.findall(r"`(.+?)`", cell)
    ]
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize(
    "text",
    ["see `runtime/nowhere.py`", "`nowhere.py`", "[a page](nowhere.md)", "`docs/nowhere.yaml`"],
)
def test_a_path_that_does_not_exist_is_found(text):
    assert [*_missing("README.md", text, ["packages/runtime/devices.py"])]
