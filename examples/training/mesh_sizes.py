"""The axes and sizes of a mesh as --mesh writes them, read without a framework."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from examples.training.knobs import KnobError, nearest_multiple

# By the axes' names, or their numbers, as a mesh has them. None is the size of an axis that takes
# the rest of the devices, where their number is not known.
Sizes = Mapping[Any, int | None]
_SIZE = re.compile("0*[1-9][0-9]{0,8}")
_REST = ("-1", "*")


def mesh_sizes(text: str, *, num_emulated: int = 0, example: str = "data") -> dict[str, int | None]:
    """The size of each axis that --mesh names; it takes what `spmd.parse_mesh` takes.

    Args:
        text: what --mesh was given; empty: no axes.
        num_emulated: the number of devices, if --devices names one; 0: not known.
        example: an axis to name in an error.

    Raises:
        KnobError: the text is not a mesh, or one of another number of devices.
    """
    sizes: dict[str, int | None] = {}
    for part in text.split(",") if text else ():
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (name and equals) or (size not in _REST and not _SIZE.fullmatch(size)):
            raise KnobError(
                "--mesh is written as axes name=size with commas between them, where a size is a "
                "number of at least 1, or * for the rest of the devices; got "
                f"{part!r} in {text!r}. Write for instance --mesh {example}={num_emulated or 8}."
            )
        if name in sizes:
            raise KnobError(
                f"--mesh names each axis once; got {name!r} twice in {text!r}. Rename one of them, "
                "or leave it out."
            )
        sizes[name] = None if size in _REST else int(size)
    rests = [name for name, size in sizes.items() if size is None]
    if len(rests) > 1:
        raise KnobError(
            f"one axis of --mesh may take the rest of the devices; got {' and '.join(rests)} in "
            f"{text!r}. Give all but one a size."
        )
    if num_emulated and sizes:
        known = num_devices(sizes)
        if num_emulated % known if rests else num_emulated != known:
            raise wrong_product(text, sizes, num_emulated, is_emulated=True)
        for name in rests:
            sizes[name] = num_emulated // known
    return sizes


def num_devices(sizes: Sizes) -> int:
    """The product of the sizes that are known."""
    product = 1
    for size in sizes.values():
        product *= size or 1
    return product


def wrong_product(text: str, sizes: Sizes, available: int, *, is_emulated: bool) -> KnobError:
    """What to say of a mesh of another number of CPU devices than there are.

    Args:
        text: what --mesh was given.
        sizes: of its axes.
        available: the number of devices.
        is_emulated: whether --devices said it.
    """
    needed = num_devices(sizes)
    if None in sizes.values():
        rule, takes = "divide", f"a multiple of {needed}"
        advice = f"--devices {nearest_multiple(available, needed)}"
    else:
        rule, takes = "multiply to", str(needed)
        advice = f"--devices {needed}, which emulates them"
    other = f", or let the sizes {rule} {available}" if available > 1 else ""
    return KnobError(
        f"the sizes of --mesh must {rule} the number of devices; got {text!r}, which takes {takes},"
        f" and {available} CPU device{'s' if available > 1 else ''}. "
        f"{'Pass' if is_emulated else 'Add'} {advice}{other}."
    )


def check_axes(text: str, sizes: Sizes, known: Sequence[str], *, option: str = "") -> None:
    """Checks that the shardings know each axis.

    Args:
        text: what --mesh was given.
        sizes: of its axes.
        known: the names of axes.
        option: the option that decides which are known, such as "--strategy fsdp"; empty: none.

    Raises:
        KnobError: an axis has another name.
    """
    unknown = [axis for axis in sizes if axis not in known]
    if unknown:
        given = f"with {option} " if option else ""
        other = f", or take another {option.partition(' ')[0]}" if option else ""
        raise KnobError(
            f"{given}mesh axes must be among {', '.join(known)}; got {unknown} in {text!r}. "
            f"Rename them{other}."
        )


def check_heads(by: int, num_heads: int, *, of: str, other: str) -> None:
    """Checks that the axis tensor divides the attention heads.

    Args:
        by: the axis's size.
        num_heads: the model's.
        of: the model's name.
        other: what else to change, such as "another preset".

    Raises:
        KnobError: it does not.
    """
    if num_heads % by:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise KnobError(
            f"the axis tensor splits attention by heads, whose number it must divide; got "
            f"tensor={by} for the {num_heads} heads of {of}. Pass one of tensor="
            f"{', '.join(map(str, fitting))}, or {other}."
        )
