"""Tests torch_xla.experimental.callback."""

import threading

import pytest
import torch

import torch_xla
from torch_xla.experimental.callback import on_ready_callback, on_ready_event


def test_a_callback_runs_in_a_thread_when_the_tensor_is_computed():
    x = torch.ones(4).to("xla")
    y = x * 2 + 1
    seen, done = [], threading.Event()

    def callback():
        seen.append(threading.current_thread())
        done.set()

    on_ready_callback(y, callback)
    assert done.wait(60) and seen[0] is not threading.main_thread()
    assert y.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(4).to("xla"), lambda: torch.zeros(0, 3).to("xla")]
)
def test_an_event_for_data(make):
    assert on_ready_event(make()).wait(60)


def test_a_tensor_whose_buffer_the_next_program_takes_over():
    t = torch.zeros(4).to("xla")
    events = []
    for _ in range(4):
        t.add_(1)
        events.append(on_ready_event(t))
        torch_xla.sync()
    assert all(event.wait(60) for event in events) and t.tolist() == [4.0] * 4


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(RuntimeError, match="on_ready_callback needs a tensor on device 'xla'"):
        on_ready_event(torch.ones(2))
