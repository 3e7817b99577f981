"""Writes slow_tests.txt, the tests that the fast tier leaves out, from what a run measured.

scripts/test.sh --junitxml=run.xml && python scripts/slow_tests.py run.xml
"""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "slow_tests.txt"


def measured(path: Path) -> dict[tuple[str, str], float]:
    """Seconds of each test of a JUnit report, by class name (dotted path) and name."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return {(c.get("classname", ""), c.get("name", "")): float(c.get("time", 0)) for c in cases}


def collected() -> list[str]:
    """The ids of all tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def main() -> None:
    """Writes the list and says what is left for the fast tier."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="written by pytest --junitxml")
    parser.add_argument("--over", type=float, default=0.4, help="seconds (default: 0.4)")
    options = parser.parse_args()
    seconds = measured(options.report)
    slow, left = [], 0.0
    for test in collected():
        path, name = test.split("::", 1)
        took = seconds.get((path.removesuffix(".py").replace("/", "."), name), 0.0)
        if took > options.over:
            slow.append(test)
        else:
            left += took
    LIST.write_text("\n".join(sorted(slow)) + "\n")
    print(f"{len(slow)} tests are slow; the others take {left:.0f} s in all")


if __name__ == "__main__":
    main()
