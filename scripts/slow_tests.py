"""Writes slow_tests.json, the functions that the fast tier leaves out, from what a run measured.

scripts/test.sh --junitxml=run.xml && python scripts/slow_tests.py run.xml

From a quiet machine, with no more workers than cores: a report has seconds of the clock, and those
in which a test waits for a core count, so that a busy run marks about twice as many functions.

Functions are left out by the mean time of their cases, the slowest first, until the others take
what the fast tier may. Nobody reads the list, and a test that is not in it is fast: the fast tier
ends with the names of those that were not.
"""

import argparse
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("slow_tests.json")


def measured(report: Path) -> dict[tuple[str, str], list[float]]:
    """Seconds of each case, by file and function, of a JUnit report."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        function = re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
        found[file, function].append(float(case.get("time", 0)))
    return dict(found)


def chosen(
    seconds: Mapping[tuple[str, str], list[float]], budget_s: float
) -> list[tuple[str, str]]:
    """The functions to leave out, so that the others take at most `budget_s` in one process."""
    left_s = sum(map(sum, seconds.values()))
    slow = []
    for name in sorted(seconds, key=lambda name: -sum(seconds[name]) / len(seconds[name])):
        if left_s <= budget_s:
            break
        slow.append(name)
        left_s -= sum(seconds[name])
    return sorted(slow)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"this is a number of at least 0; got {text!r}. Leave it out for 360"
        )
    return seconds


def main() -> None:
    """Writes the list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="written by pytest --junitxml")
    parser.add_argument(
        "--budget", type=_seconds, default=360.0, help="seconds of what is left (default: 360)"
    )
    options = parser.parse_args()
    if not options.report.is_file():
        parser.error(
            f"the report must be a file; got {options.report}, which is none. Write it with pytest "
            "--junitxml."
        )
    seconds = measured(options.report)
    files = defaultdict(list)
    slow = chosen(seconds, options.budget)
    for file, function in slow:
        files[file].append(function)
    LIST.write_text(json.dumps(files, indent=0) + "\n")
    print(f"{len(slow)} of {len(seconds)} functions are slow")


if __name__ == "__main__":
    main()
