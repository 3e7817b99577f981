"""Which results are there, of which date, sources and hardware? Writes results/README.md.

A benchmark that writes its results writes the table, too.

Run: python -m benchmarks.index             writes the table
     python -m benchmarks.index --check     fails if it differs from what would be written
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = "README.md"
_HEAD = """# Results

What the benchmarks wrote here, the newest first. The commit is the last one of the sources that
were measured, and the hardware that of the machine that ran the benchmark; what is compiled for
other chips says so. `python -m benchmarks.check` compares a new run with these by ratio, and a
folder of `scripts/bench.sh` with the whole quick run in `quick/results.json`.

| result | date | commit | hardware | torch, jax |
|---|---|---|---|---|
"""


def page(folder: Path) -> str:
    """The table of the results in a folder, as Markdown."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        table = path.with_suffix(".md")
        if isinstance(found, dict) and "environment" in found and table.exists():
            title = table.read_text().partition("\n")[0].removeprefix("# ")
            rows.append((found["environment"], f"[{title}]({table.name})"))
    rows.sort(key=lambda row: row[0]["date"], reverse=True)
    return _HEAD + "".join(f"| {link} | {_place(of)} |\n" for of, link in rows)


def _place(of: dict[str, Any]) -> str:
    hardware = [of["cpu"]] if "cpu" in of else []
    hardware.append(f"{of['cores']} cores")
    if "memory_bytes" in of:
        hardware.append(f"{of['memory_bytes'] / 2**30:.0f} GiB")
    cells = (of["date"], of["commit"], ", ".join(hardware), f"{of['torch']}, {of['jax']}")
    return " | ".join(cells)


def write(folder: Path) -> None:
    """Writes the table into the folder."""
    (folder / PAGE).write_text(page(folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    check = parser.parse_args().check
    if not check:
        write(RESULTS)
    elif (RESULTS / PAGE).read_text() != page(RESULTS):
        print(f"{RESULTS / PAGE} is not of these results: run python -m benchmarks.index")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
