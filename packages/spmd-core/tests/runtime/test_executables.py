"""Programs that are executed without jax's comparison of arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmd_core as spmd
from spmd_core import releases
from spmd_core.program import compile_cache
from spmd_core.runtime import executables
from spmd_core.runtime.jax_sharding import replicated


def test_results_and_donated_arguments_are_those_of_jax(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("x",))
    split, everywhere = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("x", None))
    a = jax.device_put(np.arange(8 * num_devices, dtype=np.float32), split)
    b = jax.device_put(np.full(1, 2, np.float32), everywhere)
    compiled = (
        jax.jit(lambda a, b: [a * b, b + 1], donate_argnums=0, out_shardings=[split, everywhere])
        .lower(a, b)
        .compile()
    )
    expected = [np.asarray(x) for x in compiled(jnp.copy(a), b)]
    execute = executables.execute_of(compiled)
    assert execute is not None
    found = execute([a, b])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    assert found[0].sharding.is_equivalent_to(split, 1)
    assert a.is_deleted() and not b.is_deleted()
    assert executables.first_deleted([b, b, a]) == 2
    assert executables.first_deleted([b, b]) is executables.first_deleted([]) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_calls_the_host_or_is_unknown_is_left_to_jax(monkeypatch):
    def on_host(x):
        shape = jax.ShapeDtypeStruct((3,), np.float32)
        return jax.pure_callback(lambda x: np.asarray(x) + 1, shape, x)

    x = jnp.zeros(3)
    assert executables.execute_of(jax.jit(on_host).lower(x).compile()) is None
    plain = jax.jit(lambda x: x + 1).lower(x).compile()
    assert executables.execute_of(plain) is not None
    monkeypatch.setattr(executables, "_pxla", releases._Lacking("jax.not_there", None))
    assert executables.execute_of(plain) is None


def test_a_program_that_is_left_to_jax(monkeypatch):
    monkeypatch.setattr(executables, "execute_of", lambda compiled: None)
    x = torch.arange(5.0).to("xla")
    y = torch.special.i0e(x * 3.0 + 1.0) + 7  # a program of its own
    assert torch.allclose(y.cpu(), torch.special.i0e(torch.arange(5.0) * 3.0 + 1.0) + 7)
    program = compile_cache.newest()
    assert program._execute == program._call


@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_debug_infs"])
def test_jaxs_search_for_nan_and_infinities_goes_on(setting):
    x = torch.zeros(3).to("xla") if setting == "jax_debug_nans" else torch.ones(3).to("xla")
    zero = torch.zeros(3).to("xla")
    assert not (x / zero).isfinite().any()
    jax.config.update(setting, True)
    try:
        with pytest.raises(Exception, match=setting.removeprefix("jax_debug_")[:3]):
            (x / zero).cpu()
    finally:
        jax.config.update(setting, False)
    assert not (x / zero).cpu().isfinite().any()


def test_an_input_without_data_is_an_error():
    w = torch.arange(6.0).to("xla")
    step = spmd.compile(lambda x: x * w, capture=True)
    x = torch.ones(6).to("xla")
    for _ in range(3):
        step(x)
    spmd.to_jax(w)
    step(x)
    spmd.to_jax(w).delete()
    with pytest.raises(spmd.errors.ProgramError, match=r"float32\[6\].*Load"):
        step(x)
    w.copy_(torch.ones(6))
    assert step(x).tolist() == [1.0] * 6


def test_numbers_are_uploaded_when_their_bits_are_others(num_devices):
    array = executables.Replicated(np.float64, replicated(tuple(range(num_devices))))
    first = array.of([0.0, 1.0])
    assert first.dtype == np.float64 and array.of([0.0, 1.0]) is first
    other = array.of([-0.0, 1.0])
    assert other is not first and np.signbit(np.asarray(other)[0])
    np.testing.assert_array_equal(np.asarray(first), [0.0, 1.0])


def test_numbers_of_steps_that_differ():
    x = torch.ones(3).to("xla")
    found = []
    for by in (2.0, 2.0, -0.0, 0.0, 5.0):
        y = x * by
        spmd.sync()
        found.append(y.cpu())
    expected = [torch.ones(3) * by for by in (2.0, 2.0, -0.0, 0.0, 5.0)]
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs) and torch.equal(ours.signbit(), theirs.signbit())
