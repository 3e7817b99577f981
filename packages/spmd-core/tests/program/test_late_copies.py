"""What comes back from the host waits for what was recorded just before it."""

import torch
from recorded_graphs import graph_of, names, rewritten
from torch import nn

import spmd_core as spmd
from spmd_core.ops.host_memory import FROM_HOST
from spmd_core.program.passes.late_copies import late_copies


def test_a_copy_waits_on_accelerators():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to("xla")
    x = torch.randn(4, 8).to("xla").requires_grad_()
    with spmd.save_on_host():
        y = block(x * 2)
    y.cos().sum().backward()
    graph = graph_of(x.grad)
    copies = names(graph).count("from_host_memory")
    assert copies > 0
    assert rewritten(late_copies, graph, "cpu") is graph
    made = rewritten(late_copies, graph, "tpu")
    waits = [op for op in made.ops if op.entry.name == FROM_HOST]
    assert len(waits) == copies
    for op in waits:
        barrier = op.operands[0].op
        assert barrier.entry.name == "spmd::optimization_barrier"
        # The value before it is read behind the barrier from here on.
        assert len(barrier.operands) == 2 and op.operands[0].result == 0
