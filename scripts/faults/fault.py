"""A fault: a wrong edit, and what is wrong with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong edit.

    Attributes:
        file: below the sources, such as `spmd_core/graph/storage.py`.
        what: what is wrong then, in at most 70 characters.
        old: a text that occurs exactly once in the file.
        new: what stands in its place.
    """

    file: str
    what: str
    old: str
    new: str
