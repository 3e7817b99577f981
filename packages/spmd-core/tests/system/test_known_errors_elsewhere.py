"""Cases that were measured to be silently wrong in torchax or torch_xla, against eager torch.

One test per known error. Some repeat tests of an operator family; they are kept together so that
this file is a complete list.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd_core as spmd


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)


def agree(function, *inputs, rtol=1e-5, atol=1e-6):
    """Asserts equal results and gradients of floating inputs on the CPU and on the device."""
    found = []
    for device in ("cpu", "xla"):
        moved = [
            x.detach().clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs
        ]
        out = function(*moved)
        if out.requires_grad:
            out.backward(
                torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape).to(device)
            )
        found.append([out.detach(), *(x.grad for x in moved if x.grad is not None)])
    assert len(found[0]) == len(found[1])
    for right, ours in zip(*found):
        assert ours.dtype == right.dtype
        torch.testing.assert_close(ours.cpu(), right, rtol=rtol, atol=atol)


# ---- torchax -------------------------------------------------------------------------------------

WRITES = {
    "view": lambda x: x.view(-1).add_(1),
    "t": lambda x: x.t().mul_(2),
    "select": lambda x: x.select(0, 1).zero_(),
    "index": lambda x: x[2, 1:3].fill_(7),
    "chunk": lambda x: [part.add_(i) for i, part in enumerate(x.chunk(2, 1))],
    "detach": lambda x: x.detach().sub_(3),
    "unsqueeze of a transpose": lambda x: x.t().unsqueeze(0)[0, :2].neg_(),
    "diagonal": lambda x: x.diagonal().copy_(torch.arange(4.0, device=x.device)),
    "data": lambda x: x.data.mul_(5),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_reaches_its_base(write):
    x = torch.arange(16.0).view(4, 4)
    ours = x.to("xla")
    WRITES[write](x)
    WRITES[write](ours)
    assert torch.equal(ours.cpu(), x)


def test_exponential_in_place_draws():
    x = torch.zeros(10000, device="xla").exponential_(2.0).cpu()
    assert x.min() >= 0
    assert abs(x.mean().item() - 0.5) < 0.03


def test_random_in_place_draws_whole_numbers_of_the_dtype():
    x = torch.zeros(1000, device="xla").random_(0, 5).cpu()
    assert set(x.tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    y = torch.zeros(1000, dtype=torch.int64, device="xla").random_(-2, 3)
    assert y.dtype == torch.int64
    assert set(y.cpu().tolist()) == {-2, -1, 0, 1, 2}


def test_dropout_stops_at_eval_in_a_module_that_has_run_before():
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to("xla")
    x = torch.randn(8, 64).to("xla")
    dropped = (module(x) == 0).float().mean().item()
    assert 0.3 < dropped < 0.7
    module.eval()
    assert torch.equal(module(x).cpu(), module[0](x).cpu())
    module.train()
    assert not torch.equal(module(x).cpu(), module(x).cpu())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_statistics_of_batch_norm_move(momentum):
    reference = nn.BatchNorm2d(3, momentum=momentum)
    module = nn.BatchNorm2d(3, momentum=momentum).to("xla")
    for step in range(4):
        x = torch.randn(5, 3, 2, 2) * (step + 1) + step
        reference(x)
        module(x.to("xla"))
    assert module.num_batches_tracked.item() == 4
    torch.testing.assert_close(module.running_mean.cpu(), reference.running_mean)
    torch.testing.assert_close(module.running_var.cpu(), reference.running_var)
    torch.testing.assert_close(module.eval()(x.to("xla")).cpu(), reference.eval()(x))


def test_gradients_through_linear_einsum_pad_and_slices():
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    agree(F.linear, x, w, b)
    agree(lambda x, w: torch.einsum("bi,oi->bo", x, w), x, w)
    agree(lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), x)
    agree(lambda x: F.pad(x, (1, 2), mode="reflect"), x)
    agree(lambda x: x[1:, ::2] * x[:-1, 1::2], x)
    agree(lambda x: x[[0, 2], 1:], x)


def test_a_16_bit_tensor_times_a_zero_dim_float32_stays_16_bits():
    x = torch.randn(4, dtype=torch.bfloat16)
    agree(lambda x: x * torch.tensor(2.0, device=x.device), x)
    agree(lambda x: x + 0.25, x)
    assert (x.to("xla") * torch.tensor(2.0)).dtype == torch.bfloat16
    assert (x.to("xla") * torch.ones(1, device="xla")).dtype == torch.float32


def test_int64_and_float64_stay():
    big = torch.tensor([2**40 + 1, -(2**50)])
    agree(lambda x: x * 3 + 1, big)
    agree(lambda x: x.sum(), big)
    assert torch.arange(3, device="xla").dtype == torch.int64
    assert torch.tensor([1, 2]).to("xla").dtype == torch.int64
    agree(lambda x: x * x, torch.tensor([1 + 2**-40], dtype=torch.float64), rtol=0, atol=0)


def test_type_as_leaves_its_source_alone():
    x = torch.randn(3).to("xla")
    y = x.type_as(torch.zeros(1, dtype=torch.float64, device="xla"))
    assert (x.dtype, y.dtype) == (torch.float32, torch.float64)
    same = x.type_as(x)
    assert same is x


# ---- torch_xla -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "activation",
    [
        F.elu,
        F.selu,
        F.celu,
        lambda x, inplace: F.elu(x, 1.7, inplace),
        lambda x, inplace: F.celu(x, 0.4, inplace),
    ],
)
def test_gradients_of_exponential_units_for_negative_inputs(activation, inplace):
    # Times 1, because an in-place operation must not write to a leaf.
    agree(lambda x: activation(x * 1, inplace=inplace), torch.tensor([-3.0, -1.0, -1e-3, 0.0, 2.0]))


@pytest.mark.parametrize("p", [math.inf, -math.inf, 0, 1, 2, 3, "fro"])
def test_norms(p):
    x = torch.tensor([[1.0, -7.0, 3.0], [0.5, 2.0, -0.25]])
    agree(lambda x: torch.norm(x, p), x)
    agree(lambda x: torch.norm(x, p, dim=1) if p != "fro" else torch.norm(x, dim=1), x)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize("offset", [0, 1, -2])
def test_a_diagonal_of_three_dims(dims, offset):
    agree(lambda x: torch.diagonal(x, offset, *dims) * 1, torch.arange(60.0).view(3, 4, 5))


def test_the_maximum_of_nothing_but_minus_infinity():
    x = torch.full((2, 3), -math.inf)
    for function in (
        lambda x: x.amax(1),
        lambda x: x.max(),
        lambda x: x.max(1).values,
        lambda x: (-x).amin(0),
    ):
        agree(lambda x, function=function: function(x.detach()), x)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_average_pools_with_a_divisor_of_their_own_at_the_border(ceil_mode):
    agree(
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode, True, divisor_override=5),
        torch.randn(1, 2, 6, 7),
    )
    agree(
        lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode, False, divisor_override=4),
        torch.randn(1, 1, 5, 6, 7),
    )


def test_the_running_variance_of_batch_norm_does_not_drift():
    # Few elements, so that n / (n - 1) is far from 1.
    reference, x = nn.BatchNorm1d(2), torch.randn(4, 2) * 3 + 1
    module = nn.BatchNorm1d(2).to("xla")
    for _ in range(30):
        reference(x)
        module(x.to("xla"))
    torch.testing.assert_close(module.running_var.cpu(), reference.running_var)


def test_uniform_bfloat16_numbers_stay_below_1():
    for make in (
        lambda: torch.rand(200_000, dtype=torch.bfloat16, device="xla"),
        lambda: torch.empty(200_000, dtype=torch.bfloat16, device="xla").uniform_(),
        lambda: torch.rand_like(torch.empty(200_000, dtype=torch.bfloat16, device="xla")),
    ):
        assert make().max().item() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exponential_numbers_are_finite(dtype):
    x = torch.empty(200_000, dtype=dtype, device="xla").exponential_()
    assert torch.isfinite(x).all().item()
    assert x.min().item() >= 0


def test_shapes_that_follow_each_other_are_not_confused():
    # One operation on many shapes with permuted sizes. In the second round all shapes are known.
    for _ in range(2):
        for shape in ((2, 3, 4), (3, 2, 4), (4, 3, 2), (24,), (6, 4), (4, 6), (2, 12), (12, 2)):
            x = torch.randn(shape)
            for function in (
                lambda x: x.sum(0),
                lambda x: x.flip(0),
                lambda x: torch.cat([x, x], -1),
            ):
                ours = function(x.to("xla"))
                assert ours.shape == function(x).shape
                torch.testing.assert_close(ours.cpu(), function(x))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_roll_of_an_empty_tensor(shape):
    agree(lambda x: x.roll(1, 0), torch.zeros(shape))
    agree(lambda x: x.roll(2), torch.zeros(shape))


def test_histograms_of_integers():
    experts = torch.tensor([0, 3, 3, 1, 2, 3, 0], dtype=torch.int32)
    ours = torch.histc(experts.to("xla"), bins=4, min=0, max=3)
    assert torch.equal(ours.cpu().float(), torch.histc(experts.float(), bins=4, min=0, max=3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_stay_tied_on_the_device():
    reference, module = Tied(), Tied().to("xla")
    assert module.head.weight is module.embed.weight
    module.load_state_dict(reference.state_dict())
    ids = torch.tensor([1, 3, 5])
    for model, device in ((reference, "cpu"), (module, "xla")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(ids.to(device)).square().sum().backward()
        optimizer.step()
    assert module.head.weight is module.embed.weight
    torch.testing.assert_close(module.embed.weight.detach().cpu(), reference.embed.weight.detach())
    assert module.to("xla").head.weight is module.embed.weight


def test_integer_division_by_zero_ends_no_process():
    x = torch.tensor([4, -3, 0]).to("xla")
    for function in (lambda x: x // 0, lambda x: x % 0):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            function(x)
    # Eager torch on the CPU raises here too; the device computes an unspecified number, as a GPU
    # does: to look at the divisors every call would have to wait.
    quotients = torch.div(x, torch.zeros_like(x), rounding_mode="floor")
    assert quotients.cpu().shape == (3,)


def test_a_loss_whose_decomposition_in_torch_is_wrong():
    # torch 2.13's decomposition of this loss counts the unused ends of the lists as label 0.
    targets = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0], [0, 1, 2, 3]])
    agree(lambda x, y: F.multilabel_margin_loss(x, y), torch.randn(3, 4), targets)


@pytest.mark.one_device
def test_the_same_values_for_a_sharded_tensor(mesh_1d, num_devices):
    x = torch.randn(num_devices * 2, 3)
    ours = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x",))
    ours.view(-1, 2, 3).select(1, 0).mul_(2)
    x.view(-1, 2, 3).select(1, 0).mul_(2)
    torch.testing.assert_close(ours.cpu(), x)
