"""A planned program's FLOPs and bytes, and the bounds on time by its devices' data sheets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmd_core.debugging.communication import Collective, Collectives
from spmd_core.graph.values import Spec
from spmd_core.planner.parts import Roles
from spmd_core.planner.topology import Topology
from spmd_core.program.program import Program
from spmd_core.program.program_graph import Graph
from spmd_core.source_lines import Phase

_Shapes = Sequence[tuple[int, ...]]


def _mm(inputs: _Shapes, outs: _Shapes) -> int:
    # The last two inputs are the factors; addmm and baddbmm have a summand before them.
    return 2 * math.prod(outs[0]) * inputs[-2][-1]


def _linear(inputs: _Shapes, outs: _Shapes) -> int:
    return 2 * math.prod(outs[0]) * inputs[0][-1]


def _linear_backward(inputs: _Shapes, outs: _Shapes) -> int:
    """Products of the gradient with the weight and with the input; a bias's gradient is a sum."""
    x, weight = inputs[0], inputs[2] if len(inputs) > 2 else inputs[1]
    return sum(2 * math.prod(x[:-1]) * math.prod(weight) for out in outs if len(out) > 1)


def _convolution(inputs: _Shapes, outs: _Shapes) -> int:
    x, weight, out = inputs[0], inputs[1], outs[0]
    # The weight's first dim is the result's channels; of a transposed convolution, the input's.
    wide = out if weight[0] == out[1] else x
    return 2 * math.prod(wide) * math.prod(weight[1:])


def _convolution_backward(inputs: _Shapes, outs: _Shapes) -> int:
    grad, x, weight = inputs[0], inputs[1], inputs[2]
    products = sum(len(out) > 1 for out in outs)
    return products * _convolution((x, weight), (grad,))


def _attention(inputs: _Shapes, outs: _Shapes) -> int:
    query, key, value = inputs[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(inputs: _Shapes, outs: _Shapes) -> int:
    """Two products for each of forward's; computing the scores again is not the model's work."""
    return 2 * _attention(inputs[1:4], outs)


def _class_sums(inputs: _Shapes, outs: _Shapes) -> int:
    x, weight = inputs[:2]
    return 2 * math.prod(x) * weight[0]


def _class_sums_backward(inputs: _Shapes, outs: _Shapes) -> int:
    """The gradients of the rows and of the weight; behind two gradients come x and weight."""
    return sum(_class_sums(inputs[2:4], ()) for out in outs if len(out) > 1)


_FORMULAS: dict[str, Callable[[_Shapes, _Shapes], int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), _mm),
    "aten::linear": _linear,
    "aten::linear_backward": _linear_backward,
    **dict.fromkeys(("aten::convolution", "aten::convolution_overrideable"), _convolution),
    **dict.fromkeys(
        ("aten::convolution_backward", "aten::convolution_backward_overrideable"),
        _convolution_backward,
    ),
    "spmd::attention": _attention,
    "spmd::attention.lse": _attention,
    "spmd::attention_backward": _attention_backward,
    "spmd::class_sums": _class_sums,
    "spmd::class_sums_backward": _class_sums_backward,
}


@dataclass(frozen=True)
class Costs:
    """What a program computes and moves; times are bounds that no schedule beats: *modelled*.

    Attributes:
        model_flops: of products, convolutions and attention, over all devices, as recorded, without
            what is computed again in backward.
        recomputed_flops: of what is computed again.
        compiler_flops: of one device, as XLA counts them; its custom kernels count nothing.
        compiler_bytes: that the instructions of one device read and write, as XLA counts them.
        least_bytes: that one device must read and write: each argument and each result once.
        ici_bytes, dcn_bytes: that one device sends over the chips' links and over the network
            between slices, by the algorithm on a ring.
        compute_s: all FLOPs at the chip's peak; None for CPUs, as are all times.
        memory_s: `least_bytes` at the memory's bandwidth.
        ici_s, dcn_s: the bytes at the bandwidth of all links; None where none is published.
        bound_s: the largest of these.
        mfu_bound: the model FLOPs in `bound_s`, as a part of the devices' peak.
    """

    model_flops: int
    recomputed_flops: int
    compiler_flops: float
    compiler_bytes: float
    least_bytes: int
    ici_bytes: float
    dcn_bytes: float
    compute_s: float | None = None
    memory_s: float | None = None
    ici_s: float | None = None
    dcn_s: float | None = None
    bound_s: float | None = None
    mfu_bound: float | None = None


def costs_of(program: Program, roles: Roles, collectives: Collectives, topology: Topology) -> Costs:
    """The costs of a compiled program on these devices."""
    model, recomputed = _recorded_flops(program.graph)
    num_devices = len(program.device_ids)
    analysis = program.compiled.cost_analysis() or {}
    compiler_flops = float(analysis.get("flops", 0.0))
    record = program.record
    least = record.argument_bytes + record.output_bytes
    sent = {False: 0.0, True: 0.0}
    for collective in collectives:
        times = 1 if collective.executions is None else collective.executions
        sent[crosses_slices(collective, topology)] += collective.moved_bytes * times
    counts = (
        model,
        recomputed,
        compiler_flops,
        float(analysis.get("bytes accessed", 0.0)),
        least,
        sent[False],
        sent[True],
    )
    chip, peak = topology.chip, topology.peak_flops
    if chip is None or peak is None:
        return Costs(*counts)
    share = chip.devices_per_chip
    compute = max(compiler_flops, (model + recomputed) / num_devices) / peak
    memory = least / (chip.hbm_bytes_per_s / share)
    ici = sent[False] / (chip.links_bytes_per_s / share)
    network = chip.dcn_bytes_per_s
    dcn = None if network is None else sent[True] / (network / share)
    bound = max(compute, memory, ici, dcn or 0.0)
    mfu = model / (bound * peak * num_devices) if bound else None
    return Costs(*counts, compute, memory, ici, dcn, bound, mfu)


def _recorded_flops(graph: Graph) -> tuple[int, int]:
    """FLOPs of the recorded operations: those of the model, and those of second runs."""
    specs: list[Spec] = []
    model = recomputed = 0
    for node in graph.nodes:
        formula = _FORMULAS.get(node.entry.name) or _FORMULAS.get(node.entry.name.split(".")[0])
        if formula is not None:
            inputs = [(graph.leaves[-i - 1].spec if i < 0 else specs[i]).shape for i in node.inputs]
            flops = formula(inputs, [out.shape for out in node.entry.outs])
            if node.origin is not None and node.origin.phase is Phase.SECOND_RUN:
                recomputed += flops
            else:
                model += flops
        specs.extend(node.entry.outs)
    return model, recomputed


def crosses_slices(collective: Collective, topology: Topology) -> bool:
    """Whether a collective has devices of several slices, so that the network carries it."""
    return any(
        len({topology.slice_of(device) for device in group}) > 1
        for group in collective.groups or ()
    )
