"""A planned program's FLOPs and bytes, and bounds on its time from the devices' data sheets."""

from dataclasses import dataclass

from spmd_core.debugging import hlo_flops
from spmd_core.debugging.communication import Collectives
from spmd_core.metrics.flops import operation_flops
from spmd_core.planner.buffer_text import Buffers
from spmd_core.planner.topology import Topology
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.source_lines import Phase


@dataclass(frozen=True)
class Costs:
    """The FLOPs and bytes of a program; times are *modelled*: lower bounds for any schedule.

    Attributes:
        model_flops: FLOPs of products, convolutions and attention over all devices, as torch counts
            them (`metrics.count_flops`), without recomputation.
        recomputed_flops: FLOPs of the recomputation of checkpoints.
        compiler_flops: FLOPs of the products and convolutions of one device in the optimised
            module, over all iterations of loops, without custom kernels and conditionals.
        least_bytes: bytes that one device must read and write: each argument and result once.
        ici_bytes, dcn_bytes: bytes that one device sends over the links between chips, and over
            the network between slices, with ring algorithms.
        compute_s: the time of all FLOPs at the chip's peak. All times are None for CPUs.
        memory_s: the time of `least_bytes` at the memory's bandwidth.
        ici_s, dcn_s: the time of these bytes at the bandwidth of all links; None if no bandwidth is
            published.
        bound_s: the largest of these times.
        mfu_bound: the model FLOPs in `bound_s`, as a fraction of the devices' peak.
    """

    model_flops: int
    recomputed_flops: int
    compiler_flops: float
    least_bytes: int
    ici_bytes: float
    dcn_bytes: float
    compute_s: float | None = None
    memory_s: float | None = None
    ici_s: float | None = None
    dcn_s: float | None = None
    bound_s: float | None = None
    mfu_bound: float | None = None


def costs_of(
    graph: RecordedGraph, hlo: str, buffers: Buffers, collectives: Collectives, topology: Topology
) -> Costs:
    """The costs of a compiled program on these devices.

    Args:
        graph: the program's graph.
        hlo: its optimised HLO as text.
        buffers: its buffer assignment.
        collectives: its collectives.
        topology: the devices.
    """
    model, recomputed = _recorded_flops(graph)
    num_devices = len(graph.device_ids)
    compiler_flops = hlo_flops.total(hlo)
    least = buffers.argument_bytes + buffers.result_bytes
    sent = {False: 0.0, True: 0.0}
    for collective in collectives:
        times = 1 if collective.executions is None else collective.executions
        sent[collective.is_between_slices] += collective.moved_bytes * times
    counts = (
        model,
        recomputed,
        compiler_flops,
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


def _recorded_flops(graph: RecordedGraph) -> tuple[int, int]:
    """The FLOPs of the recorded operations: of the model, and of recomputation."""
    model = again = 0
    for phase, _, flops in operation_flops(graph):
        if phase is Phase.RECOMPUTATION:
            again += flops
        else:
            model += flops
    return model, again
