"""FLOPs of the matrix products and convolutions of a compiled module, from XLA's text of it.

XLA's cost analysis counts the body of a loop once, however often it runs. `repeated` counts the
further runs, and `total` all of them.
"""

import math
import re

import numpy as np

from spmd_core.debugging import hlo_text
from spmd_core.debugging.hlo_text import Instruction

# Library calls for matrix products and convolutions, whose sizes have no common form in the text.
_LIBRARY_CALL = re.compile(r'custom_call_target="(__cublas|__cudnn|__onednn|tpu_custom_call)')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_FACTORS = {"true_computation": 1, "false_computation": 1, "branch_computations": 1}


def repeated(text: str) -> float | None:
    """The FLOPs of products and convolutions in the second and later runs of loops' bodies.

    For each device. Other operations of a loop's body, such as sums, are counted once, as by XLA.

    Args:
        text: the optimised module.

    Returns:
        None if a loop with products has an unknown length, or calls a library for them.
    """
    computations, entry = hlo_text.parse(text)
    # XLA's analysis counts a loop's body once, and the branch with the most FLOPs.
    once = hlo_text.executions(computations, entry, per_call=lambda role, length: 1)
    always = hlo_text.executions(computations, entry, per_call=_per_call)
    total = 0.0
    for name, instructions in computations.items():
        often, counted = always[name], once[name]
        assert counted is not None
        if often == counted:
            continue
        for instruction in instructions.values():
            flops = _flops(instruction, instructions)
            if flops is None or (flops and often is None):
                return None
            if flops and often is not None:
                total += flops * (often - counted)
    return total


def total(text: str) -> float:
    """The FLOPs of all products and convolutions, in all runs of loops' bodies.

    For each device, and a lower bound: a loop of unknown length counts once; branches and library
    calls are not counted.

    Args:
        text: the optimised module.
    """
    computations, entry = hlo_text.parse(text)
    always = hlo_text.executions(
        computations,
        entry,
        per_call=lambda role, length: (
            0 if role in _FACTORS else hlo_text.executions_per_call(role, length or 1)
        ),
    )
    return sum(
        (_flops(instruction, instructions) or 0.0) * (always[name] or 0)
        for name, instructions in computations.items()
        for instruction in instructions.values()
    )


def _per_call(role: str, length: int | None) -> int | None:
    return _FACTORS.get(role) or hlo_text.executions_per_call(role, length)


def _flops(instruction: Instruction, computation: dict[str, Instruction]) -> float | None:
    """FLOPs of one run of an instruction; None if they are not known."""
    if instruction.opcode == "dot":
        lhs = _dims(computation[instruction.operands[0]].type)
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [] if found is None else [int(n) for n in found[1].split(",") if n]
        return 2.0 * math.prod(_dims(instruction.type)) * math.prod(lhs[n] for n in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    if instruction.opcode == "custom-call" and _LIBRARY_CALL.search(instruction.attributes):
        return None
    return 0.0


def _convolution_flops(
    instruction: Instruction, computation: dict[str, Instruction]
) -> float | None:
    """As XLA counts them: without the products with padding, or with the holes of a dilation."""
    labels = _DIM_LABELS.search(instruction.attributes)
    if labels is None:
        return None
    image, kernel = (_dims(computation[name].type) for name in instruction.operands[:2])
    result = _dims(instruction.type)
    window = _window(instruction.attributes)
    sizes = dict(zip(labels[2], kernel))
    flops = 2.0 * sizes["i"] * math.prod(n for n, label in zip(result, labels[3]) if label in "bf")
    for label, image_size in zip(labels[1], image):
        if label.isdigit():
            out = result[labels[3].index(label)]
            flops *= _valid(image_size, sizes[label], out, window, int(label))
    return flops


def _window(attributes: str) -> dict[str, list[str]]:
    """The parts of `window={size=3x3 pad=1_1x0_0 stride=2x2}`, for each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = [] if found is None else [part.split("=") for part in found[1].split()]
    return {name: values.split("x") for name, values in parts}


def _valid(
    image_size: int, kernel_size: int, out_size: int, window: dict[str, list[str]], dim: int
) -> int:
    """The number of pairs of result and kernel positions that read an element of the image."""

    def of(name: str, default: str) -> str:
        return window[name][dim] if name in window else default

    low = int(of("pad", "0_0").split("_")[0])
    stride, image_step, kernel_step = (
        int(of(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    starts = np.arange(out_size) * stride - low
    positions = starts[:, None] + np.arange(kernel_size) * kernel_step
    inside = (positions >= 0) & (positions < (image_size - 1) * image_step + 1)
    return int((inside & (positions % image_step == 0)).sum())


def _dims(type_text: str) -> tuple[int, ...]:
    """The dims of the first array of a type such as `f32[8,4]{1,0}`."""
    found = hlo_text.ARRAY.search(type_text)
    assert found is not None, type_text
    return tuple(int(n.lstrip("<=")) for n in found["dims"].split(",") if n)
