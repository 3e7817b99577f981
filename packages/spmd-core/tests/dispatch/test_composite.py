"""`linear` recorded whole: eager torch's results and gradients for every rank, no dims merged."""

import pytest
import torch
import torch.nn.functional as F

import spmd_core as spmd
from spmd_core.program import compile_cache

CASES = [
    ((4,), (5, 4), (5,)),
    ((3, 4), (5, 4), None),
    ((2, 3, 4), (5, 4), (5,)),
    ((2, 3, 4), (5, 4), ()),
    ((2, 3, 4), (5, 4), (1,)),
    ((2, 3, 2, 4), (5, 4), (5,)),
    ((2, 0, 4), (5, 4), (5,)),
    ((2, 3, 4), (4,), None),
    ((2, 3, 4), (4,), ()),
    ((4,), (4,), None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_results_and_gradients(dtype):
    if dtype.is_complex and torch.__version__ < "2.12":
        pytest.skip("this release of torch refuses a complex linear on devices other than its own")
    operands = [
        [torch.randn(shape, dtype=dtype) for shape in case if shape is not None] for case in CASES
    ]
    results = {"cpu": [], "xla": []}
    for device, found in results.items():
        for case in operands:
            given = [t.to(device).requires_grad_() for t in case]
            y = F.linear(*given)
            found += [y.detach(), *torch.autograd.grad((y * y.detach()).sum().abs(), given)]
    tolerance = (
        {"rtol": 0.02, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    for right, mine in zip(*results.values(), strict=True):
        torch.testing.assert_close(mine.cpu(), right, **tolerance)


def test_the_gradient_can_be_differentiated():
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        given = [
            torch.randn(shape).to(device).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))
        ]
        first = torch.autograd.grad(F.linear(*given).square().sum(), given, create_graph=True)
        results.append(
            [t.cpu() for t in torch.autograd.grad(sum(g.square().sum() for g in first), given[:2])]
        )
    for right, mine in zip(*results):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-2)


def test_the_bias_of_16_bits_is_added_before_the_rounding():
    x, weight = torch.full((1, 1, 2), 16.0).bfloat16(), torch.tensor([[16.0, 0.0625]]).bfloat16()
    bias = torch.tensor([-256.0]).bfloat16()  # the product is 257, which bfloat16 rounds to 256
    assert F.linear(x.to("xla"), weight.to("xla"), bias.to("xla")).item() == 1


def test_a_mistake_raises_eager_torchs_error_when_it_is_recorded():
    operands = torch.ones(2, 3), torch.ones(4, 5)
    with pytest.raises(RuntimeError) as right:
        F.linear(*operands)
    with pytest.raises(RuntimeError) as mine:
        F.linear(*(t.to("xla") for t in operands))
    assert str(mine.value) == str(right.value)


def test_a_batch_and_a_sequence_that_are_both_split_stay_so(mesh_2d, num_devices):
    if num_devices != 8:
        pytest.skip("needs two axes")
    x = spmd.mark_sharding(torch.randn(8, 4, 16).to("xla"), mesh_2d, ("a", "b", None))
    weight = torch.randn(32, 16).to("xla").requires_grad_()
    x.requires_grad_()
    out = F.linear(x, weight)
    grads = torch.autograd.grad(out, [x, weight], torch.ones_like(out.detach()))
    spmd.sync()
    text = list(compile_cache._programs.values())[-1].compiled.as_text()
    assert (
        " all-gather(" not in text
        and " all-to-all(" not in text
        and " collective-permute(" not in text
    )
    assert text.count(" all-reduce(") in (1, 2)  # the weight's gradient, over both axes
    del grads
