"""Elementwise lowerings against eager torch on the CPU."""

import pytest
import torch
from samples import FLOATS, INF, NAN, SPECIAL, values

from oracle import check
from spmd_core.ops import elementwise

# ---- one operand ---------------------------------------------------------------------------------

# The domain of each function: outside of it torch and XLA agree, but every sample would be nan.
DOMAINS = {
    "acos": (-1, 1), "asin": (-1, 1), "atanh": (-1, 1), "erfinv": (-1, 1), "acosh": (1, 4),
    "log": (0, 5), "log10": (0, 5), "log2": (0, 5), "log1p": (-1, 5), "sqrt": (0, 5),
    "rsqrt": (0.1, 5), "reciprocal": (0.2, 4), "digamma": (0.2, 6), "lgamma": (0.2, 6),
    "special_entr": (0, 3),
}  # fmt: skip
INTEGERS_STAY = ("ceil", "floor", "neg", "round", "sgn", "sign", "trunc")
COMPLEX_TOO = (
    "acos",
    "asin",
    "atan",
    "cos",
    "cosh",
    "exp",
    "log",
    "neg",
    "reciprocal",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)


@pytest.mark.parametrize("op", sorted(elementwise._UNARY))
def test_unary(op: str) -> None:
    low, high = DOMAINS.get(op, (-3, 3))
    check(
        f"aten.{op}.default",
        torch.cat([values(torch.float32, low, high).flatten(), torch.tensor(SPECIAL)]),
    )
    check(f"aten.{op}.default", values(torch.bfloat16, low, high))
    if op not in ("frac",):
        check(
            f"aten.{op}.default",
            torch.tensor([0, 1, 2, 3]) if op in DOMAINS else torch.tensor([-2, -1, 0, 1, 2, 3]),
        )


def test_unary_of_one_value_and_of_none() -> None:
    check("aten.exp.default", torch.tensor(0.5))
    check("aten.exp.default", torch.empty(0, 3))


@pytest.mark.parametrize("op", COMPLEX_TOO)
def test_unary_complex(op: str) -> None:
    check(f"aten.{op}.default", torch.complex(values(torch.float32), values(torch.float32, seed=1)))


@pytest.mark.parametrize("op", ["abs", "angle"])
def test_parts_of_a_complex_number(op: str) -> None:
    check(f"aten.{op}.default", torch.complex(values(torch.float32), values(torch.float32, seed=1)))
    check(f"aten.{op}.default", torch.tensor(SPECIAL))
    check(f"aten.{op}.default", torch.tensor(SPECIAL, dtype=torch.bfloat16))
    check(f"aten.{op}.default", torch.tensor([-2, 0, 3]))


def test_abs_of_bytes() -> None:
    check("aten.abs.default", torch.tensor([0, 200], dtype=torch.uint8))


@pytest.mark.parametrize("op", [*elementwise._PREDICATES, "signbit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_predicates(op: str, dtype: torch.dtype) -> None:
    check(
        f"aten.{op}.default",
        torch.tensor(SPECIAL).nan_to_num(posinf=1, neginf=-1).to(dtype)
        if not dtype.is_floating_point
        else torch.tensor(SPECIAL, dtype=dtype),
    )


@pytest.mark.parametrize("decimals", [-1, 0, 2])
def test_round_to_decimals(decimals: int) -> None:
    check(
        "aten.round.decimals", torch.tensor([0.125, -12.345, 55.0, 45.0, 1e-9]), decimals=decimals
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_nan_to_num(dtype: torch.dtype) -> None:
    x = (
        torch.tensor([NAN, INF, -INF, 1.0]).nan_to_num(0, 5, 6).to(dtype)
        if dtype is torch.int64
        else torch.tensor([NAN, INF, -INF, 1.0], dtype=dtype)
    )
    check("aten.nan_to_num.default", x)
    check("aten.nan_to_num.default", x, 2.0, 3.0, -4.0)


# ---- two operands --------------------------------------------------------------------------------

INTEGER_BINARY = ("bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "lcm")
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
FLOAT_ONLY = ("hypot",)
POSITIVE = ("pow", "special_xlog1py", "xlogy")


def overload(op: str) -> str:
    """The name of the overload that takes two tensors."""
    return next(
        x for x in ("Tensor", "Tensor_Tensor", "default") if x in elementwise._BINARY[op][1]
    )


def operands(op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if op in POSITIVE:
        return values(dtype, 0.1, 4), values(dtype, 0.1, 3, (5,), 1)
    low = -7 if dtype is torch.int64 else -3
    other = values(dtype, low, -low, (5,), 1)
    return values(dtype, 3 * low, -3 * low), torch.where(other == 0, torch.ones_like(other), other)


@pytest.mark.parametrize("op", sorted(set(elementwise._BINARY) - {*INTEGER_BINARY, *SHIFTS}))
def test_binary(op: str) -> None:
    name = f"aten.{op}.{overload(op)}"
    check(name, *operands(op, torch.float32))
    check(name, *operands(op, torch.bfloat16))
    check(name, torch.empty(0, 5), values(torch.float32, 1, 2, (5,)))
    check(name, torch.tensor(1.5), torch.tensor(2.0))
    if op not in FLOAT_ONLY:
        check(name, *operands(op, torch.int64))
        if op != "heaviside":  # torch requires operands of one dtype
            check(name, operands(op, torch.int64)[0], operands(op, torch.float32)[1])


@pytest.mark.parametrize(
    "op",
    [
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "atan2",
        "copysign",
        "xlogy",
        "heaviside",
        "hypot",
        "remainder",
        "fmod",
        "floor_divide",
    ],
)
def test_binary_of_special_values(op: str) -> None:
    name = f"aten.{op}.{overload(op) if op in elementwise._BINARY else 'Tensor'}"
    check(name, torch.tensor(SPECIAL)[:, None], torch.tensor(SPECIAL))


@pytest.mark.parametrize("op", INTEGER_BINARY)
def test_integer_binary(op: str) -> None:
    check(
        f"aten.{op}.{overload(op)}",
        values(torch.int64, -50, 50),
        values(torch.int64, -50, 50, (5,), 1),
    )
    check(
        f"aten.{op}.{overload(op)}",
        values(torch.int32, -50, 50),
        values(torch.int64, -50, 50, (), 1),
    )
    if op.startswith("bitwise"):
        check(f"aten.{op}.Tensor", values(torch.bool), values(torch.bool, seed=1))
        check(f"aten.{op}.Scalar", values(torch.int64, 0, 50), 6)
        check(f"aten.{op}.Scalar_Tensor", 6, values(torch.int64, 0, 50))


@pytest.mark.parametrize("op", SHIFTS)
def test_shifts(op: str) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        check(
            f"aten.{op}.Tensor",
            torch.tensor([1, 5, 100, 77], dtype=dtype),
            torch.tensor([0, 3, 5, 1], dtype=dtype),
        )
    check(f"aten.{op}.Tensor", torch.tensor([-1, -5, 9]), torch.tensor([63, 64, 100]))
    check(
        f"aten.{op}.{'Tensor_Scalar' if op.startswith('b') else 'Scalar'}", torch.tensor([-1, 5]), 2
    )
    if op.startswith("b"):
        check(f"aten.{op}.Scalar_Tensor", 5, torch.tensor([1, 2]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("number", [3, 0.7])
@pytest.mark.parametrize(
    "op", ["add", "sub", "rsub", "mul", "div", "remainder", "fmod", "floor_divide"]
)
def test_a_number_as_the_second_operand(op: str, number: float, dtype: torch.dtype) -> None:
    x = values(dtype, -9, 9)
    check(f"aten.{op}.Scalar", x, number)
    if op == "floor_divide":
        check("aten.floor_divide.default", x, number)
    elif op in ("add", "sub", "mul", "div"):  # torch has no such call of the others
        check(f"aten.{op}.Tensor", x, number)


@pytest.mark.parametrize("op", ["copysign", "xlogy", "special_xlog1py", "remainder"])
def test_other_overloads_with_numbers(op: str) -> None:
    x = values(torch.float32, 1.5, 4)
    for name in elementwise._BINARY[op][1]:
        if name in ("Scalar", "Scalar_Other", "other_scalar"):
            check(f"aten.{op}.{name}", x, 2.5, rtol=1e-4)
        elif name in ("Scalar_Tensor", "Scalar_Self", "self_scalar"):
            check(f"aten.{op}.{name}", 2.5, x, rtol=1e-4)


@pytest.mark.parametrize("op", ["add", "sub", "rsub"])
@pytest.mark.parametrize("overload", ["Tensor", "Scalar"])
def test_alpha(op: str, overload: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, other = (
            values(dtype, -9, 9),
            values(dtype, -9, 9, (5,), 1) if overload == "Tensor" else 3,
        )
        alpha = 2 if dtype is torch.int64 else 0.3
        if overload == "Tensor":
            check(f"aten.{op}.Tensor", x, other, alpha=alpha)
        else:
            check(f"aten.{op}.Scalar", x, other, alpha)


def test_add_and_mul_of_booleans() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check("aten.add.Tensor", a, b)
    check("aten.add.Tensor", a, b, alpha=False)
    check("aten.mul.Tensor", a, b)
    check("aten.add.Tensor", a, 1)
    check("aten.mul.Tensor", a, True)
    check("aten.div.Tensor", a, torch.tensor([True]))


@pytest.mark.parametrize(
    "a", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("b", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_promotion(a: torch.dtype, b: torch.dtype) -> None:
    for shape in ((5,), ()):
        check("aten.mul.Tensor", values(a, 0, 9), values(b, 0, 9, shape, 1))
    check("aten.ge.Tensor", values(a, 0, 9), values(b, 0, 9, (), 1))


def test_promotion_to_complex() -> None:
    check("aten.mul.Tensor", values(torch.float32), 2j)


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")
def test_sixteen_bits_and_a_complex_number() -> None:
    x = values(torch.bfloat16)
    if torch.result_type(x, 2j) == torch.complex64:
        check("aten.mul.Tensor", x, 2j)
    else:
        # torch 2.15 has a dtype for it, in which it cannot multiply on the CPU either.
        message = r"must have one of the dtypes .*; got torch\.bcomplex"
        with pytest.raises(NotImplementedError, match=message):
            x.to("xla") * 2j


def test_sixteen_bits_round_once() -> None:
    x = values(torch.bfloat16, -100, 100, (64,))
    check("aten.mul.Tensor", x, 0.1, rtol=0, atol=0, optimized=True)
    check("aten.addcmul.default", x, x.flip(0), x, value=0.1, rtol=0, atol=0, optimized=True)
    # Without alpha, which torch rounds to 16 bits on the CPU but, like this lowering, not on GPUs.
    check("aten.add.Tensor", x, x.flip(0), rtol=0, atol=0, optimized=True)
    check("aten.div.Tensor", x, x.flip(0), rtol=0, atol=0, optimized=True)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_div_mode(mode: str | None) -> None:
    a, b = (
        torch.tensor([-7.0, 7.0, -7.5, 1.0, 0.0, INF, NAN]),
        torch.tensor([2.0, -2.0, 0.5, 0.1, -3.0, 0.0]),
    )
    check("aten.div.Tensor_mode", a[:, None], b, rounding_mode=mode)
    check("aten.div.Tensor_mode", a[:, None].bfloat16(), b.bfloat16(), rounding_mode=mode)
    check(
        "aten.div.Tensor_mode",
        torch.tensor([-7, 7, -8, 0]),
        torch.tensor([2, -2, 3, 5]),
        rounding_mode=mode,
    )
    check("aten.div.Tensor_mode", torch.tensor([-7, 7, -8, 0]), 3, rounding_mode=mode)
    check("aten.div.Scalar_mode", a, 0.3, rounding_mode=mode)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, -1, -2, 0.5, -0.5, 2.5, INF])
def test_pow_of_a_number(exponent: float) -> None:
    for dtype in FLOATS:
        check("aten.pow.Tensor_Scalar", values(dtype, 0.1, 3), exponent)
        check("aten.pow.Tensor_Scalar", torch.tensor(SPECIAL), exponent)
    if isinstance(exponent, int) and exponent >= 0:
        check("aten.pow.Tensor_Scalar", torch.tensor([-3, 0, 1, 7]), exponent)
        check("aten.pow.Tensor_Scalar", torch.tensor([True, False]), exponent)
    else:
        check("aten.pow.Tensor_Scalar", torch.tensor([3, 1, 7]), float(exponent))


def test_pow_with_a_tensor_exponent() -> None:
    check("aten.pow.Scalar", 2, values(torch.float32))
    check("aten.pow.Scalar", 2.5, torch.tensor([0, 1, 2, 3]))
    check("aten.pow.Scalar", 3, torch.tensor([0, 1, 2, 3, 45]))
    check(
        "aten.pow.Tensor_Tensor",
        torch.tensor([-3, 2, 1, -1, -1, 0, 3]),
        torch.tensor([3, -2, -5, -3, -4, 0, 70]),
    )
    check(
        "aten.pow.Tensor_Tensor",
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        torch.tensor([1, 2, 200], dtype=torch.uint8),
    )


def test_nextafter() -> None:
    for dtype in FLOATS:
        check(
            "aten.nextafter.default",
            torch.tensor([0.0, 1.0, -1.0, INF], dtype=dtype),
            torch.tensor([1.0, 2.0, 1.0, 0.0], dtype=dtype),
            rtol=0,
            atol=0,
        )


# ---- three operands ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp(dtype: torch.dtype) -> None:
    a, b = values(dtype), values(dtype, shape=(5,), seed=1)
    check("aten.lerp.Scalar", a, b, 0.3)
    check("aten.lerp.Scalar", a, b, 1.0, rtol=0, atol=0)
    check("aten.lerp.Tensor", a, b, values(dtype, 0, 1, seed=2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_addcmul_and_addcdiv(dtype: torch.dtype) -> None:
    x, a, b = values(dtype), values(dtype, shape=(5,), seed=1), values(dtype, 1, 3, (3, 1), 2)
    for op in ("addcmul", "addcdiv"):
        check(f"aten.{op}.default", x, a, b)
        check(f"aten.{op}.default", x, a, b, value=-0.1)
    check(
        "aten.addcmul.default",
        torch.tensor([1, 2]),
        torch.tensor([3, 4]),
        torch.tensor([5, 6]),
        value=2,
    )


# ---- complex numbers -----------------------------------------------------------------------------


def test_complex() -> None:
    real, imag = values(torch.float32), values(torch.float32, shape=(5,), seed=1)
    check("aten.complex.default", real, imag)
    check("aten.polar.default", real, imag)
    z = torch.complex(real, imag.expand(3, 5))
    for op in ("_conj", "_conj_physical", "conj_physical"):
        check(f"aten.{op}.default", z)
    check("aten.mul.Tensor", z, real)
    check("aten.add.Tensor", z, 1j)
    check("aten.pow.Tensor_Scalar", z, 2)
    check("aten.pow.Tensor_Tensor", z, z)
    check("aten.nan_to_num.default", z)


@pytest.mark.parametrize("exponent", [True, False])
def test_a_power_of_truth_values(exponent):
    x = torch.tensor([True, False])
    assert (x.to("xla") ** exponent).tolist() == (x**exponent).tolist()


def test_empty_operands_broadcast():
    pairs = [((6, 0), (6, 1)), ((1, 0), (6, 1)), ((0,), (1,)), ((0, 6), (6,))]
    functions = {
        name: getattr(torch, name)
        for name in ("eq", "sub", "mul", "maximum", "pow", "atan2", "fmod", "isclose", "allclose",
                     "logical_and", "nextafter", "xlogy", "copysign")
    }  # fmt: skip
    functions["where"] = lambda x, y: torch.where(x > 0, x, y)
    functions["lerp"] = lambda x, y: torch.lerp(x, y, 0.5)
    found = []
    for shapes in pairs:
        operands = [torch.zeros(shape) for shape in shapes]
        for function in functions.values():
            for swap in (1, -1):
                x, y = operands[::swap]
                found.append((function(x, y), function(x.to("xla"), y.to("xla"))))
    for expected, got in found:
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(got).cpu())
