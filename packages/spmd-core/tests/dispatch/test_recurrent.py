"""Recurrent layers, recorded as scans, against eager torch on the CPU."""

import copy

import pytest
import torch
from tiers import exhaustive
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import spmd_core as spmd
from spmd_core import metrics

T, B, INPUT, HIDDEN = 5, 4, 3, 6
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
OPTIONS = {
    "one layer": {},
    "deep": {"num_layers": 3},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "no biases": {"bias": False, "num_layers": 2},
    "projection": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
    "projection, no biases": {"proj_size": 2, "bias": False},
}


def made(kind, **options):
    torch.manual_seed(0)
    return KINDS[kind](INPUT, HIDDEN, **options)


def flat(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = [tree.data] if hasattr(tree, "batch_sizes") else tree
    return [t for part in parts for t in flat(part)]


def compare(model, run, *inputs):
    """Values and gradients, of the parameters too, of `run(model, *inputs)` on both devices."""
    gradients = []
    results = []
    for device in ("cpu", "xla"):
        there = copy.deepcopy(model).to(device)
        leaves = [x.detach().to(device).requires_grad_() for x in inputs]
        outs = flat(run(there, *leaves))
        sum((out * torch.arange(1, 1 + out.numel(), device=device).view(out.shape)).sum()
            for out in outs).backward()  # fmt: skip
        results.append([out.detach().cpu() for out in outs])
        gradients.append([t.grad.cpu() for t in (*there.parameters(), *leaves)])
    for got, right in zip(results[1], results[0], strict=True):
        assert got.stride() == right.stride()
        torch.testing.assert_close(got, right)
    for got, right in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-3)


pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN"  # eager torch's, on the CPU
)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["lstm", "gru", exhaustive("rnn_tanh"), exhaustive("rnn_relu")])
def test_values_and_gradients(kind, option):
    if "projection" in option and kind != "lstm":
        pytest.skip("only an LSTM has one")
    compare(made(kind, **OPTIONS[option]), lambda m, x: m(x), torch.randn(T, B, INPUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_first_state(kind):
    def run(model, x, *state):
        return model(x, state if len(state) == 2 else state[0])

    state = [torch.randn(2, B, HIDDEN) for _ in range(1 + (kind == "lstm"))]
    compare(made(kind, num_layers=2), run, torch.randn(T, B, INPUT), *state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_batch(kind):
    compare(made(kind, bidirectional=True), lambda m, x: m(x), torch.randn(T, INPUT))


@pytest.mark.parametrize("options", [exhaustive({}), {"bidirectional": True, "num_layers": 2}])
@pytest.mark.parametrize("kind", ["lstm", "gru", exhaustive("rnn_tanh"), exhaustive("rnn_relu")])
def test_packed_sequences(kind, options):
    def run(model, x):
        out, last = model(pack_padded_sequence(x, [2, 5, 1, 4], enforce_sorted=False))
        return pad_packed_sequence(out, total_length=6)[0], last

    compare(made(kind, **options), run, torch.randn(T, B, INPUT))


def test_a_packed_batch_of_other_lengths_shares_the_program():
    model = made("gru").to("xla")

    def run(*lengths):
        packed = pack_sequence([torch.ones(n, INPUT) for n in lengths], enforce_sorted=False)
        return model(packed.to("xla"))[0].data.sum().item()

    run(5, 3, 2)
    compiled = metrics.counter("compiles")
    run(5, 4, 1)
    assert metrics.counter("compiles") == compiled


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model, x = made("lstm", num_layers=2).to(dtype), torch.randn(T, B, INPUT).to(dtype)
    got = copy.deepcopy(model).to("xla")(x.to("xla"))[0]
    assert got.dtype is dtype
    tolerance = 1e-9 if dtype is torch.float64 else 2e-2
    torch.testing.assert_close(got.cpu(), model(x)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("train", [True, False])
def test_dropout_between_layers(train):
    model = made("lstm", num_layers=2, dropout=0.5).train(train)
    x = torch.randn(T, B, INPUT)
    there = copy.deepcopy(model).to("xla")
    results = [there(x.to("xla"))[0].detach().cpu() for _ in range(2)]
    assert torch.allclose(*results) is not train
    if not train:
        torch.testing.assert_close(results[0], model(x)[0])


def test_no_dropout_behind_the_last_layer():
    model = made("gru", dropout=0.0, num_layers=1)
    model.dropout = 1.0
    x = torch.randn(T, B, INPUT)
    torch.testing.assert_close(copy.deepcopy(model).to("xla")(x.to("xla"))[0].cpu(), model(x)[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model, x = made("lstm", num_layers=2), torch.randn(T, B, INPUT)
    there = copy.deepcopy(model).to("xla")
    with mode():
        out = there(x.to("xla"))[0]
        assert "stablehlo.while" in spmd.debugging.stablehlo(out)
        torch.testing.assert_close(out.cpu(), model(x)[0])


def test_second_derivatives():
    def run(device):
        model = made("gru").double().to(device)
        x = torch.ones(T, B, INPUT, dtype=torch.float64, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return model.weight_hh_l0.grad.cpu()

    torch.testing.assert_close(run("xla"), run("cpu"))


def test_a_program_does_not_grow_with_the_time():
    model = made("lstm").to("xla")
    sizes = []
    for time in (3, 30):
        model(torch.randn(time, B, INPUT).to("xla"))[0].sum().item()
        sizes.append(metrics.programs()[-1].num_ops)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("batch", [8, exhaustive(6)])
@pytest.mark.parametrize("option", ["deep", "both ways", exhaustive("projection")])
@pytest.mark.parametrize("kind", ["lstm", exhaustive("gru")])
def test_sharded(mesh_2d, kind, option, batch):
    if option == "projection" and kind != "lstm":
        pytest.skip("only an LSTM has one")
    model, x = made(kind, **OPTIONS[option]), torch.randn(T, batch, INPUT)

    def run(device):
        there, leaf = copy.deepcopy(model).to(device), x.to(device, copy=True).requires_grad_()
        if device == "xla":
            spmd.mark_sharding(leaf, mesh_2d, (None, "a", None))
            for parameter in there.parameters():
                spmd.mark_sharding(parameter, mesh_2d, ("b", "a")[: parameter.dim()])
        out, _ = there(leaf * 1)
        out.square().sum().backward()
        return [out, leaf.grad, *(p.grad for p in there.parameters())]

    for got, right in zip(run("xla"), run("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0, B, INPUT), "larger than 0|non-empty"),
        ((T, B, INPUT + 1), "must be equal to"),
        ((2,), "2D|3D"),
    ],
)
def test_what_eager_torch_refuses(shape, words):
    model = made("lstm")
    for device in ("cpu", "xla"):
        with pytest.raises((RuntimeError, ValueError), match=words):
            model.to(device)(torch.zeros(shape, device=device))


def test_under_autocast_and_transforms():
    model, x = made("gru"), torch.randn(T, B, INPUT)
    there = copy.deepcopy(model).to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        out = there(x.to("xla"))[0]
        packed = there(pack_sequence([x[:, 0], x[:3, 0]]).to("xla"))[0].data
    assert out.dtype is packed.dtype is torch.bfloat16  # as on a GPU
    torch.testing.assert_close(out.float().cpu(), model(x)[0], rtol=5e-2, atol=5e-2)
    gradients = [
        torch.func.grad(lambda x, m=m: m(x)[0].square().sum())(x.to(device)).cpu()
        for m, device in ((there, "xla"), (model, "cpu"))
    ]
    torch.testing.assert_close(*gradients)
