"""FLOPs that loops repeat, against XLA's own count of the same work without a loop."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmd_core.debugging import hlo_flops, hlo_text


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def test_a_loops_product_is_counted_for_each_run():
    def scan(a, xs):
        return lax.scan(lambda carry, x: (carry @ x, None), a, xs)[0]

    program = compiled(scan, (16, 16), (10, 16, 16))
    product = 2 * 16**3
    assert hlo_flops.repeated(program.as_text()) == 9 * product
    assert hlo_flops.total(program.as_text()) == 10 * product
    assert program.cost_analysis()["flops"] == pytest.approx(product, abs=20)  # and the loop's


def test_loops_multiply_and_unrolled_bodies_are_counted_by_xla():
    def nested(a, xs):
        def inner(carry, x):
            return lax.scan(lambda c, _: (jnp.sin(c @ x), None), carry, None, length=3)[0], None

        return lax.scan(inner, a, xs, unroll=2)[0]

    program = compiled(nested, (8, 8), (10, 8, 8))
    # XLA counts 2 of the 30 products, or all of an inner loop that it unrolls itself.
    text = program.as_text()
    computations, _ = hlo_text.parse(text)
    dots = sum(i.opcode == "dot" for c in computations.values() for i in c.values())
    assert hlo_flops.repeated(text) == (30 - dots) * 2 * 8**3


def test_without_a_loop_nothing_is_repeated():
    program = compiled(lambda a, b: jnp.tanh(a @ b) @ b, (8, 8), (8, 8))
    assert hlo_flops.repeated(program.as_text()) == 0


def test_an_unknown_length_is_not_guessed():
    def loop(a, n):
        return lax.while_loop(lambda c: c[1] < n[0], lambda c: (c[0] @ a, c[1] + 1), (a, 0.0))[0]

    text = compiled(loop, (8, 8), (1,)).as_text()
    assert hlo_flops.repeated(text) is None
    assert hlo_flops.total(text) == 2 * 8**3  # at least


def test_a_branch_is_no_loop():
    def branch(a):
        return lax.cond(a[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, a)

    text = compiled(branch, (8, 8)).as_text()
    assert hlo_flops.repeated(text) == 0
    assert hlo_flops.total(text) == 0


def test_a_librarys_product_in_a_loop_is_not_guessed():
    def text(target):
        return f"""HloModule m
%body (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %c = f32[8]{{0}} custom-call(%p), custom_call_target="{target}"
}}

%cond (p: f32[8]) -> pred[] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %w = f32[8]{{0}} while(%p), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""  # noqa: E501 - a line of XLA's

    assert hlo_flops.repeated(text("__cublas$gemm")) is None
    assert hlo_flops.repeated(text("TopK")) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "SAME"},
        {"padding": "VALID", "window_strides": (2, 3)},
        {"padding": [(1, 2), (0, 3)], "rhs_dilation": (2, 1)},
        {"padding": [(2, 2), (1, 1)], "lhs_dilation": (2, 3)},
        {"padding": "SAME", "feature_group_count": 2},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_a_convolution_counts_as_in_xla(options):
    options = {"window_strides": (1, 1), **options}
    groups = options.get("feature_group_count", 1)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options)

    def scan(x, kernel):
        return lax.scan(lambda c, _: (c * convolve(c, kernel).sum(), None), x, None, 4)[0]

    shapes = (2, 4, 13, 11), (6, 4 // groups, 3, 3)
    once = compiled(convolve, *shapes).cost_analysis()["flops"]
    assert hlo_flops.repeated(compiled(scan, *shapes).as_text()) == 3 * once
