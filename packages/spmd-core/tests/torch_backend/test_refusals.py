"""What torch does on the host alone is refused, and what the messages advise works."""

import copy
import os
import re
from pathlib import Path

import fresh
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import spmd_core as spmd


def test_flex_attention_is_refused():
    q = torch.randn(1, 2, 8, 4).to("xla")
    message = (
        r"got a query of shape \(1, 2, 8, 4\) on xla:0.*scaled_dot_product_attention.*call_jax"
    )
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        flex_attention(q, q, q)
    # On the CPU, the check stays that of torch.
    needs_grad = q.cpu().requires_grad_()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(needs_grad, needs_grad, needs_grad)


def test_scores_as_a_mask_instead_of_flex_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 8, 4) for _ in range(3))
    positions = torch.arange(8)
    scores = (positions[:, None] - positions).abs().mul(-0.5)
    expected = torch.softmax(q @ k.mT / 2 + scores, -1) @ v
    found = F.scaled_dot_product_attention(
        *(x.to("xla") for x in (q, k, v)), attn_mask=scores.to("xla")
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


QUANTIZED = {
    "tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "channel": lambda x: torch.quantize_per_channel(
        x, torch.full((2,), 0.1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), 0,
        torch.qint8,
    ),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tensors_are_not_moved(kind):
    quantized = QUANTIZED[kind](torch.tensor([[0.5, -0.2], [0.1, 0.3]]))
    module = torch.nn.Module()
    module.register_buffer("weight", quantized)
    target = torch.zeros(2, 2, device="xla")
    for move in (
        lambda: quantized.to("xla"),
        lambda: quantized.to(torch.device("xla"), torch.float32),
        lambda: quantized.to(target),
        lambda: module.to("xla"),
        lambda: target.copy_(quantized),
    ):
        message = r"makes a quantized tensor there.*quantized\.dequantize\(\)\.to\('xla'\)"
        with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
            move()
    # What the message advises, and what torch still does on the CPU.
    assert torch.equal(quantized.dequantize().to("xla").cpu(), quantized.dequantize())
    assert torch.equal(quantized.to("cpu", copy=True).int_repr(), quantized.int_repr())
    # Conversions of numbers stay torch's, too.
    for number, dtype in ((2.5, torch.float64), (3, torch.int64), (True, torch.bool), (1j, None)):
        assert torch.tensor(4.0).mul(number).to(torch.complex64).item() == 4 * number
        assert (
            torch.where(torch.tensor(True), number, number).to(dtype or torch.complex128) == number
        )


COMPILED = """
import sys, traceback
import torch, spmd_core as spmd
from functorch.compile import aot_function, nop
from torch.fx.experimental.proxy_tensor import make_fx
spmd.simulate(2)
%s
x, layer = torch.ones(3, device="xla"), torch.nn.Linear(3, 2, device="xla")
layer.weight.data.fill_(1.5)
layer.bias.data.fill_(0)

def arguments(x):
    return (x * 2 + 1).sum()

def closure():
    return arguments(x)

def makes():
    return arguments(torch.ones(3, device="xla"))

def moves(y):
    return arguments(y.to("xla"))

def in_place(**options):
    layer.compile(**options)
    result = layer(x).sum()
    layer._compiled_call_impl = None
    return result

lstm = torch.nn.LSTM(3, 3, device="xla")
for p in lstm.parameters():
    p.data.fill_(0)

def untraceable(**options):  # Dynamo compiles no LSTM, on any device
    return 9 + torch.compile(lstm, **options)(torch.ones(2, 3, device="xla"))[0].sum()

OPTIONS = [{}, {"backend": "openxla"}, {"backend": "aot_eager"}, {"fullgraph": True},
           {"fullgraph": True, "dynamic": True}]
cases = [lambda **o: torch.compile(layer, **o)(x).sum(), in_place, untraceable]
for function, given in ((arguments, (x,)), (closure, ()), (makes, ()), (moves, (x.cpu(),))):
    cases.append(lambda function=function, given=given, **o: torch.compile(function, **o)(*given))
for case in cases:
    for options in OPTIONS:
        torch._dynamo.reset()
        try:
            print("value", case(**options).item())
        except Exception as error:
            print("refused", type(error) is not None and type(error).__name__,
                  len(traceback.extract_tb(error.__traceback__)), error.__cause__,
                  error.__suppress_context__, error)
for tracer in (
    lambda: torch.export.export(layer, (x,)),
    lambda: torch.export.export(layer, (x,), strict=True),
    lambda: torch.export.draft_export(layer, (x,)),
    lambda: make_fx(arguments, tracing_mode="symbolic")(x),
    lambda: aot_function(arguments, nop)(x),
):
    try:
        tracer()
    except spmd.errors.UnsupportedOpError as error:
        frames = len(traceback.extract_tb(error.__traceback__))
        print("export", frames, error.__cause__, error.__suppress_context__, error)
slope = torch.func.linearize(torch.sin, torch.zeros(2))[1]  # Dynamo knows make_fx by its identity
print(torch.compile(lambda x: x + slope(x), backend="eager")(torch.ones(2)).tolist())
"""


def run(setting="", **environment):
    env = {**os.environ, "PYTHONPATH": str(Path(spmd.__file__).parents[1]), **environment}
    ignoring = "import warnings; warnings.simplefilter('ignore')\n"
    result = fresh.run(["-c", ignoring + COMPILED % setting], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("[2.0, 2.0]\n"), "torch.compile for the CPU must work"
    assert "Exception ignored" not in result.stderr
    return result.stdout.splitlines()[:-1]


def test_torch_compile_is_refused_in_one_sentence_without_its_own_frames():
    lines = run()
    compiled, exported = lines[:-5], lines[-5:]
    assert len(compiled) == 7 * 5
    for line in compiled:
        kind, name, frames, cause, hidden, text = line.split(" ", 5)
        assert (kind, name, cause, hidden) == ("refused", "UnsupportedOpError", "None", "True"), (
            line
        )
        assert int(frames) <= 7, line
        assert text.startswith("operations on xla tensors are recorded and compiled by XLA as they")
        assert "torch.compile and torch.export have nothing to compile; got a tensor of sha" in text
        assert "TORCHDYNAMO_DISABLE=1" in text and "set_stance('force_eager')" in text
        assert "TORCHDYNAMO_VERBOSE" not in text, "what Dynamo adds"
    for line in exported:
        assert re.match("export [34] None True operations on xla tensors", line), line
        assert "module.cpu()" in line


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_tracers_without_fake_tensors_work():
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    expected, on_device, moved = layer(x), copy.deepcopy(layer).to("xla"), x.to("xla")
    traced = torch.fx.symbolic_trace(on_device)
    functional = torch.func.functional_call(on_device, dict(on_device.named_parameters()), (moved,))
    for found in (traced(moved), functional, torch.func.vmap(on_device)(moved)):
        torch.testing.assert_close(found.cpu(), expected)
    scripted = torch.jit.trace(on_device, (moved,)), torch.jit.script(on_device)
    for module in scripted:
        torch.testing.assert_close(module(moved).cpu(), expected)


@pytest.mark.parametrize(
    ("setting", "environment"),
    [("torch.compiler.set_stance('force_eager')", {}), ("", {"TORCHDYNAMO_DISABLE": "1"})],
)
def test_what_the_refusal_of_torch_compile_advises(setting, environment):
    assert run(setting, **environment)[:35] == ["value 9.0"] * 35
