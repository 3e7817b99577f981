"""Checks that a saved state belongs to the data that it is loaded into."""

from collections.abc import Mapping
from typing import Any

from spmd_core.errors import DataError


def check_same(now: Mapping[str, Any], then: Mapping[str, Any], *, who: str, advice: str) -> None:
    """Compares the identity of a loader's or sampler's data with that of a saved state.

    Args:
        now: by name; of what the state is loaded into.
        then: of the saved state.
        who: "a loader", as the error says.
        advice: the error's last sentence.

    Raises:
        DataError: they differ.
    """
    differing = sorted(key for key in {**now, **then} if now.get(key) != then.get(key))
    if differing:
        raise DataError(
            f"{who} goes on with the data that it began with; got "
            + ", ".join(f"{key} {now.get(key)!r}" for key in differing)
            + ", and in the saved state "
            + ", ".join(f"{key} {then.get(key)!r}" for key in differing)
            + f". {advice}"
        )
