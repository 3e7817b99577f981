"""Checks that a saved state belongs to the data that it is loaded into."""

from collections.abc import Mapping, Sequence
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
        DataError: they differ, or the saved state has no identity.
    """
    if not isinstance(then, Mapping):
        raise DataError(
            f"the state of {who} has a source, a dict; got {then!r}. Pass what state_dict() "
            "returned."
        )
    differing = sorted(key for key in {**now, **then} if now.get(key) != then.get(key))
    if differing:
        raise DataError(
            f"{who} goes on with the data that it began with; got "
            + ", ".join(f"{key} {now.get(key)!r}" for key in differing)
            + ", and in the saved state "
            + ", ".join(f"{key} {then.get(key)!r}" for key in differing)
            + f". {advice}"
        )


def check_counts(state: Mapping[str, Any], keys: Sequence[str], *, who: str) -> None:
    """Raises DataError for a saved number that is no whole number, or is negative."""
    for key in keys:
        value = state[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(
                f"the state of {who} counts its {key} from 0 on; got {value!r}. Pass what "
                "state_dict() returned."
            )
