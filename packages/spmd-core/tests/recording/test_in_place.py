"""Updates in place: threads that write one tensor lose no update."""

import sys
import threading

import pytest
import torch

from spmd_core.program import planning


@pytest.fixture
def eager_switching():
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_threads_that_update_one_tensor_lose_no_update(through_a_view, eager_switching):
    x = torch.zeros(4).to("xla")
    target = x[:2] if through_a_view else x
    start = threading.Barrier(4)

    def update():
        start.wait()
        for _ in range(200):
            target.add_(1)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Every update reads the one before: the graph holds all of them, or one was lost.
    nodes, _ = planning.collect([x._handle])
    assert sum(node.entry.name == "aten::add.Tensor" for node in nodes) == 800
    x.zero_()  # the updates need not run
