"""The hand-written jax program computes the recipe's step: losses, norms and weights of torch."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.experimental.compilation_cache import compilation_cache
from tiers import exhaustive
from torch import nn

from benchmarks import reference_jax_gpt2 as reference
from benchmarks import reference_jax_program as program
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset
from spmd_core.planner import topology

TINY = ModelPreset("tiny", 2, 32, 4, 256, 16, 16, 8, 1e-2)
LR = 1e-2


def torch_steps(num_steps: int, *, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], Any]:
    """The recipe's model, its initial values, and losses and norms of steps in eager torch.

    The model's gradients are those of the first step, clipped.

    Args:
        num_steps: how many steps.
        dtype: bfloat16 for autocast; float64 for values without rounding of their own, as that of
            float32 grows by Adam to 6e-6 in a weight.
    """
    torch.manual_seed(0)
    model = build_model(TINY, vocab_size=256, dropout=0.0)
    initial = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    if dtype is torch.float64:
        model.double()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    x_BT, y_BT = (torch.from_numpy(t).long() for t in batch())
    found: list[tuple[float, float]] = []
    first: list[torch.Tensor | None] = []
    for _ in range(num_steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(x_BT).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            loss = F.cross_entropy(logits.to(wide).flatten(0, 1), y_BT.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first = first or [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    for p, gradient in zip(model.parameters(), first, strict=True):
        p.grad = gradient
    return model, initial, np.array(found)


def batch() -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def jax_steps(
    setup: program.Setup, initial: dict[str, Any], num_steps: int
) -> tuple[program.State, Any]:
    """The same steps by the program."""
    step = program.step_for(setup, jax.devices())
    shapes = program.parameter_shapes(setup)
    zeros = {name: np.zeros(size, np.float32) for name, size in shapes.items()}
    values = {name: initial[name].reshape(size) for name, size in shapes.items()}
    x_BT, y_BT = batch()
    parts: Any = (values, zeros, zeros, np.int32(0))
    arguments = (program.State(*parts), x_BT, y_BT, np.float32(LR))
    state, *rest = jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding), arguments, step.arguments
    )
    found = []
    for _ in range(num_steps):
        state, loss, norm = step.jitted(state, *rest)
        found.append((float(loss), float(norm)))
    return state, np.array(found)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "recomputes"),
    [exhaustive(1, 1, False), exhaustive(8, 1, True), (4, 2, True), exhaustive(2, 4, False)],
)
def test_steps_equal_torch(fsdp: int, tensor: int, recomputes: bool) -> None:
    if fsdp * tensor > jax.device_count():
        pytest.skip(f"needs {fsdp * tensor} devices; this run has {jax.device_count()}")
    model, initial, expected = torch_steps(3, dtype=torch.float64)
    setup = program.Setup(
        TINY, fsdp, tensor, batch=8 // fsdp, recomputes=recomputes, dtype=jnp.float32
    )
    state, found = jax_steps(setup, initial, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, p in model.named_parameters():
        own, expected = np.asarray(state.parameters[name]).reshape(p.shape), p.detach().numpy()
        assert p.grad is not None
        # Adam's first step is lr * g / (|g| + 1e-8): rounding decides it where a gradient is 0 but
        # for rounding, as that of the keys' bias, or cancels.
        decides = p.grad.abs().numpy() > 1e-7
        assert decides.mean() > 0.6, name
        np.testing.assert_allclose(own[decides], expected[decides], atol=1e-5, err_msg=name)


@pytest.mark.exhaustive
def test_rows_travel_to_tokens_where_there_are_more_tokens_than_rows() -> None:
    setup = program.Setup(TINY, batch=16, dtype=jnp.float32)
    ids = np.tile(batch()[0], (2, 1))
    assert 8 * TINY.seq < setup.vocabulary <= ids.size  # the test above has the other case
    table = np.random.default_rng(1).normal(size=(256, 32)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    spec = jax.sharding.PartitionSpec()
    rows, gradient = jax.shard_map(
        lambda t, i: (
            program.look_up(setup, t, i),
            jax.grad(lambda t: (program.look_up(setup, t, i) ** 2).sum())(t),
        ),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(table, ids)
    weight = torch.from_numpy(table).requires_grad_()
    expected = F.embedding(torch.from_numpy(ids).long(), weight)
    expected.square().sum().backward()
    np.testing.assert_array_equal(rows, expected.detach().numpy())
    assert weight.grad is not None
    np.testing.assert_allclose(gradient, weight.grad.numpy(), rtol=1e-6)


@pytest.mark.exhaustive
def test_bfloat16_is_near_torchs_autocast() -> None:
    _, initial, expected = torch_steps(1, dtype=torch.bfloat16)
    _, found = jax_steps(program.Setup(TINY, batch=8), initial, 1)
    np.testing.assert_allclose(found, expected, rtol=2e-3)  # bfloat16 keeps 8 bits


@pytest.mark.exhaustive
def test_row_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--preset", "smoke"]) == 0
    assert "GPT-2 smoke on one device" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_program_in_the_cache_on_disk_is_compiled_again(tmp_path: Path) -> None:
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1)(1.0)
        assert [reference.main(["--preset", "smoke"]) for _ in range(2)] == [0, 0]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data=2"], "mesh axes must be among fsdp, tensor; got ['data']"),
        (["--mesh", "fsdp=*"], "a number for each axis; got 'fsdp=*'. Write for instance --mesh"),
        (["--mesh", "tensor=3"], "the axis tensor must divide the number of heads"),
        (["--mesh", "fsdp=3"], "the axis fsdp must divide the width"),
        (["--batch", "0"], "--batch must be at least 1; got 0"),
        (["--mesh", "fsdp=64"], "a process starts its emulated devices once"),
        (["--mesh", "fsdp=2", "--topology", "cpu-1"], "--mesh must fit the topology; got 2"),
        (["--topology", "v4-7"], "v4-8"),
        (["--dump", "."], "--dump makes a folder; got ., which is there"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--preset", "smoke", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_step_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 59G of 30G.\nmore")

    found = dataclasses.replace(topology.find_topology("cpu-1"), request={})  # as one of TPUs
    monkeypatch.setattr(reference.topology, "find_topology", lambda name: found)
    monkeypatch.setattr(reference, "write_buffers", refuse)
    assert reference.main(["--preset", "smoke"]) == 1
    assert "fit the device's memory; got RESOURCE_EXHAUSTED: 59G of 30G. Pass a larger" in (
        capsys.readouterr().err
    )


def test_peak_is_what_the_data_needs() -> None:
    assert reference.Memory(arguments=8, results=1, temporaries=4).peak == 13
