"""An interruption at any stage of a cut or of a read loses nothing, and leaves nothing half made.

The stages are found, not listed: a profile function sees each function of this project that a cut
calls, and raises at the entry of one of them.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import compile_cache, growing_sizes, index_checks
from spmd_core.runtime.in_flight import InFlight

PACKAGE = str(Path(spmd.__file__).parent)
# Python ignores what finalizers raise, and no signal interrupts the exit of a context manager.
NEVER = {"__del__", "__exit__", "remove"}


class Stages:
    """Inside, the functions that are called, in order; or an interruption at the entry of one.

    Args:
        interrupted: the code of the function.
        last: the code at which nothing is looked at any more.
    """

    def __init__(self, interrupted=None, last=None):
        self.interrupted, self.last, self.codes = interrupted, last, {}

    def __enter__(self):
        self.is_over = False
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _on_event(self, frame, event, arg):
        code = frame.f_code
        if event != "call" or self.is_over or not code.co_filename.startswith(PACKAGE):
            return
        if code is self.last:
            self.is_over = True
        elif code is self.interrupted:
            self.is_over = True
            raise KeyboardInterrupt
        elif code.co_name not in NEVER:
            self.codes.setdefault(code)


def is_interrupted(function, stage, last=None):
    with Stages(stage, last):
        try:
            function()
        except KeyboardInterrupt:
            return True
    return False


def recorded(size, mesh=None):
    """A tensor on the device with a pending write, which the program makes in its buffer."""
    w = torch.arange(float(size)).to("xla")
    if mesh is not None:
        spmd.mark_sharding(w, mesh, ("x",))
    spmd.sync()
    return w.mul_(2).add_(1)


def check(w, stage, *others):
    """What was interrupted, again, and other programs."""
    spmd.sync()
    for found in (w, *others):
        expected = 2 * torch.arange(float(len(found))) + 1
        torch.testing.assert_close(found.cpu(), expected, msg=str(stage))
    assert spmd.roll_back() == 0, stage
    assert w.sub_(w).sum().item() == 0, stage


# In the default tier one function in eight is interrupted.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 16))]


@pytest.mark.parametrize("part", PARTS)
def test_compiling_and_starting(mesh_1d, part):
    spmd.config.bound_growing_sizes = False
    sizes = itertools.count(1000 + 1000 * part, 2)
    w = recorded(next(sizes), mesh_1d)
    with Stages(last=InFlight.add.__code__) as stages:
        spmd.sync()
    assert {"plan", "making", "compile_lowered", "run"} <= {code.co_name for code in stages.codes}
    chosen, num_interrupted = [*stages.codes][part :: len(PARTS)], 0
    for stage in chosen:
        size = next(sizes)
        w = recorded(size, mesh_1d)
        if is_interrupted(spmd.sync, stage, InFlight.add.__code__):
            num_interrupted += 1
            assert w._handle.value.data is None, stage
        check(w, stage, recorded(size + 1, mesh_1d))
    # Others remember what they returned.
    assert num_interrupted > len(chosen) / 2


@pytest.mark.parametrize("part", PARTS)
def test_programs_for_many_sizes(part):
    def cut(stage=None):
        growing_sizes.clear()
        compile_cache.clear()
        spmd.sync()
        w = recorded(11)
        spmd.sync()
        w = recorded(12)
        with Stages(stage, InFlight.add.__code__) as stages:
            try:
                spmd.sync()
            except KeyboardInterrupt:
                return w, stages, True
        return w, stages, False

    _, stages, _ = cut()
    codes = [code for code in stages.codes if "growing" in code.co_filename + code.co_name]
    codes += [code for code in stages.codes if "padded" in code.co_filename]
    assert {"find_program", "bounded", "_growth"} <= {code.co_name for code in codes}
    for stage in codes[part :: len(PARTS)]:
        w, _, is_interrupted = cut(stage)
        assert is_interrupted, stage
        check(w, stage, *(recorded(size) for size in (12, 13, 20, 9)))
        assert not growing_sizes.refusals(), stage


def test_reads_of_programs_that_check_their_indices():
    table = torch.ones(4, 2).to("xla")
    index = torch.tensor([1]).to("xla")

    def started(number):
        index.fill_(number)
        result = table[index + 0]
        spmd.sync()
        return result

    found = started(1)
    with Stages() as stages:
        found.cpu()
    assert {"to_host", "raise_if_found", "_failed"} <= {code.co_name for code in stages.codes}
    num_interrupted = 0
    for stage in stages.codes:
        found = started(7)
        with (
            pytest.raises((KeyboardInterrupt, spmd.errors.IndexRangeError)) as raised,
            Stages(stage),
        ):
            found.cpu()
        if raised.type is KeyboardInterrupt:
            num_interrupted += 1
            with pytest.raises(spmd.errors.IndexRangeError):
                found.cpu()
        index_checks.forget()
        assert started(1).sum().item() == 2
    assert num_interrupted > len(stages.codes) / 2
