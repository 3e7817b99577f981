"""Fused optimizers and gradient scaling against eager torch: one program under any schedule."""

import pytest
import torch

import spmd_core as spmd

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, fused=True, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd with dampening": lambda p: torch.optim.SGD(
        p, lr=0.1, fused=True, momentum=0.9, dampening=0.2, maximize=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True, lr_decay=0.1, weight_decay=0.1),
    "not fused": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_fused_step_at_each_count(amsgrad):
    """The bias corrections depend on the count of steps, which is a tensor."""
    for count in (1.0, 2.0, 10.0):
        states = []
        for device in ("cpu", "xla"):
            given = [torch.linspace(low, 2, 6).to(device) for low in (-1, -2, 0.5, 0.25, 0.5)]
            parameter, gradient, *averages = given
            torch._fused_adamw_(
                [parameter],
                [gradient],
                *([average] for average in averages[:2]),
                averages[2:] if amsgrad else [],
                [torch.tensor(count).to(device)],
                lr=0.1,
                beta1=0.9,
                beta2=0.99,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=amsgrad,
                maximize=False,
            )
            states.append([t.cpu() for t in given])
        for expected, got in zip(*states):
            torch.testing.assert_close(got, expected)


def test_bias_corrections_of_a_later_step():
    states = []
    for device in ("cpu", "xla"):
        given = [torch.tensor([x]).to(device) for x in (1.0, 0.5, 0.25, 0.125, 7.0)]
        lists = [*([t] for t in given[:4]), [], [given[4]]]
        torch._fused_adam_(
            *lists, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        states.append([t.cpu() for t in given])
    for expected, got in zip(*states):
        torch.testing.assert_close(got, expected)


def train(make, device, *, scaled=False):
    """Five steps under a schedule.

    With a scaler the third loss is infinite, and the scaler skips that step.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(
        device
    )
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    x = torch.randn(16, 4).to(device)
    scaler = torch.amp.GradScaler(device, init_scale=128.0, growth_interval=2) if scaled else None
    for step in range(5):
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        schedule.step()
    return [
        p.detach().cpu() for p in model.parameters()
    ], None if scaler is None else scaler.get_scale()


@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step", "ignore:.*lr_scheduler.step"
)
@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        *((name, False) for name in OPTIMIZERS),
        ("amsgrad", True),
        ("sgd with momentum", True),
        ("not fused", True),
    ],
)
def test_parameters_are_eager_torchs(name, scaled):
    expected, scale = train(OPTIMIZERS[name], "cpu", scaled=scaled)
    with spmd.strict():
        compiles = spmd.metrics.counter("compiles")
        got, scale_here = train(OPTIMIZERS[name], "xla", scaled=scaled)
    assert scale_here == scale
    if name != "not fused":  # the unfused step reads on the host whether to step
        assert spmd.metrics.counter("compiles") - compiles <= 1
    for mine, right in zip(got, expected):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_parameters_of_16_bits_are_updated_in_32_and_rounded_once():
    start, grad = torch.randn(257).bfloat16(), torch.randn(257).bfloat16()
    steps = []
    for device, dtype in (("xla", torch.bfloat16), ("cpu", torch.float32)):
        p = start.to(device, dtype).requires_grad_()
        p.grad = grad.to(device, dtype)
        OPTIMIZERS["adamw"]([p]).step()
        steps.append(p.detach().cpu())
    mine, exact = steps
    assert mine.dtype is torch.bfloat16
    # The tolerance is half a unit in the last place, for the one rounding at the end.
    torch.testing.assert_close(mine.float(), exact, rtol=2**-8, atol=0)


def test_a_fused_step_keeps_sharding_and_is_one_operation(mesh_1d, num_devices):
    params = [torch.ones(num_devices, 3).to("xla").requires_grad_() for _ in range(3)]
    for p in params:
        spmd.mark_sharding(p, mesh_1d, ("x", None))
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    for _ in range(2):
        sum((p * i).sum() for i, p in enumerate(params)).backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    assert all(
        p.sharding_spec == optimizer.state[p]["exp_avg"].sharding_spec == params[0].sharding_spec
        for p in params
    )


@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_fused_step_writes_gradients_that_it_unscales(scale):
    found = {}
    for device in ("cpu", "xla"):
        p = torch.ones(3).to(device)
        grad = torch.arange(1.0, 4.0).to(device)
        torch._fused_sgd_(
            [p],
            [grad],
            [],
            lr=0.1,
            momentum=0.0,
            weight_decay=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None if scale is None else torch.tensor(scale).to(device),
        )
        found[device] = p.cpu(), grad.cpu()
    for got, expected in zip(found["xla"], found["cpu"]):
        torch.testing.assert_close(got, expected)


def test_lists_of_different_lengths_are_refused():
    p, state = torch.ones(3, device="xla"), [torch.zeros(3, device="xla")] * 2
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    with pytest.raises(
        ValueError, match=r"lists of one length.*'self': 1.*'exp_avgs': 2.*one tensor in each list"
    ):
        torch._fused_adamw_([p], [p], state, state, [], [torch.ones((), device="xla")], **options)
