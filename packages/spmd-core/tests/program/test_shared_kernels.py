"""Operations that do the same are traced once, and the program is that of tracing each of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from meshes import two_axes
from recorded_graphs import graph_of
from torch import nn

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.ops.registry import Number
from spmd_core.program.fold import Fold
from spmd_core.program.shared_kernels import SharedKernels


def each_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each operation's own kernel run."""

    def results(self, op, kernel, arrays, numbers):
        return kernel(arrays, numbers)

    monkeypatch.setattr(SharedKernels, "results", results)


def gradients(mesh: spmd.Mesh) -> torch.Tensor:
    """A value that is recorded with partial sums, an update in each layer, and dropout."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, 16).to("xla") for _ in range(3)]
    for layer in layers:
        spmd.mark_sharding(layer.weight, mesh, ("x", None))
    x = spmd.mark_sharding(torch.randn(16, 16).to("xla"), mesh, ("x", None))
    for layer in layers:
        x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.5)
    x.square().mean().backward()
    total = torch.zeros((), device="xla")
    with torch.no_grad():
        for layer in layers:
            layer.weight.add_(layer.weight.grad, alpha=-0.1)
            total = total + layer.weight.sum()
    return total


@pytest.mark.parametrize("axes", [("x",), ("x", "y")])
def test_the_program_is_that_of_tracing_each_operation(axes, monkeypatch):
    mesh = spmd.Mesh(range(8), (8,), axes) if len(axes) == 1 else two_axes()
    shared = debugging.stablehlo(gradients(mesh))
    each_traced(monkeypatch)
    assert debugging.stablehlo(gradients(mesh)) == shared


def test_regions_of_each_devices_own_blocks_are_shared(mesh_1d, num_devices, monkeypatch):
    def block(x):
        for _ in range(3):
            x = torch.sin(x) * spmd.manual.all_reduce(x, "x")
        return x

    def result():
        x = torch.linspace(0, 1, 2 * num_devices).to("xla")
        return spmd.shard_map(block, mesh_1d, [("x",)], ("x",))(x)

    shared = debugging.stablehlo(result())
    each_traced(monkeypatch)
    assert debugging.stablehlo(result()) == shared


def test_operations_on_images_of_other_layouts_have_kernels_of_their_own(mesh_1d, monkeypatch):
    def results():
        weight = torch.ones(2, 2, 3, 3).to("xla")
        rows, whole = (torch.ones(2, 2, 16, 5).to("xla") for _ in range(2))
        spmd.mark_sharding(rows, mesh_1d, (None, None, "x"))
        return torch.stack([nn.functional.conv2d(x, weight, padding=1) for x in (rows, whole)])

    shared = debugging.stablehlo(results())
    each_traced(monkeypatch)
    assert debugging.stablehlo(results()) == shared


def test_each_layer_has_its_own_line_and_module(mesh_1d):
    class Layer(nn.Module):
        def forward(self, x):
            return torch.erf(x)

    layers = nn.Sequential(Layer(), Layer(), Layer())
    with debugging.source_lines():
        x = spmd.mark_sharding(torch.ones(8).to("xla"), mesh_1d, ("x",))
        text = debugging.hlo(layers(x), stage="before")
    for i in range(3):
        assert f"Sequential.{i}/aten::erf#" in text


def test_each_layer_has_its_own_mask(mesh_1d):
    x = spmd.mark_sharding(torch.ones(64).to("xla"), mesh_1d, ("x",))
    masks = [nn.functional.dropout(x, 0.5) for _ in range(3)]
    spmd.sync()
    values = [mask.cpu() for mask in masks]
    assert all(set(value.tolist()) == {0.0, 2.0} for value in values)
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])


def test_a_kernel_runs_once_for_all_that_do_the_same(mesh_1d, monkeypatch):
    names = []
    computed = Fold._computed

    def counted(self, op, *args):
        names.append(op.entry.name)
        return computed(self, op, *args)

    monkeypatch.setattr(Fold, "_computed", counted)
    for num_layers in (2, 6):
        x = spmd.mark_sharding(torch.ones(8).to("xla"), mesh_1d, ("x",))
        for _ in range(num_layers):
            x = torch.sin(x).mul(3)
        names.clear()
        debugging.stablehlo(x)
        assert sorted(names) == ["aten::mul.Tensor", "aten::sin"]


def sine_twice() -> list[Any]:
    """Two operations that do the same, and one that does something else."""
    x = torch.ones(4).to("xla")
    return [*graph_of(torch.sin(torch.sin(x)), torch.cos(x)).ops]


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x: [x],
        lambda x: [x, jnp.sin(x), x],
        lambda x: [jnp.zeros(3), x * 2],
        lambda x: [np.float32(2) * x, jnp.float32(7)],
        lambda x: [jnp.asarray([1.0, 2.0, 3.0, 4.0]) + x],
        lambda x: [jnp.where(x > 1, x, 0.0)] * 2,
    ],
    ids=["operand", "operand twice", "constant", "scalar", "array", "one result twice"],
)
def test_results_that_are_operands_and_constants(kernel):
    op, again, _ = sine_twice()
    kernels = SharedKernels([op, again])

    def program(x):
        first = kernels.results(op, lambda arrays, _: kernel(*arrays), [x], [])
        second = kernels.results(again, lambda arrays, _: kernel(*arrays), [first[-1]], [])
        return [*first, *second]

    def direct(x):
        first = kernel(x)
        return [*first, *kernel(first[-1])]

    x = jnp.arange(4.0)
    for found, expected in zip(jax.jit(program)(x), jax.jit(direct)(x), strict=True):
        assert found.dtype == expected.dtype and found.weak_type == expected.weak_type
        np.testing.assert_array_equal(found, expected)


def test_operands_of_another_type_are_traced_again():
    op, again, _ = sine_twice()
    kernels, types = SharedKernels([op, again]), []

    def kernel(arrays, numbers):
        types.append((jax.typeof(arrays[0]), [number.kind for number in numbers]))
        return [arrays[0] * numbers[0].value]

    def program(x, weak, number):
        found = []
        for value in (x, x, weak * 1.0):
            found += kernels.results(op, kernel, [value], [Number(number, float)])
        return found

    results = jax.jit(program)(jnp.float32(3), 3.0, jnp.float32(2))
    assert [float(x) for x in results] == [6.0] * 3
    assert [x.weak_type for x in results] == [False, False, False]
    assert [aval.weak_type for aval, _ in types] == [False, True]
    assert all(kinds == [float] for _, kinds in types)


def test_what_occurs_once_is_not_traced_twice():
    op, again, other = sine_twice()
    kernels, count = SharedKernels([op, again, other]), []

    def kernel(arrays, numbers):
        count.append(1)
        return [jnp.cos(arrays[0])]

    jax.make_jaxpr(lambda x: kernels.results(other, kernel, [x], []))(1.0)
    assert len(count) == 1
    assert not kernels._traced


def test_a_kernel_that_fails_says_so_each_time(mesh_1d):
    op, again, _ = sine_twice()
    kernels = SharedKernels([op, again])

    def kernel(arrays, numbers):
        raise ValueError("no such kernel")

    for each in (op, again):
        with pytest.raises(ValueError, match="no such kernel"):
            jax.make_jaxpr(lambda x, each=each: kernels.results(each, kernel, [x], []))(1.0)
