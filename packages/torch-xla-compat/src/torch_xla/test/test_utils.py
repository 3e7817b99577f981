"""Lines and TensorBoard entries of training scripts."""

import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from spmd_core.arguments import checked
from torch_xla import runtime
from torch_xla.debug import metrics


def now(format: str = "%H:%M:%S") -> str:
    """The local time."""
    return datetime.now().strftime(format)


def _device(device: Any) -> str:
    return f"{device}/{runtime.global_ordinal()}"


def _print(kind: str, device: Any, **facts: Any) -> None:
    shown = [f"{name}={value}" for name, value in facts.items() if value is not None]
    print("|", kind, f"Device={_device(device)}", *shown, f"Time={now()}", flush=True)


def print_training_update(
    device: Any,
    step: int,
    loss: Any,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Prints a line on a step; with a writer, also writes the rates. Waits for a loss on a device.

    Args:
        device: where the model runs.
        step: number of the step.
        loss: a number, or a tensor with one element.
        rate: items per second, recently.
        global_rate: items per second, since the start.
        epoch: number of the epoch, or None.
        summary_writer: what `get_summary_writer` gave, or None.
    """
    _print(
        "Training",
        device,
        Epoch=epoch,
        Step=step,
        Loss=f"{float(loss):.5f}",
        Rate=f"{rate:.2f}",
        GlobalRate=f"{global_rate:.2f}",
    )
    write_to_summary(
        summary_writer, dict_to_write={"examples/sec": rate, "average_examples/sec": global_rate}
    )


def print_test_update(
    device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """Prints a line on an evaluation."""
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print("Test", device, Step=step, Epoch=epoch, Accuracy=shown)


def get_summary_writer(logdir: str | None) -> Any:
    """A TensorBoard writer for the folder of this process; None without a folder."""
    if not logdir:
        return None
    # Optional, and the import takes a second.
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    return SummaryWriter(log_dir=os.path.join(logdir, f"{runtime.process_index()}"))


@checked(global_step=0)
def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Writes numbers by name, and with `write_xla_metrics` the counters. None writes nothing."""
    if summary_writer is None:
        return
    values = dict(dict_to_write or {})
    if write_xla_metrics:
        values |= {f"xla/{name}": metrics.counter_value(name) for name in metrics.counter_names()}
    for name, value in values.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Writes what is buffered and closes the writer. None does nothing."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()
