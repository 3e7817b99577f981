"""What torch does on the host alone is refused, and what the messages advise works."""

import copy

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
