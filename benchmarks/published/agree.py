"""Do two runs of the published plots agree, within the spread that each of them states?

Compares the rows that both folders have, by quantity. Two medians agree if they differ by at most
the root of the sum of their squared spreads, as intervals of independent samples do. Those are
intervals of 95%: one in twenty may lie outside by chance, not more. What a compiler computes has no
spread, and must be equal. What has no spread that is known is left out, such as a ratio that a run
measures only once. Prints what does not agree; exits with 1 if it is computed, or more than chance.

Run: python -m benchmarks.published.agree results/first results/second
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.options import existing
from benchmarks.published.rows import Measured, Quantity, VersionError, read, same_shape
from benchmarks.report import Table

EXIT_DIFFERENT, EXIT_USAGE = 1, 2
BY_CHANCE = 0.05  # the share of measured quantities that may lie outside of their intervals
ROUNDING = 1e-9  # of figures that are computed from measured ones and cancel them


@dataclass(frozen=True)
class Pair:
    """One quantity of a row, as two runs measured it."""

    figure: str
    row: str
    name: str
    first: Quantity
    second: Quantity

    @property
    def agrees(self) -> bool:
        """Whether the medians differ by no more than the two spreads allow."""
        spread = math.hypot(self.first.spread, self.second.spread)
        difference = abs(self.first.median - self.second.median)
        return difference <= spread + ROUNDING * abs(self.first.median)

    @property
    def is_known(self) -> bool:
        """Whether the spread of both is known."""
        return self.first.is_known and self.second.is_known


def pairs(first: Sequence[Measured], second: Sequence[Measured]) -> list[Pair]:
    """The quantities of the rows that both runs finished with the same command."""
    other = {(row.figure, row.name): row for row in second if row.status == "done"}
    found = []
    for row in first:
        same = other.get((row.figure, row.name))
        if row.status != "done" or same is None or not same_shape(same, row):
            continue
        quantities = same.quantities()
        found += [
            Pair(row.figure, row.name, name, quantity, quantities[name])
            for name, quantity in row.quantities().items()
            if name in quantities
        ]
    return [pair for pair in found if pair.is_known]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published.agree",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=existing("folder"), help="a folder with results.json")
    parser.add_argument("second", type=existing("folder"), help="another one")
    options = parser.parse_args(argv)
    try:
        found = pairs(read(options.first), read(options.second))
    except VersionError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if not found:
        print(
            "error: two runs are compared by the rows that both have; got none in common of "
            f"{options.first} and {options.second}. Run the same command into both.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    different = [pair for pair in found if not pair.agrees]
    rows = [
        (
            f"{pair.figure}, {pair.row}: {pair.name}",
            f"{pair.first.median:.4g} ± {pair.first.spread:.2g}",
            f"{pair.second.median:.4g} ± {pair.second.spread:.2g}",
        )
        for pair in different
    ]
    if rows:
        Table("What does not agree", ("quantity", "first", "second"), rows).show()
    computed = [pair for pair in different if not pair.first.is_measured]
    num_measured = sum(pair.first.is_measured for pair in found)
    print(
        f"{len(found) - len(different)} of {len(found)} quantities agree within their spread; "
        f"{num_measured} are measured, of which {BY_CHANCE * num_measured:.0f} may differ by chance"
    )
    more = len(different) - len(computed) > BY_CHANCE * num_measured
    return EXIT_DIFFERENT if computed or more else 0


if __name__ == "__main__":
    sys.exit(main())
