"""The cut: what it computes, compiles and donates."""

import dataclasses
import gc
import math
import re
import weakref

import pytest
import torch
from tiers import crossed, exhaustive
from torch import nn

import spmd_core as spmd
from spmd_core.graph import recorders, storage
from spmd_core.program import compile_cache, planning
from spmd_core.runtime import devices

pytestmark = pytest.mark.one_device


def compiles():
    return spmd.metrics.counter("compiles")


def test_what_nobody_holds_is_not_computed():
    spmd.sync()
    x = torch.ones(4).to("xla")
    y = x + 1
    y * 123  # dropped at once
    spmd.sync()
    names = [n.entry.name for n in compile_cache.newest().graph.nodes]
    assert names == ["aten::add.Tensor"] and y.tolist() == [2.0] * 4


def test_gradients_that_were_dropped_are_not_held_by_autograd():
    """If an autograd thread held them some milliseconds longer, cuts would depend on chance."""
    weights = [torch.ones(4, 4).to("xla").requires_grad_() for _ in range(20)]
    for _ in range(20):
        x = torch.ones(4, 4).to("xla")
        for weight in weights:
            x = x @ weight
        gradients = torch.autograd.grad(x.sum(), weights)
        held = [weakref.ref(gradient._handle) for gradient in gradients]
        del gradients, x
        assert not any(ref() for ref in held)


def test_the_same_program_compiles_once_and_order_is_deterministic(mesh_1d):
    def step(scale):
        a = spmd.mark_sharding(torch.randn(16, 4).to("xla"), mesh_1d, ("x",))
        b = (a * scale).softmax(-1)
        c = b.sum() + a.mean()
        spmd.sync()
        return c

    step(0.5)
    before, count = compiles(), len(compile_cache.keys())
    for i in range(5):
        step(float(i))
    assert compiles() == before and len(compile_cache.keys()) == count


def test_numbers_are_inputs_not_constants():
    x = torch.ones(3).to("xla")
    results = []
    for i in range(4):
        y = (x * (0.1 * i) + i).clamp(min=0.05 * i).pow(2) / (1 + i)
        x.add_(x, alpha=0.5 * i)
        spmd.sync()
        results.append(y)
        if i == 1:
            before = compiles()
    assert compiles() == before
    assert torch.allclose(results[1].cpu(), torch.full((3,), 1.21 / 2))


def test_integer_and_float_numbers_do_not_share_a_program():
    x = torch.ones(2, dtype=torch.int64).to("xla")
    assert (x * 2).dtype == torch.int64 and (x * 2.0).dtype == torch.float32
    assert (x * True).dtype == torch.int64 and (x.float() * 2).dtype == torch.float32


def test_the_default_dtype_is_part_of_the_key():
    x = torch.ones(2, dtype=torch.int64, device="xla")
    assert (x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype == torch.float64 and (x * 0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("foreach", "optimizer"),
    crossed(
        [False, True],
        [
            "AdamW",
            "Adam",
            "SGD",
            "RMSprop",
            "Adagrad",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adadelta",
            "Rprop",
            "ASGD",
            "Adafactor",
        ],
    ),
)
def test_optimizers_and_schedulers_do_not_recompile(optimizer, foreach, mesh_1d):
    reference = nn.Linear(16, 8)
    model = nn.Linear(16, 8)
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    spmd.mark_sharding(model.weight, mesh_1d, (None, "x"))
    counts = []
    make = getattr(torch.optim, optimizer)
    extra = {"momentum": 0.9} if optimizer == "SGD" else {}
    optimizers = [
        make(m.parameters(), lr=1e-2, foreach=foreach, **extra) for m in (reference, model)
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in optimizers]
    data = torch.randn(4, 16)
    fallbacks = spmd.metrics.counter("host_fallbacks")
    for _ in range(6):
        for m, o, s, x in zip((reference, model), optimizers, schedulers, (data, data.to("xla"))):
            m(x).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
            s.step()
            o.zero_grad()
        spmd.sync()
        counts.append(compiles())
    assert spmd.metrics.counter("host_fallbacks") == fallbacks
    # RAdam changes its formula in the sixth step.
    assert counts[4] == counts[1]
    torch.testing.assert_close(
        model.weight.detach().cpu(), reference.weight.detach(), rtol=2e-4, atol=2e-5
    )


def test_optimizers_with_another_interface():
    matrices = [nn.Parameter(torch.ones(8, 4).to(device)) for device in ("cpu", "xla")]
    data = torch.randn(3, 8)
    for p in matrices:
        optimizer = torch.optim.Muon([p], lr=1e-2)
        for _ in range(3):
            (data.to(p.device) @ p).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Muon orthogonalises in bfloat16, hence the tolerance.
    torch.testing.assert_close(
        matrices[1].detach().cpu(), matrices[0].detach(), rtol=2e-2, atol=2e-3
    )

    vectors = [nn.Parameter(torch.arange(4.0).to(device)) for device in ("cpu", "xla")]
    for p in vectors:
        optimizer = torch.optim.LBFGS([p], max_iter=5)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p - 3).pow(2).sum() + p.pow(4).sum() / 10
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    torch.testing.assert_close(vectors[1].detach().cpu(), vectors[0].detach(), rtol=1e-3, atol=1e-3)


SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "PolynomialLR": {},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
}


@pytest.mark.parametrize("name", [*SCHEDULERS, "ReduceLROnPlateau"])
def test_every_scheduler_keeps_the_program(name):
    counts, ends = [], []
    for device in ("cpu", "xla"):
        p = nn.Parameter(torch.ones(4).to(device))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, name)(
            optimizer, **SCHEDULERS.get(name, {"patience": 0})
        )
        for _ in range(6):
            loss = p.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            spmd.sync()
            counts.append(compiles())
        ends.append(p.detach().cpu())
    assert counts[-1] == counts[-5]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_dropout_does_not_recompile():
    x = torch.ones(64).to("xla")
    seen = set()
    for i in range(4):
        y = nn.functional.dropout(x, 0.5)
        spmd.sync()
        seen.add(tuple(y.tolist()))
        if i == 1:
            before = compiles()
    assert compiles() == before and len(seen) == 4


def test_every_parameter_and_state_buffer_is_donated(mesh_1d, num_devices):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("xla")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh_1d, ("x",))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(8, 64, device="xla")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    record = compile_cache.newest().record
    state_bytes = 3 * sum(p.numel() * 4 for p in model.parameters()) // num_devices
    assert record.alias_bytes == state_bytes
    assert record.argument_bytes + record.output_bytes - record.alias_bytes < 1.2 * state_bytes


def test_a_buffer_goes_to_what_replaces_it(mesh_1d):
    """A donated buffer goes to the result that replaces it, not to another one of the same shape.

    Otherwise XLA would have to copy what is overwritten too early.
    """
    layers = [nn.Linear(64, 64, bias=False).to("xla") for _ in range(4)]
    for layer in layers:
        spmd.mark_sharding(layer.weight, mesh_1d, ("x", None))
    optimizer = torch.optim.AdamW([layer.weight for layer in reversed(layers)])
    for _ in range(3):
        kept = spmd.mark_sharding(layers[2].weight.detach() * 2, mesh_1d, ("x", None))
        nn.Sequential(*layers)(torch.ones(8, 64, device="xla")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        planned = planning.plan(storage.pending())
        replaced = [s.committed for s in planned.live]
        spmd.sync()
    donated = planned.key.donated
    assert kept.shape == (64, 64) and len(donated) == 12
    assert all(
        replaced[result] is planned.leaves[position] for result, position in enumerate(donated)
    )
    pairs = re.findall(
        r"\{(\d+)\}: \((\d+), ", compile_cache.newest().compiled_text().split("\n", 1)[0]
    )
    assert [int(result) for result, _ in pairs] == list(range(12))
    # The two arguments before the leaves are the float and the integer numbers.
    assert [int(argument) - 2 for _, argument in pairs] == list(donated)


def test_an_unmarked_parameter_is_donated_too():
    p = nn.Parameter(torch.ones(256).to("xla"))
    optimizer = torch.optim.SGD([p], lr=0.1)
    counts = []
    for _ in range(4):
        (p * p).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        counts.append(compiles())
    assert (
        counts[-1] == counts[0] + (counts[1] - counts[0])
        and compile_cache.newest().record.alias_bytes == 1024
    )
    assert math.isclose(p[0].item(), 0.8**4, rel_tol=1e-5)


def test_compiler_options_make_a_program_of_their_own(monkeypatch):
    x = torch.ones(8).to("xla")
    values = []
    for options in (
        {},
        {"xla_cpu_prefer_vector_width": 128, "xla_cpu_enable_fast_min_max": False},
        {},
    ):
        monkeypatch.setattr(spmd.config, "compiler_options", options)
        before = compiles()
        values.append(((x.tan() * 5).tolist(), compiles() - before))
    assert values == [(values[0][0], 1), (values[0][0], 1), (values[0][0], 0)]
    monkeypatch.setattr(spmd.config, "compiler_options", {"xla_no_such_option": True})
    y = x.tan() * 6
    with pytest.raises(
        spmd.errors.ProgramError,
        match=r"under spmd\.config\.compiler_options \{'xla_no_such_option': True\}: "
        r".*No such compile option",
    ):
        y.tolist()
    monkeypatch.setattr(spmd.config, "compiler_options", {})
    torch.testing.assert_close(y.cpu(), x.cpu().tan() * 6)


def test_a_value_that_is_still_held_is_not_donated():
    x = torch.arange(4.0).to("xla")
    spmd.sync()
    y = x.clone()
    z = x.detach()
    spmd.sync()
    y.add_(1)
    spmd.sync()
    assert x.tolist() == z.tolist() == [0, 1, 2, 3] and y.tolist() == [1, 2, 3, 4]
    x.add_(1)
    spmd.sync()
    assert z.tolist() == [1, 2, 3, 4]


def test_a_program_that_is_donated_its_input_is_none_for_an_input_that_lives(mesh_1d):
    for lives in (False, True):
        x = spmd.mark_sharding(torch.arange(8.0).to("xla"), mesh_1d, ("x",))
        spmd.sync()
        y = spmd.mark_sharding(x.mul(2), mesh_1d, ("x",))
        held = [x] * lives
        del x
        before = spmd.metrics.counter("donated_bytes")
        spmd.sync()
        assert spmd.metrics.counter("donated_bytes") - before == (0 if lives else 32)
        assert y.tolist() == [2.0 * i for i in range(8)]
    assert held[0].tolist() == [1.0 * i for i in range(8)]


def test_a_result_that_is_an_argument_owns_its_buffer():
    a = torch.ones(4).to("xla")
    b = a + 0
    spmd.sync()
    c, d = b.clone(), b.clone()
    spmd.sync()
    c.mul_(2)
    spmd.sync()
    d.mul_(3)
    spmd.sync()
    assert (b.tolist(), c.tolist(), d.tolist()) == ([1.0] * 4, [2.0] * 4, [3.0] * 4)


def test_pending_values_die_with_their_tensors():
    spmd.sync()
    x = torch.ones(8, device="xla")
    for _ in range(3 * 0x4000):
        x + 1
    gc.collect()
    assert len(recorders.current().storages) < 0x4001


def test_memory_of_a_long_chain_without_a_cut_is_one_program():
    x = torch.zeros(2).to("xla")
    for _ in range(200):
        x = x + 1
    before = spmd.metrics.counter("executions")
    assert x.tolist() == [200, 200] and spmd.metrics.counter("executions") == before + 1


def test_out_of_memory_names_the_program_and_its_largest_values(monkeypatch):
    x = torch.ones(1000, 1000).to("xla")
    y = x @ x
    spmd.sync()

    def exhausted(*args):
        raise torch_error("RESOURCE_EXHAUSTED: Out of memory allocating 4000000 bytes.")

    failing = dataclasses.replace(compile_cache.newest(), compiled=exhausted)
    monkeypatch.setitem(compile_cache._programs, compile_cache.keys()[-1], failing)
    z = x @ x
    with pytest.raises(
        spmd.errors.DeviceMemoryError, match=r"(?s)spmd_1ops_1in.*Shard more.*4\.0 MB  an argument"
    ):
        z.cpu()
    monkeypatch.undo()
    assert z.sum().item() == 1e9 == y.sum().item()


def torch_error(text):
    import jax  # noqa: PLC0415  # only to raise jax's own exception

    return jax.errors.JaxRuntimeError(text)


def test_the_program_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(spmd.config, "max_programs", 3)
    for n in range(1, 7):
        torch.ones(n, device="xla").add_(1).tolist()
    assert len(compile_cache.keys()) == 3


def test_a_miss_says_which_ingredient_changed():
    a = torch.ones(3).to("xla")
    (a * 2).tolist()
    first = compile_cache.keys()[-1]
    b = torch.ones(5).to("xla")
    (b * 2).tolist()
    assert set(compile_cache.changed(compile_cache.keys()[-1], first)) == {
        "structure",
        "leaves",
        "outputs",
    }


def test_reading_counts_and_metrics_print():
    compile_cache.clear()  # another test may have compiled this program
    before = spmd.metrics.counter("host_reads")
    torch.ones(2, device="xla").tolist()
    assert spmd.metrics.counter("host_reads") == before + 1
    assert (
        "executions" in spmd.metrics.report()
        and f" for {__file__}:" in spmd.metrics.report()
        and "per device" in spmd.metrics.report()
    )


@pytest.mark.one_device
@pytest.mark.parametrize("dtype", [torch.float32, exhaustive(torch.bfloat16)], ids=str)
def test_initialisation_takes_the_memory_of_the_shards(dtype, mesh_1d, mesh_2d, num_devices):
    def model(mesh, *spec):
        with torch.device("xla"):
            made = nn.Sequential(
                nn.Embedding(1000, 256, dtype=dtype),
                *(nn.Linear(256, 256, dtype=dtype) for _ in range(4)),
                nn.LayerNorm(256, dtype=dtype),
            )
        for p in made.parameters():
            spmd.mark_sharding(p, mesh, spec[-p.dim() :])
        return made

    for mesh, *spec in ((mesh_1d, "x", None), (mesh_2d, "a", "b"), (mesh_2d, None, ("b", "a"))):
        made = model(mesh, *spec)
        spmd.sync()
        record = compile_cache.newest().record
        shards = sum(p.local_shards[0].data.nbytes for p in made.parameters())
        constants = sum(p.local_shards[0].data.nbytes for p in made[-1].parameters())
        assert record.argument_bytes < 1000
        # The constants are made apart.
        assert shards - constants <= record.peak_bytes < 1.1 * shards
        assert shards < 1.05 * sum(p.nbytes for p in made.parameters()) / num_devices
        std = made[1].weight.std().item()
        assert std == pytest.approx(1 / math.sqrt(3 * 256), rel=0.02)


def test_programs_are_dropped_before_memory_maps_run_out(monkeypatch):
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)

    def run(n: int) -> list[float]:
        return (torch.arange(float(n)).to("xla") * 3 + n).tolist()

    for n in range(20, 32, 2):
        run(n)
    assert devices.free_memory_maps() is None or devices.free_memory_maps() > 0
    before, dropped = len(compile_cache.keys()), spmd.metrics.counter("programs_dropped")
    monkeypatch.setattr(devices, "free_memory_maps", lambda: 100)
    assert run(40) == [3.0 * i + 40 for i in range(40)]
    assert len(compile_cache.keys()) == before // 2 + 1
    assert spmd.metrics.counter("programs_dropped") - dropped == before - before // 2
    assert run(20) == [3.0 * i + 20 for i in range(20)]  # compiled again
