"""What the sizes of a model's preset must be, checked where they are written."""

import dataclasses
import math
from typing import Any

from examples.training.knobs import KnobError, nearest_multiple


def check_sizes(preset: Any) -> None:
    """Checks that each number of a preset is one that a model or a run can have.

    Args:
        preset: a dataclass with a field `name`; its fields of type int are counts, those of type
            float are above 0.

    Raises:
        KnobError: a count is no whole number of at least 1, or another number is not above 0.
    """
    for field in dataclasses.fields(preset):
        value, kind = getattr(preset, field.name), field.type
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        example: float
        if kind is int and not (is_number and isinstance(value, int) and value >= 1):
            rule, example = "a whole number of at least 1", 8
        elif kind is float and not (is_number and math.isfinite(value) and value > 0):
            rule, example = "a number above 0", 0.001
        else:
            continue
        raise KnobError(
            f"{field.name} of the preset {preset.name!r} must be {rule}; got {value!r}. Write for "
            f"instance {field.name}={example}."
        )


def check_divides(preset: Any, part: str, whole: str) -> None:
    """Checks that one count of a preset divides another.

    Args:
        preset: a dataclass with a field `name`.
        part, whole: the names of its fields.

    Raises:
        KnobError: it does not.
    """
    by, of = getattr(preset, part), getattr(preset, whole)
    if of % by:
        raise KnobError(
            f"{part} of the preset {preset.name!r} must divide {whole}; got {by} for {of}. Write "
            f"for instance {whole}={nearest_multiple(of, by)}."
        )
