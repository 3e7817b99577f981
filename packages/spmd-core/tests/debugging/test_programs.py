"""Programs shown as text without running them, and the source lines of recorded operations."""

import os
import re
import threading
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core import debugging, source_lines
from spmd_core.graph.values import origin_of
from spmd_core.program import compile_cache

SOURCE = Path(spmd.__file__).parent.parent


def executions():
    return spmd.metrics.counter("executions")


def compiles():
    return spmd.metrics.counter("compiles")


def line_of(comment):
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return number


def origins(t):
    """The origins of the pending values that a tensor depends on, by operation name."""
    found, stack, seen = {}, [t._handle.storage.value], set()
    while stack:
        value = stack.pop()
        value = value.parent or value
        if value in seen or value.data is not None:
            continue
        seen.add(value)
        found.setdefault(value.entry.name, []).append(origin_of(value))
        stack.extend(value.inputs)
    return found


# Texts.


def test_stablehlo_shows_what_is_pending_and_runs_nothing(mesh_2d):
    spmd.sync()
    w = spmd.mark_sharding(torch.ones(8, 16).to("xla"), mesh_2d, ("a", "b"))
    y = torch.relu(w * 2)
    before = (executions(), compiles())
    text = debugging.stablehlo()
    assert (
        "stablehlo.multiply" in text
        and "stablehlo.maximum" in text
        and (executions(), compiles()) == before
    )
    assert re.search(r'sdy\.mesh @mesh = <\["a"=\d+, "b"=\d+\]>', text)
    assert 'sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"b"}]>' in text
    other = torch.ones(3).to("xla") - 7
    shown = debugging.stablehlo()
    assert "stablehlo.subtract" in shown and "stablehlo.subtract" not in debugging.stablehlo(y)
    spmd.sync()
    # The program that was shown is the one that ran.
    assert shown == debugging.stablehlo(program=compile_cache.newest())
    assert y.tolist() == [[2.0] * 16] * 8 and other.tolist() == [-6.0] * 3


def test_hlo_before_and_after_partitioning(mesh_1d, num_devices):
    x = spmd.mark_sharding(torch.ones(8 * num_devices, 4).to("xla"), mesh_1d, ("x",))
    y = (x + 1).sum(1)
    before = executions()
    whole, part = debugging.hlo(y, stage="before"), debugging.hlo(y)
    assert f"f32[{8 * num_devices},4]" in whole and "aten::add" in whole
    assert "f32[8,4]" in part and "aten::sum" in part and executions() == before
    compiled = compiles()
    assert debugging.hlo(y) == part == debugging.hlo(program=compile_cache.newest())
    assert y.tolist() == [8.0] * 8 * num_devices
    assert compiles() == compiled  # the read reuses the program that was compiled to show it
    with pytest.raises(
        ValueError,
        match=r"shows the module 'before' or 'after' partitioning; got stage='between'\. "
        r"Pass one of the two",
    ):
        debugging.hlo(y, stage="between")


def test_a_view_and_several_tensors(mesh_1d):
    x = torch.arange(6.0).to("xla")
    y, z = (x + 1).view(2, 3), x * 5
    text = debugging.stablehlo(y.t(), z)
    assert "stablehlo.transpose" in text and "stablehlo.multiply" in text
    assert y.t().tolist() == [[1, 4], [2, 5], [3, 6]] and z.tolist() == [0, 5, 10, 15, 20, 25]


def test_what_is_not_pending_is_refused():
    spmd.sync()
    for show in (debugging.stablehlo, debugging.hlo):
        with pytest.raises(
            spmd.errors.SpmdError,
            match=rf"{show.__name__} shows the program of what is pending; nothing is\. "
            r"Call it before sync\(\)",
        ):
            show()
        with pytest.raises(
            spmd.errors.DeviceMismatchError,
            match=rf"{show.__name__} needs a tensor on device 'xla'; got a tensor on cpu\. "
            r"Move it first",
        ):
            show(torch.ones(2))
    y = torch.ones(2, 3).to("xla") + 1
    spmd.sync()
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"takes tensors that are pending; got one of shape \(2, 3\) that is computed\. "
        r"Call it before sync",
    ):
        debugging.stablehlo(y)
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match="collectives needs a tensor on device 'xla'; got list",
    ):
        debugging.collectives([1])


def test_looking_keeps_what_is_pending_pending():
    x = torch.ones(4).to("xla")
    spmd.sync()
    x.add_(1)
    debugging.stablehlo()
    debugging.hlo()
    debugging.collectives(x)
    x.mul_(3)
    assert x.tolist() == [6.0] * 4


# Lines.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  # a layer
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return torch.tanh(self.block(x))  # the net


def test_without_the_switch_nothing_is_recorded():
    y = torch.ones(2).to("xla") + 1
    assert origins(y) == {"aten::add.Tensor": [None]}
    spmd.sync()
    assert compile_cache.keys()[-1].origins == ()


def test_lines_and_modules_forward_and_backward():
    model = Net().to("xla")
    x = torch.ones(2, 4).to("xla")
    with debugging.source_lines():
        loss = model(x).sum()  # the loss
        loss.backward()
    found = origins(model.block.layers[0].weight.grad)
    assert {
        name: [(o.module, o.line, o.phase.name) for o in given] for name, given in found.items()
    } == {
        "aten::linear_backward": [
            ("Net.block.layers.0", line_of("a layer"), "BACKWARD"),
            ("Net.block.layers.1", line_of("a layer"), "BACKWARD"),
        ],
        "aten::linear": [
            ("Net.block.layers.1", line_of("a layer"), "FORWARD"),
            ("Net.block.layers.0", line_of("a layer"), "FORWARD"),
        ],
        "aten::tanh_backward": [("Net", line_of("the net"), "BACKWARD")],
        "aten::tanh": [("Net", line_of("the net"), "FORWARD")],
        "aten::expand": [("", line_of("the loss"), "BACKWARD")],
        "aten::ones_like": [("", line_of("the loss") + 1, "FORWARD")],
        "aten::sum": [("", line_of("the loss"), "FORWARD")],
    }
    assert all(o.file == __file__ for given in found.values() for o in given)
    text = debugging.hlo(model.block.layers[0].weight.grad)
    assert re.search(
        r"Net\.block\.layers\.1/aten::linear_backward#\d+/"
        rf"{Path(__file__).name}:{line_of('a layer')}/",
        text,
    )
    # XLA's own tables and the StableHLO locations name the user's file and line too.
    assert f'"{__file__}"' in text and f"line={line_of('a layer')} " in text
    assert f'loc("{__file__}":{line_of("a layer")}:' in debugging.stablehlo(
        model.block.layers[0].weight.grad
    )


def test_a_program_with_lines_is_another_program():
    def step():
        y = torch.full((5,), 2.0).to("xla") * 31
        spmd.sync()
        return y

    spmd.sync()
    step()
    before = compiles()
    step()
    assert compiles() == before
    with debugging.source_lines():
        step()
        assert compiles() == before + 1
        step()
    assert (
        compiles() == before + 1
        and compile_cache.keys()[-1].origins[0].line == step.__code__.co_firstlineno + 1
    )
    step()
    assert compiles() == before + 1  # without lines it is the first program again


def test_lines_are_remembered_where_only_recording_is_inside():
    with debugging.source_lines():
        y = torch.ones(3).to("xla") / 7  # inside
    spmd.sync()
    assert compile_cache.keys()[-1].origins[-1].line == line_of("inside") and y is not None


@pytest.mark.exhaustive
def test_the_cache_on_disk_does_not_hand_out_a_program_without_lines(tmp_path):
    code = """
import torch, spmd_core as spmd
from spmd_core import debugging
spmd.simulate(2)
x = torch.ones(8, device="cpu").to("xla")
assert "#0/" not in debugging.hlo(x.cumsum(0))
with debugging.source_lines():
    assert "aten::cumsum#0/" in debugging.hlo(x.cumsum(0))
assert "#0/" not in debugging.hlo(x.cumsum(0))
print("fine")
"""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "SPMD_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        result = fresh.run(["-c", code], env)
        assert result.stdout == "fine\n", result.stderr
    assert list(tmp_path.iterdir())


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cos()  # own forward

    @staticmethod
    def backward(ctx, g):
        return g.sin()  # own backward


def test_a_users_own_function_has_its_own_lines():
    x = torch.ones(3, device="xla", requires_grad=True)
    with debugging.source_lines():
        y = Scaled.apply(x)
        y.sum().backward()
    found = origins(x.grad)
    assert origins(y)["aten::cos"][0].line == line_of("own forward")
    (own,) = found["aten::sin"]
    assert own.line == line_of("own backward") and own.phase is source_lines.Phase.IN_BACKWARD


def test_a_function_of_the_projects_own_has_the_line_of_its_call():
    q = torch.randn(1, 2, 8, 4, device="xla", requires_grad=True)
    with debugging.source_lines():
        y = nn.functional.scaled_dot_product_attention(q, q, q)  # attention
        y.sum().backward()
    found = {name: given for name, given in origins(q.grad).items() if "attention" in name}
    assert len(found) >= 2
    assert {o.line for given in found.values() for o in given} == {line_of("attention")}


def test_hooks_and_recomputation_have_the_lines_that_they_run():
    x = torch.ones(3, device="xla", requires_grad=True)
    with debugging.source_lines():
        y = x * 2
        y.register_hook(lambda g: g.exp())  # the hook
        y.sum().backward()
        (hooked,) = origins(x.grad)["aten::exp"]
    assert (hooked.line, hooked.phase) == (line_of("the hook"), source_lines.Phase.IN_BACKWARD)

    def layer(t):
        return (t.sinh() * t).cosh()  # recomputed

    z = torch.ones(3, device="xla", requires_grad=True)
    with debugging.source_lines():
        checkpoint(layer, z, use_reentrant=False).sum().backward()
    again = [
        o for o in origins(z.grad)["aten::sinh"] if o.phase is source_lines.Phase.RECOMPUTATION
    ]
    assert again and {o.line for o in again} == {line_of("recomputed")}


def test_the_line_of_a_view_is_not_that_of_a_neighbour():
    x = torch.ones(4, 4, device="xla", requires_grad=True)
    with debugging.source_lines():
        row = x.select(0, 1)  # the row
        unrelated = row.detach() + 1
        with torch.no_grad():
            x.mul(2)
        row.sum().backward()
    scattered = [o for name, given in origins(x.grad).items() if "select" in name for o in given]
    assert {o.line for o in scattered} == {line_of("the row")}
    assert {o.phase for o in scattered} == {source_lines.Phase.FORWARD, source_lines.Phase.BACKWARD}
    assert unrelated.shape == (4,)


def test_threads_do_not_lend_each_other_lines():
    """Where two threads used the same autograd node number, only the line of `backward()` is known.

    torch numbers autograd's nodes from 0 in each thread.
    """
    kept, errors = [], []

    def run(forward):
        try:
            x = torch.ones(3, device="xla", requires_grad=True)
            forward(x).backward()  # a backward call
            kept.append(
                [
                    o
                    for o in origins(x.grad)["aten::sinh"]
                    if o.phase is not source_lines.Phase.FORWARD
                ]
            )
        except Exception as error:
            errors.append(error)

    with debugging.source_lines():
        for forward in (lambda x: x.cosh().sum(), lambda x: x.cosh().sum() * 1):
            thread = threading.Thread(target=run, args=(forward,))
            thread.start()
            thread.join()
    assert not errors
    first, second = kept
    assert {o.phase for o in first} <= {
        source_lines.Phase.BACKWARD,
        source_lines.Phase.BACKWARD_CALL,
    }
    assert {(o.phase, o.line) for o in second} == {
        (source_lines.Phase.BACKWARD_CALL, line_of("a backward call"))
    }


def test_the_switch_is_put_back_after_an_error():
    with pytest.raises(RuntimeError, match=r"shape|size"), debugging.source_lines():
        torch.ones(2).to("xla") @ torch.ones(3, 3).to("xla")
    assert not spmd.config.record_source_lines
    with debugging.source_lines(), debugging.source_lines(False):
        assert origins(torch.ones(2).to("xla") + 1) == {"aten::add.Tensor": [None]}


def test_environment_switches():
    code = """
import torch, spmd_core as spmd
from spmd_core import debugging
from spmd_core.program import compile_cache
spmd.simulate(1)
for n in (2, 3):
    y = torch.ones(n, device="cpu").to("xla") + 1
    spmd.sync()
print(compile_cache.keys()[-1].origins[0] is not None)
"""
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "SPMD_CACHE_DIR": "",
        "SPMD_SOURCE_LINES": "1",
        "SPMD_EXPLAIN_RECOMPILES": "1",
    }
    result = fresh.run(["-c", code], env)
    assert result.stdout == "True\n", result.stderr
    assert (
        result.stderr.count("was compiled in") == 1 and "float32[2] -> float32[3]" in result.stderr
    )
    refused = fresh.run(["-c", code], {**env, "SPMD_EXPLAIN_RECOMPILES": "yes"})
    assert (
        "SPMD_EXPLAIN_RECOMPILES is the number of programs that need no explanation; got 'yes'"
        in refused.stderr
    )


def test_operations_one_a_line():
    x, y = torch.ones(4, 3).to("xla"), torch.ones(3).to("xla")
    values, indices = torch.max(x + y, 1)
    lines = debugging.operations(values.neg(), indices).splitlines()
    assert lines[:3] == [
        "input 0: float32[4, 3]",
        "input 1: float32[3]",
        "0: aten::add.Tensor(input 0, input 1) -> float32[4, 3]",
    ]
    assert (
        lines[3] == "1: aten::max.dim(0) -> float32[4], int64[4]"
        and lines[4] == "3: aten::neg(1) -> float32[4]"
    )


def test_operations_of_a_compiled_program():
    x = torch.ones(4, 3).to("xla")
    y = x.tan()
    pending = debugging.operations(y)
    spmd.sync()
    assert y is not None
    assert debugging.operations(program=compile_cache.newest()) == pending


def test_the_hash_of_a_program():
    a, b, c = (debugging.graph_hash(torch.ones(n).to("xla") * 2) for n in (4, 4, 5))
    assert len(a) == 32 and a == b != c
