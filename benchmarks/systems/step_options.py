"""The command line of the programs of this folder, read without a framework.

The interpreters of other systems run these files by their path. So they import nothing of this
project, and the folder is no package.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

_LANGUAGE = {"layers": 4, "width": 256, "heads": 4, "vocab": 2048, "seq": 256, "batch": 8}
SIZES = {"gpt2": _LANGUAGE, "llama": _LANGUAGE, "resnet": {"image": 64, "batch": 16}}


def _count(text: str) -> int:
    # Not that of benchmarks/options.py: other interpreters run these files alone.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"this is a whole number of at least 1; got {text!r}. Write for instance 8"
        )
    return int(text)


def read(
    doc: str | None, recipes: Sequence[str], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a program that trains these recipes: `recipe`, its sizes, `steps`, `results`.

    Args:
        doc: the program's own text.
        recipes: names of `SIZES`; the first is the default.
        words: of the command line; None reads this process's.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--recipe", choices=recipes, default=recipes[0])
    for name in sorted({name for recipe in recipes for name in SIZES[recipe]}):
        defaults = [f"{SIZES[r][name]} of {r}" for r in recipes if name in SIZES[r]]
        made.add_argument(f"--{name}", type=_count, help=f"(default: {', '.join(defaults)})")
    made.add_argument("--steps", type=_count, default=10, help="measured steps (default: 10)")
    made.add_argument("--results", type=Path, required=True, help="file for the figures as JSON")
    args = made.parse_args(words)
    sizes = SIZES[args.recipe]
    for name in {name for recipe in recipes for name in SIZES[recipe]}:
        if name not in sizes and getattr(args, name) is not None:
            made.error(
                f"--{name} is no size of {args.recipe}, whose sizes are {', '.join(sizes)}. "
                "Leave it out."
            )
        if getattr(args, name) is None:
            setattr(args, name, sizes.get(name))
    return args
