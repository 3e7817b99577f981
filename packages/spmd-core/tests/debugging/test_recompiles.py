"""Why a program was compiled again: each test has one cause, and the report names only that one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.dispatch import router
from spmd_core.program import compile_cache


def compiles():
    return spmd.metrics.counter("compiles")


def line_of(comment):
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return f"{__file__}:{number}"


@pytest.fixture(autouse=True)
def only_this_story():
    spmd.sync()
    compile_cache.clear()


def the_change():
    """The only change that is reported for the newest compilation."""
    report = debugging.explain_recompile()
    assert len(report.changes) == 1, report
    return report.changes[0]


class Training:
    """A model, its optimizer, and training steps on batches of any size."""

    def __init__(self, optimizer=torch.optim.AdamW, **options):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("xla")
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2, **options)

    def step(self, size=32):
        x, y = torch.randn(size, 8).to("xla"), torch.randint(0, 4, (size,)).to("xla")
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        spmd.sync()  # the end of a step
        return loss.detach()


def test_a_smaller_last_batch():
    training = Training()
    for size in (32, 32, 32, 17):
        training.step(size)
    report = debugging.explain_recompile()
    # Only the batch and its labels are named, not values computed from them, nor parameters.
    assert {c.text.split(": ")[1] for c in report.changes} == {
        "float32[32, 8] -> float32[17, 8]",
        "int64[32] -> int64[17]",
    }
    assert all(
        c.text.startswith("leaf ")
        and "(data, read by operation " in c.text
        and c.ingredient == "leaves"
        for c in report.changes
    )
    text = str(report)
    assert (
        f"for {line_of('the end of a step')}" in text
        and "drop_last=True" in text
        and "Pad batches" in text
    )
    assert text.count("\n") == 3
    assert set(report.ingredients) >= {"structure", "leaves"} and report.seconds > 0


def test_the_first_steps_are_normal():
    """A product that a sum is taken over from the second step on: no constant begins it."""
    w, total = torch.ones(4, 4).to("xla"), None
    for _ in range(3):
        x = torch.ones(4, 4).to("xla")
        product = x @ w
        total = product.to(torch.float64) if total is None else total
        total += product
        spmd.sync()
    assert len(compile_cache.history) == 2
    first, second = debugging.explain_recompile(2), debugging.explain_recompile()
    assert first.nearest is None and "it is the first of its kind" in str(first)
    assert "This is normal once: the first step creates state, such as the optimizer's" in str(
        second
    )
    assert any("gone: aten::_to_copy" in c.text for c in second.changes)


def test_numbers_that_change_do_not_compile():
    training = Training()
    for i in range(5):
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + i)
        training.step()
    assert len(compile_cache.history) == 1


def test_a_parameter_that_changed_shape_gets_no_advice_on_padding():
    for width in (8, 9):
        w = torch.ones(4, width).to("xla")
        w.mul_(2)
        spmd.sync()
    assert re.fullmatch(
        r"leaf 0 \(updated in place, read by operation 0, aten::mul.*\): "
        r"float32\[4, 8\] -> float32\[4, 9\]",
        the_change().text,
    )
    assert the_change().advice == ""


def test_another_operation():
    x = torch.ones(4, 4).to("xla")
    kept = []
    for f in (torch.relu, nn.functional.gelu):
        kept = [(f(x * 2) + 1).sum()]
        spmd.sync()
    change = the_change()
    assert (change.ingredient, change.text) == (
        "structure",
        "operation 1 was aten::relu, is aten::gelu",
    ) and kept
    assert "`if` or a loop in Python" in str(debugging.explain_recompile())


def test_an_operation_more_and_one_less():
    x = torch.ones(4, 4).to("xla")

    def step(n):
        y = x * 3
        for _ in range(n):
            y = y.sin()
        z = y.sum()
        spmd.sync()
        return z

    step(1)
    step(2)
    assert the_change().text == "operation 2 is new: aten::sin"
    compile_cache.clear()
    step(4)
    step(1)
    assert the_change().text == "operations 2 to 4 are gone: aten::sin, aten::sin, aten::sin"


def test_static_arguments():
    x = torch.arange(12.0).view(3, 4).to("xla")
    seen = []
    for i in range(2):
        seen.append(x.select(1, i).clone().tolist())
    assert the_change().text == "argument 'index' of operation 0, aten::select.int: 0 -> 1"
    assert "is part of the program" in the_change().advice
    compile_cache.clear()
    for dim in (0, 1):
        x.sum([dim]).cpu()
    assert the_change().text == "argument 'dim' of operation 0, aten::sum.dim_IntList: [0] -> [1]"
    x.sum([1], keepdim=True).cpu()
    assert (
        the_change().text
        == "argument 'keepdim' of operation 0, aten::sum.dim_IntList: its default -> True"
    )
    assert seen[0] == [0, 4, 8]


def test_operands_that_change_places():
    x = torch.ones(4, 4).to("xla")
    for swapped in (False, True):
        y = x * 3
        (x - y if swapped else y - x).cpu()
        del y
    text = the_change().text
    assert text.startswith("operation 1, aten::sub.Tensor, reads other values than before: leaf 0 ")
    assert text.endswith("; the result of operation 0, aten::mul.Tensor")


def test_another_manual_region(mesh_2d, num_devices):
    if num_devices < 4:
        pytest.skip("two axes need four devices")
    x = torch.ones(8, 8).to("xla")
    for spec in (("a", None), (None, "a")):
        spmd.shard_map(lambda block: block * 2, mesh_2d, [spec], spec)(x).cpu()
    texts = [c.text for c in debugging.explain_recompile().changes]
    assert "operation 0, spmd::enter_region, crosses the border of another manual region" in texts


def test_a_list_that_grows():
    pieces = [torch.ones(2, 3).to("xla") for _ in range(3)]
    for n in (2, 3):
        torch.cat(pieces[:n]).cpu()
    assert the_change().text == "operation 0, aten::cat, reads 3 tensors, and read 2 before"


def test_arguments_are_known_after_the_recorded_calls_were_forgotten():
    x = torch.ones(4, 3).to("xla")
    for dim in (0, 1):
        x.cumsum(dim).cpu()
    router.forget()
    assert the_change().text == "argument 'dim' of operation 0, aten::cumsum: 0 -> 1"


def scaled(factor):
    def scale(x):
        return x * factor

    return scale


def test_the_arguments_of_an_operation_that_is_none_of_torchs_are_unknown():
    x = torch.ones(4, 3).to("xla")
    for factor in (2, 3):
        spmd.call_jax(scaled(factor), x).cpu()
    assert the_change().text == "operation 0, jax::scale, has other arguments; which, is not known"


def test_an_int_where_a_float_was():
    x = torch.ones(3).to("xla")
    for number in (2, 2.0):
        (x * number).cpu()
    change = the_change()
    assert change.text == (
        "argument 'other' of operation 0, aten::mul.Tensor: "
        "a number of type int -> a number of type float"
    )
    assert "such as 2.0 and not 2" in change.advice
    before = compiles()
    (x * 5.5).cpu()
    assert compiles() == before  # another float is the same program


def test_another_order_in_memory():
    for strides in ((3, 1), (1, 4)):
        x = torch.empty_strided((4, 3), strides, device="xla").copy_(torch.ones(4, 3))
        spmd.sync()
        torch.relu(x).cpu()
    change = the_change()
    assert change.text.startswith(
        "argument 'self' of operation 0, aten::relu: a tensor float32[4, 3] with strides [3, 1] -> "
    )
    assert change.text.endswith("with strides [1, 4]")


def test_a_result_that_somebody_holds():
    x = torch.ones(4, 4).to("xla")

    def step(keep):
        y = torch.exp(x * 2)
        z = y.sum()
        held = y if keep else None
        del y
        spmd.sync()
        return z, held

    step(False)
    step(True)
    change = the_change()
    assert change.ingredient == "outputs"
    assert change.text == (
        "the result of operation 1, aten::exp (float32[4, 4]) is held at the cut, "
        "and was not before"
    )
    assert ".item(), .cpu()" in change.advice
    compile_cache.clear()
    step(True)
    step(False)
    assert the_change().text == (
        "the result of operation 1, aten::exp (float32[4, 4]) is not held at the cut, "
        "and was before"
    )


def test_other_compiler_options(monkeypatch):
    for options in ({}, {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}):
        monkeypatch.setattr(spmd.config, "compiler_options", options)
        y = torch.ones(4).to("xla").atan() + 3
        spmd.sync()
    change = the_change()
    assert change.ingredient == "options" and y.shape == (4,)
    assert change.text == (
        "config.compiler_options: {} -> "
        "{'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}"
    )


def test_a_tensor_kept_from_the_last_step_is_not_donated():
    def step(keep):
        x = torch.ones(4, 4).to("xla")
        y = x + 1
        spmd.sync()
        x2 = spmd.mark_sharding(y, spmd.Mesh([0], (1,), ("x",)), ())
        held = x2 if keep else None
        z = spmd.mark_sharding(x2 * 2, spmd.Mesh([0], (1,), ("x",)), ())
        del x, y, x2
        spmd.sync()
        return z, held

    step(False)
    step(True)
    change = the_change()
    assert change.ingredient == "donated"
    assert change.text == (
        "leaf 0 (data, read by operation 0, aten::mul.Tensor) is not donated any more: "
        "a tensor holds it after this program"
    )
    assert "Drop the tensor before" in change.advice


def test_another_sharding(mesh_2d, num_devices):
    if num_devices == 1:
        pytest.skip("one device shards nothing")
    for spec in (("a",), (None, "a")):
        x = spmd.mark_sharding(torch.ones(8, 8).to("xla"), mesh_2d, spec)
        x.sum().cpu()
    change = the_change()
    shape = ", ".join(f"{name}={size}" for name, size in mesh_2d.shape().items())
    assert change.text == (
        "the sharding of leaf 0 (data, read by operation 0, aten::sum): "
        f"P('a', None) over ({shape}) -> P(None, 'a') over ({shape})"
    )
    assert "Mark it once" in change.advice
    compile_cache.clear()
    x = torch.ones(8, 8).to("xla")
    for spec in (("a",), ("b",)):
        spmd.mark_sharding(x * 2, mesh_2d, spec).sum().cpu()
    texts = {c.text for c in debugging.explain_recompile().changes}
    assert (
        "the mark of operation 1, spmd::mark_sharding: "
        f"P('a', None) over ({shape}) -> P('b', None) over ({shape})"
    ) in texts


def test_other_devices(num_devices):
    if num_devices == 1:
        pytest.skip("needs two devices")
    for ids in ([0], [1]):
        x = spmd.mark_sharding(torch.ones(4).to("xla"), spmd.Mesh(ids, (1,), ("x",)), ())
        x.sum().cpu()
    assert "the devices: [0] -> [1]" in {c.text for c in debugging.explain_recompile().changes}


def test_lines_are_in_the_report():
    with debugging.source_lines():
        for f in (torch.relu, torch.tanh):
            x = torch.ones(4, 4).to("xla")  # made
            y = f(x * 2)  # called
            spmd.sync()
        assert f"operation 1 was aten::relu, is aten::tanh, at {line_of('called')}" in str(
            debugging.explain_recompile()
        )
        for n in (4, 5):
            x = torch.ones(n, 3).to("xla")
            y = torch.exp(x)  # read
            spmd.sync()
        text = the_change().text
        assert (
            f"read by operation 0, aten::exp, at {line_of('read')}" in text
            and f"made at {__file__}" in text
            and y is not None
        )


def test_source_lines_are_an_ingredient():
    def step():
        y = torch.ones(4).to("xla") * 2
        spmd.sync()
        return y

    step()
    with debugging.source_lines():
        step()
    change = the_change()
    assert (change.ingredient, change.text) == ("origins", "source lines are on, and were off")
    with debugging.source_lines():
        y = torch.ones(4).to("xla") * 2  # elsewhere
        spmd.sync()
    assert re.search(
        r"operation 0, aten::mul\.Tensor, was recorded at .*, is at ", the_change().text
    )
    assert line_of("elsewhere") in the_change().text and y is not None


def test_the_nearest_program_is_the_one_that_is_compared():
    x = torch.ones(4, 4).to("xla")
    (x.sin().cos().tanh() + 1).cpu()
    (x.exp() * 2).cpu()
    (torch.ones(5, 4).to("xla").sin().cos().tanh() + 1).cpu()
    assert (
        the_change().text
        == "leaf 0 (data, read by operation 0, aten::sin): float32[4, 4] -> float32[5, 4]"
    )


def test_a_program_that_was_dropped(monkeypatch):
    monkeypatch.setattr(spmd.config, "max_programs", 1)
    x = torch.ones(4, 4).to("xla")
    for f in (torch.sin, torch.cos, torch.sin):
        f(x).cpu()
    text = str(debugging.explain_recompile())
    assert (
        "was compiled before and dropped from memory since, as more than 1 were in use. "
        "Raise spmd.config.max_programs"
    ) in text


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"explain_recompile knows 0 compiled programs.*got last=1\. "
        r"Call it after the sync\(\)",
    ):
        debugging.explain_recompile()
    for bad in (0, -1, "2", True):
        with pytest.raises(
            ValueError,
            match=r"counts back from the newest program, which is 1; got .*\. Pass 1 or more",
        ):
            debugging.explain_recompile(bad)


def test_reports_on_stderr(monkeypatch, capsys):
    x = torch.ones(6).to("xla")
    x.sin().cpu()
    monkeypatch.setattr(spmd.config, "explain_recompiles_after", compiles() + 1)
    x.cos().cpu()
    assert capsys.readouterr().err == ""
    torch.ones(7).to("xla").cos().cpu()
    err = capsys.readouterr().err
    assert "float32[6] -> float32[7]" in err and __file__ in err
    torch.ones(7).to("xla").cos().cpu()
    assert capsys.readouterr().err == ""  # nothing was compiled
