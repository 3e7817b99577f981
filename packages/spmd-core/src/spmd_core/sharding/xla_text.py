"""Writes and reads XLA's text of a sharding, such as `{devices=[2,2]0,1,2,3}`."""

import math
import re
from collections.abc import Sequence

import numpy as np

from spmd_core.errors import PartitionSpecError

REPLICATED = "{replicated}"
MANUAL = "{manual}"
_TILED = re.compile(
    r"^\{devices=\[(?P<tiles>\d+(?:,\d+)*)\]"
    r"(?:<=\[(?P<reshape>\d+(?:,\d+)*)\](?:T\((?P<order>\d+(?:,\d+)*)\))?|(?P<ids>\d+(?:,\d+)*))"
    r"(?P<last> last_tile_dim_replicate"
    r"| last_tile_dims=\{(?P<kinds>(?:replicated|manual)(?:, ?(?:replicated|manual))*)\})?\}$"
)
_MAXIMAL = re.compile(r"^\{maximal device=(\d+)\}$")
_FORMS = (
    "'{devices=[2,2]0,1,2,3}', '{devices=[4,2]<=[8] last_tile_dim_replicate}', '{replicated}', "
    "'{maximal device=0}' or '{manual}'"
)


def tiled(sizes: Sequence[int], device_ids: Sequence[int], *, is_partial: bool) -> str:
    """The text (GSPMD, V1) of a sharding into blocks.

    Args:
        sizes: the number of blocks along each tensor dim; with `is_partial`, one more entry at the
            end: the number of devices that hold each block.
        device_ids: `prod(sizes)` device ids, in the order of the blocks.
        is_partial: whether several devices hold each block.

    Example:
        >>> tiled((2, 1, 2), (0, 2, 1, 3), is_partial=True)
        '{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}'
    """
    suffix = " last_tile_dim_replicate" if is_partial else ""
    return f"{{devices=[{','.join(map(str, sizes))}]{','.join(map(str, device_ids))}{suffix}}}"


def blocks(text: str, *, num_devices: int) -> tuple[np.ndarray, bool]:
    """The devices that hold each block, and whether the text describes a manual sharding.

    Args:
        text: a sharding with a list of device ids (V1) or an iota (V2), or one that is replicated,
            maximal or manual.
        num_devices: number of devices that hold the tensor if the text names none.

    Returns:
        An object array of sorted lists of device ids, and a bool. The array's shape is the number
        of blocks along each tensor dim, or `()` if the tensor is one block.

    Raises:
        PartitionSpecError: the text is no sharding.

    Example:
        >>> blocks("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", num_devices=4)[0].tolist()
        [[[0, 2]], [[1, 3]]]
    """
    stripped = text.strip() if isinstance(text, str) else ""
    if stripped in (REPLICATED, MANUAL):
        return _boxed(np.arange(num_devices)[None], ()), stripped == MANUAL
    maximal = _MAXIMAL.match(stripped)
    if maximal is not None:
        return _boxed(np.array([[int(maximal[1])]]), ()), False
    found = _TILED.match(stripped)
    if found is None:
        raise PartitionSpecError(
            f"a sharding is shown from XLA's text of it; got {text!r}. "
            f"Pass tensor.sharding_spec, or text such as {_FORMS}."
        )
    sizes = ints(found["tiles"])
    last = ["replicated"] if found["last"] else []
    kinds = re.split(", ?", found["kinds"]) if found["kinds"] else last
    tiles = sizes[: len(sizes) - len(kinds)]
    ids = _device_ids(found, sizes, text)
    return _boxed(ids.reshape(math.prod(tiles), -1), tiles), "manual" in kinds


def iota(
    dims: Sequence[int], reshape: Sequence[int] | None = None, order: Sequence[int] | None = None
) -> np.ndarray:
    """The device ids that `[dims]<=[reshape]T(order)` stands for: an int64 array of shape `dims`.

    The numbers 0, 1, 2, ... are shaped as `reshape`, transposed by `order`, and shaped as `dims`.

    Example:
        >>> iota((2, 4), (4, 2), (1, 0)).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    numbers = np.arange(math.prod(dims)).reshape(tuple(reshape or dims))
    if order is None:
        # Without a transpose, the intermediate shape has no effect.
        return numbers.reshape(tuple(dims))
    return numbers.transpose(tuple(order)).reshape(tuple(dims))


def ints(text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list."""
    return tuple(int(n) for n in text.split(",") if n.strip())


def _device_ids(found: re.Match[str], sizes: tuple[int, ...], text: str) -> np.ndarray:
    num = math.prod(sizes)
    if found["ids"]:
        ids = np.array(ints(found["ids"]))
    else:
        reshape = ints(found["reshape"])
        order = ints(found["order"]) if found["order"] else tuple(range(len(reshape)))
        if sorted(order) != list(range(len(reshape))):
            raise PartitionSpecError(
                f"T(...) of a sharding permutes the sizes in front of it; got {text!r} with "
                f"{len(reshape)} sizes. Write each of 0 to {len(reshape) - 1} once."
            )
        ids = iota((math.prod(reshape),), reshape, order)
    different = len(set(ids.tolist()))
    if num == 0 or ids.size != num or different != num:
        raise PartitionSpecError(
            f"a sharding gives each of its blocks devices of its own; got {text!r} with {num} "
            f"places for {different} different devices. "
            "Write as many ids as the sizes multiply to."
        )
    return ids


def _boxed(rows: np.ndarray, tiles: tuple[int, ...]) -> np.ndarray:
    """An object array of shape `tiles` whose elements are the rows, as sorted lists."""
    boxes = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows.tolist()):
        boxes[i] = sorted(row)
    return boxes.reshape(tiles)
