"""Adam's bias corrections: float64's everywhere, and what TPUs compute in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from spmd_core.ops.kernels import bias_correction
from spmd_core.ops.registry import Context, Number, lowering_named

COUNTS = np.array([1, 2, 3, 10, 1000, 12345, 10**6, 2**24], np.float32)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 1 - 1e-6])
def test_tpus_have_it_to_float32s_precision(beta: float) -> None:
    with jax.enable_x64(True):
        got = bias_correction.in_float32(jnp.float64(beta), jnp.asarray(COUNTS))
    assert got.dtype == np.float32
    expected = -np.expm1(COUNTS.astype(np.float64) * np.log1p(-(1 - beta))) if beta else 1.0
    np.testing.assert_allclose(got, np.broadcast_to(expected, COUNTS.shape), rtol=4e-7)


def step_on(platform: str, dtype: torch.dtype, count: float) -> tuple[list[torch.Tensor], str]:
    """A fused step that is lowered for a platform: its results, computed here, and its text."""
    values = [torch.linspace(low, 2, 6).to(dtype) for low in (-1, -2, 0.5, 0.25)]

    def step(given: list[jax.Array], step: jax.Array, numbers: list[jax.Array]) -> list[jax.Array]:
        names = ("lr", "beta1", "beta2", "weight_decay", "eps")
        options = {name: Number(x, float) for name, x in zip(names, numbers)}
        lists = [*([x] for x in given), [], [step]]
        found = lowering_named("aten::_fused_adamw").function(
            Context((), platform), *lists, **options, amsgrad=False, maximize=False
        )
        return list(found)

    with jax.enable_x64(True):
        arguments = (
            [jnp.asarray(x.numpy()) for x in values],
            jnp.float32(count),
            [jnp.float64(x) for x in (0.1, 0.9, 0.999, 0.1, 1e-8)],
        )
        text = jax.jit(step).lower(*arguments).as_text()
        return [torch.from_numpy(np.array(x)) for x in step(*arguments)], text


@pytest.mark.parametrize("count", [1.0, 7.0, 3000.0])
def test_a_step_of_tpus_is_eager_torchs(count: float) -> None:
    got, text = step_on("tpu", torch.float32, count)
    # XLA's float64 on a TPU is thousands of operations in each power and each division.
    assert "power" not in text and "sqrt" in text
    assert "f64" not in "".join(line for line in text.splitlines() if "divide" in line)
    given = [torch.linspace(low, 2, 6) for low in (-1, -2, 0.5, 0.25)]
    torch._fused_adamw_(
        *([x] for x in given), [], [torch.tensor(count)], lr=0.1, beta1=0.9, beta2=0.999,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    for mine, expected in zip(got, given):
        torch.testing.assert_close(mine, expected, rtol=2e-6, atol=1e-7)


def test_float64_where_the_platform_or_the_parameter_has_it() -> None:
    for platform, dtype in (("cpu", torch.float32), ("gpu", torch.float32), ("tpu", torch.float64)):
        (*_,), text = step_on(platform, dtype, 3.0)
        powers = [line for line in text.splitlines() if "power" in line]
        assert powers and all("f64" in line for line in powers)
