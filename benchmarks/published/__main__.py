"""Measures the published plots again: the announcement's three figures, Llama, and overheads.

Each measurement is a command of its own, one at a time. What is finished is kept at once: after
Ctrl-C, the same command with the same --out goes on. A row that fails is reported with its reason,
and the others go on.

Run: scripts/bench.sh, or python -m benchmarks.published --only gpt2,llama
"""

import sys

from benchmarks.published import gpt2, hbm, llama, overheads, resnet
from benchmarks.published.command import main

FIGURES = tuple(module.FIGURE for module in (gpt2, hbm, resnet, llama, overheads))

if __name__ == "__main__":
    sys.exit(main(FIGURES, __doc__))
