"""A product with a mask keeps what False does not hide in torch: NaN, infinities, signs of zero."""

import math

import pytest
import torch
from tiers import exhaustive
from torch.nn import functional as F

import spmd_core as spmd

X = torch.tensor([math.nan, math.inf, -math.inf, -1.0, 2.0, -0.0, 3.0, 0.0])

PROGRAMS = {
    "bool": lambda x: x * (x > 1),
    "float": lambda x: x * (x > 1).float() * 2,
    "type_as": lambda x: x * (~(x > 1)).type_as(x),
    "sixteen bits": lambda x: x.bfloat16() * (x > 1),
    "complex": lambda x: torch.view_as_real(x.to(torch.complex64) * (x > 1)),
    "one": lambda x: x * (x > 100).any().float(),
    "addcmul": lambda x: torch.addcmul(x, x, (x > 1).float()),
    "in place": lambda x: x.clone().mul_(x > 1),
    "foreach": lambda x: torch._foreach_mul([x], [x > 1])[0],
    "sum": lambda x: (x * (x > 1)).sum(),
    "dot": lambda x: x @ (x > 1).float(),
    "one hot": lambda x: x @ F.one_hot(torch.arange(8, device=x.device) % 3, 3).float(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.zeros_like(x)),
    "dropout": lambda x: F.dropout(x, 1.0),
    "finite": lambda x: x * x.isfinite(),
}


def same(got, right):
    bits = torch.int16 if right.dtype == torch.bfloat16 else torch.int32
    nan = got.isnan() & right.isnan()
    return bool(((got.view(bits) == right.view(bits)) | nan).all())


@pytest.mark.parametrize("split", [exhaustive(False), True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_with_masks(name, split, num_devices):
    x = X.to("xla")
    if split:
        spmd.mark_sharding(x, spmd.Mesh(range(num_devices), (num_devices,), ("x",)), ("x",))
    assert same(PROGRAMS[name](x).cpu(), PROGRAMS[name](X.clone()))


def test_the_gradient_of_a_maximum_that_is_nan():
    rows = X.view(2, 4)
    ours, theirs = rows.to("xla").requires_grad_(), rows.clone().requires_grad_()
    for x in (ours, theirs):
        x.amax(1).sum().backward()
    assert same(ours.grad.cpu(), theirs.grad)
    assert theirs.grad[0].isnan().all()
