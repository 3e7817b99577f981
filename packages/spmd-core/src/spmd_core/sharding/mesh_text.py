"""The mesh that a text of a command line describes, such as "data=2,fsdp=4"."""

import math
import re

from spmd_core.arguments import require_int
from spmd_core.errors import MeshError
from spmd_core.sharding.mesh import Mesh, listed

_SIZE = re.compile("0*[1-9][0-9]{0,8}")


def parse_mesh(text: str, num_devices: int) -> Mesh:
    """The mesh that a command-line text describes, over all devices in order.

    Args:
        text: axes in mesh order, `"name=size"` separated by commas. One size may be -1 or `*`: the
            number of devices divided by the product of the other sizes.
        num_devices: number of devices, all of which the mesh must use.

    Raises:
        MeshError: the text cannot be read, or its sizes do not multiply to `num_devices`.

    Example:
        >>> parse_mesh("data=2,fsdp=*", num_devices=8)
        Mesh(range(0, 8), (2, 4), ('data', 'fsdp'))
    """
    if not isinstance(text, str):
        raise TypeError(
            "a mesh is described by a text, such as 'data=2,model=4'; "
            f"got {text!r}, of type {type(text).__name__}. Write it as a text."
        )
    if require_int("num_devices", num_devices) < 1:
        raise MeshError(
            f"a mesh needs at least 1 device; got {num_devices} devices for {text!r}. "
            "Start the program with devices."
        )
    parsed = [_parsed_axis(part, text, num_devices) for part in text.split(",")]
    axes = dict(parsed)
    if len(axes) != len(parsed):
        raise MeshError(
            f"each mesh axis must be named once; got {text!r}. "
            f"Give every axis its own name, such as 'data={num_devices},model=1'."
        )
    free = [name for name, size in axes.items() if size is None]
    if len(free) > 1:
        raise MeshError(
            f"at most one axis may take the rest of the devices; got {listed(free)} in {text!r}. "
            f"Give the others a size, such as {_fitting_mesh(axes, num_devices)!r}."
        )
    known = math.prod(size for size in axes.values() if size is not None)
    if num_devices % known if free else num_devices != known:
        rule = "divide" if free else "multiply to"
        raise MeshError(
            f"the sizes of the mesh axes must {rule} the number of devices, {num_devices}; "
            f"got {text!r}, whose product is {known}. "
            f"Write for instance {_fitting_mesh(axes, num_devices)!r}, "
            "or start the program with another number of devices."
        )
    shape = tuple(num_devices // known if size is None else size for size in axes.values())
    return Mesh(range(num_devices), shape, tuple(axes))


def _parsed_axis(part: str, text: str, num_devices: int) -> tuple[str, int | None]:
    """`("data", 2)` for `"data=2"`; the size is None for -1 or `*`."""
    name, separator, size = (piece.strip() for piece in part.partition("="))
    is_rest = size in ("-1", "*")
    if not name or not separator or not (is_rest or _SIZE.fullmatch(size)):
        raise MeshError(
            "a mesh is written as axes 'name=size' separated by commas, "
            "where a size is a positive number, or -1 or * for the rest; "
            f"got {part!r} in {text!r}. Write for instance 'data={num_devices}'."
        )
    return name, None if is_rest else int(size)


def _fitting_mesh(axes: dict[str, int | None], num_devices: int) -> str:
    """A mesh text with the same axis names whose sizes multiply to `num_devices`.

    Changes one size if that is enough (the last possible one); else puts all devices on the first
    axis.
    """
    names = list(axes)
    sizes = [1 if size is None else size for size in axes.values()]
    for position in reversed(range(len(sizes))):
        others = math.prod(sizes) // sizes[position]
        if num_devices % others == 0:
            sizes[position] = num_devices // others
            break
    else:
        sizes = [num_devices] + [1] * (len(sizes) - 1)
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
