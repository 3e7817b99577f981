"""A console as wide as the terminal; without one, as wide as what is printed."""

import os

from rich.console import Console

# Lines of a file and of a pipe have no width. Tables take what they need of this.
_UNBOUNDED = 1 << 16


def console() -> Console:
    """rich's console for this process's output; `COLUMNS` in the environment sets its width."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_UNBOUNDED)
