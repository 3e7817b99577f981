"""Tests torch_xla.test.test_utils: the lines and TensorBoard entries of training scripts."""

import re

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator

import torch_xla
from torch_xla.test import test_utils


def test_lines(capsys):
    loss = torch.tensor(0.5).to("xla")
    test_utils.print_training_update(torch_xla.device(), 3, loss, 10.0, 9.876, epoch=2)
    test_utils.print_test_update(torch_xla.device(), 12.345, epoch=2)
    test_utils.print_test_update(torch_xla.device(), None, step=1)
    lines = capsys.readouterr().out.splitlines()
    clock = r"Time=\d\d:\d\d:\d\d"
    for line, wanted in zip(
        lines,
        (
            r"\| Training Device=xla:0/0 Epoch=2 Step=3 Loss=0.50000 Rate=10.00 GlobalRate=9.88 ",
            r"\| Test Device=xla:0/0 Epoch=2 Accuracy=12.35 ",
            r"\| Test Device=xla:0/0 Step=1 ",
        ),
        strict=True,
    ):
        assert re.fullmatch(wanted + clock, line)


@pytest.mark.slow
def test_what_tensorboard_reads(tmp_path):
    writer = test_utils.get_summary_writer(str(tmp_path))
    torch_xla.sync()
    test_utils.write_to_summary(writer, 1, {"loss": 0.5}, write_xla_metrics=True)
    test_utils.print_training_update("xla:0", 1, 0.5, 10.0, 9.0, summary_writer=writer)
    test_utils.close_summary_writer(writer)
    read = event_accumulator.EventAccumulator(str(tmp_path / "0")).Reload()
    assert {"loss", "xla/MarkStep", "examples/sec"} <= set(read.Tags()["scalars"])
    assert read.Scalars("loss")[0].value == 0.5


def test_without_a_folder_nothing_is_written():
    writer = test_utils.get_summary_writer(None)
    assert writer is None
    test_utils.write_to_summary(writer, 1, {"loss": 0.5})
    test_utils.close_summary_writer(writer)
