"""Tests torch_xla.experimental.eager_mode."""

import torch

import torch_xla
import torch_xla.debug.metrics as met


def test_each_operation_runs_at_once_and_compile_switches_it_off_inside(num_devices):
    experimental = torch_xla.experimental
    x = torch.arange(4.0, device="xla")
    assert not experimental.is_eager_mode()
    with experimental.eager_mode_context(True):
        assert experimental.is_eager_mode()
        met.clear_all()
        y = (x + 1) * 2
        assert met.counter_value("ExecuteReplicated") == 2
        with torch_xla.compile():
            assert not experimental.is_eager_mode()
            met.clear_all()
            z = (y + 1) * 2
        assert met.counter_value("ExecuteReplicated") == 1
    assert not experimental.is_eager_mode()
    assert z.tolist() == [6.0, 10.0, 14.0, 18.0]
    experimental.eager_mode(True)
    experimental.eager_mode(False)
    assert not experimental.is_eager_mode()
