"""The router: which operations it records, derives, decomposes, runs on the host or refuses."""

import sys
import warnings

import pytest
import torch
from torch.nn import functional as F

import spmd_core as spmd


def both(function, *tensors):
    """Asserts that the function has the same result on the CPU and on the device."""
    expected = function(*(t.clone() for t in tensors))
    got = function(*(t.to("xla") for t in tensors))
    assert got.device.type == "xla"
    torch.testing.assert_close(got.cpu(), expected)


a, b, i, m = (
    torch.randn(3, 4),
    torch.randn(3, 4),
    torch.arange(12).view(3, 4),
    torch.tensor([[True, False, True, False]] * 3),
)

SAMPLES = {
    "out": lambda x, y: torch.add(x, y, alpha=2, out=torch.empty(0, device=x.device)),
    "out of another dtype": lambda x, y: torch.add(
        x, y, out=torch.empty(3, 4, dtype=torch.float64, device=x.device)
    ),
    "two outs": lambda x, y: torch.max(
        x,
        1,
        out=(torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device)),
    )[0],
    "in-place promotion": lambda x, y: x.bfloat16().add_(y),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.abs() + 1, value=0.5),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "foreach": lambda x, y: torch.stack(
        torch._foreach_add(torch._foreach_mul([x, y], [2.0, 3.0]), [y, x], alpha=2)
    ),
    "foreach norm": lambda x, y: torch.stack(torch._foreach_norm([x, y])),
    "bernoulli shape": lambda x, y: torch.bernoulli(torch.ones_like(x)),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "cat": lambda x, y: torch.cat([x, y[:1]], 0),
    "where": lambda x, y: torch.where(x > 0, x, 0.5),
    "masked_select": lambda x, y: x[x > 0],
    "nonzero": lambda x, y: (x > 0).nonzero(),
    "boolean mask set": lambda x, y: x.index_put_((x > 0,), torch.tensor(2.0)),
    "boolean mask values": lambda x, y: x.index_put_((x > -9,), y.reshape(-1)),
    "index": lambda x, y: x[torch.tensor([0, 2, 0])],
    "index mixed": lambda x, y: x[:, torch.tensor([1, 3])],
    "advanced": lambda x, y: x[torch.tensor([[0], [1]]), torch.tensor([1, 2])],
    "sort": lambda x, y: x.sort(1).indices,
    "cumsum": lambda x, y: x.cumsum(1),
    "gather": lambda x, y: x.gather(1, torch.zeros(3, 1, dtype=torch.int64, device=x.device)),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "std": lambda x, y: x.std(1),
    "norm": lambda x, y: x.norm(dim=1),
    "type_as": lambda x, y: x.type_as(y.double()),
    "pad": lambda x, y: F.pad(x, (1, 2, 0, 1), value=3.0),
    "one_hot": lambda x, y: F.one_hot((x > 0).long(), 2),
    "interpolate": lambda x, y: F.interpolate(x[None, None], scale_factor=2.0),
    "cdist": lambda x, y: torch.cdist(x, y),
    "linalg.inv": lambda x, y: torch.linalg.inv(
        x[:, :3] @ x[:, :3].t() + torch.eye(3, device=x.device)
    ),
    "unique": lambda x, y: (x > 0).long().unique(),
    "meshgrid": lambda x, y: torch.stack(torch.meshgrid(x[0], y[0], indexing="ij")),
    "0-dim cpu operand": lambda x, y: x * torch.tensor(2.0),
    "bf16 times 0-dim fp32": lambda x, y: x.bfloat16() * torch.tensor(2.0, device=x.device),
    "int division": lambda x, y: (x * 10).long() // 3,
    "histc": lambda x, y: torch.histc(x, 4, min=-2, max=2),
    "isin": lambda x, y: torch.isin((x * 2).long(), torch.tensor([0, 1], device=x.device)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_eager_torchs(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs on the host|the shape of the result")
        both(SAMPLES[name], a, b)


@pytest.fixture(scope="module")
def host_only():
    """An operation without a lowering or a decomposition."""
    with torch.library._scoped_library("spmd_test", "FRAGMENT") as library:
        library.define("host_only(Tensor x) -> Tensor")
        library.impl("host_only", lambda x: x.flip(0), "CPU")
        yield torch.ops.spmd_test.host_only


def test_a_host_fallback_is_counted_with_its_line_and_warned_about_once(host_only):
    before = spmd.metrics.host_fallbacks()
    x = torch.arange(3, device="xla")
    with pytest.warns(UserWarning, match=r"host_only has neither.*runs on the host") as warned:
        assert host_only(x).tolist() == [2, 1, 0]
    line = sys._getframe().f_lineno - 1
    assert (warned[0].filename, warned[0].lineno) == (__file__, line)
    for _ in range(2):
        host_only(x)  # no second warning: pytest makes warnings errors
    found = set(spmd.metrics.host_fallbacks()) - set(before)
    assert found == {
        spmd.metrics.HostFallback("spmd_test::host_only", f"{__file__}:{line}", 1),
        spmd.metrics.HostFallback("spmd_test::host_only", f"{__file__}:{line + 4}", 2),
    }
    assert f"host fallback spmd_test::host_only at {__file__}:{line}" in spmd.metrics.report()


def test_strict_mode_refuses_the_host(host_only):
    x = torch.arange(3, device="xla")
    with spmd.strict():
        with pytest.raises(
            spmd.errors.HostFallbackError,
            match=r"spmd_test::host_only has neither.*test_router.py:\d+.*leave strict mode",
        ):
            host_only(x)
        with spmd.strict(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert host_only(x).tolist() == [2, 1, 0]
    assert not spmd.config.strict


DECLINED = {
    "linspace of integers": lambda d: torch.linspace(-3, 9, 10, dtype=torch.int64, device=d),
    "logspace of integers": lambda d: torch.logspace(0, 3, 4, dtype=torch.int64, device=d),
    "median of no integers": lambda d: torch.zeros(0, dtype=torch.int64, device=d).median(),
    "smooth upsampling of bytes": lambda d: F.interpolate(
        torch.arange(16, dtype=torch.uint8, device=d).view(1, 1, 4, 4), size=(7, 8), mode="bilinear"
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_calls_that_a_lowering_declines_run_on_the_host(name):
    expected = DECLINED[name]("cpu")
    with pytest.warns(UserWarning, match="has no lowering for these arguments on this platform"):
        got = DECLINED[name]("xla")
    assert got.device.type == "xla" and torch.equal(got.cpu(), expected)


def test_mixing_devices_is_refused():
    with pytest.raises(
        spmd.errors.DeviceMismatchError, match=r"one device.*\(3,\) on cpu.*\.to\('xla'\)"
    ):
        torch.ones(3, device="xla") + torch.ones(3)
    with pytest.raises(spmd.errors.DeviceMismatchError, match=r"one device.*\(2,\) on cpu"):
        torch.cat([torch.ones(3, device="xla"), torch.ones(2)])
    with pytest.raises(RuntimeError, match="Move it"):
        torch.ones(3).add_(torch.ones(3, device="xla"))
    cpu = torch.zeros(3)
    cpu.copy_(torch.ones(3, device="xla"))
    assert cpu.tolist() == [1, 1, 1]


def test_shape_mistakes_raise_at_their_line_with_torchs_words():
    x, y = torch.ones(2, 3, device="xla"), torch.ones(4, 5, device="xla")
    with pytest.raises(RuntimeError, match=r"(?i)size|shape"):
        x + y
    with pytest.raises(RuntimeError, match=r"2.*3.*4.*5|mat1 and mat2"):
        x @ y
    with pytest.raises(RuntimeError, match="view"):
        x.t().view(-1)
    with pytest.raises(IndexError):
        x[5]
    with pytest.raises(
        RuntimeError, match=r"can't be cast|result type|in in-place ops are not possible"
    ):
        torch.ones(2, dtype=torch.int64, device="xla").add_(0.5)
    with pytest.raises(
        RuntimeError, match="result type Float can't be cast to the desired output type Long"
    ):
        torch.add(x, x, out=torch.empty(2, 3, dtype=torch.int64, device="xla"))


def test_an_out_tensor_of_another_shape_is_resized_as_in_eager_torch():
    x, out = torch.ones(2, 3, device="xla"), torch.empty(4, device="xla")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, x, out=out)
    assert out.tolist() == [[2.0] * 3] * 2


MIXED = {
    "add": lambda x, out: torch.add(x, x, out=out(2, 2)),
    "cat": lambda x, out: torch.cat([x, x], out=out(4, 2)),
    "matmul": lambda x, out: torch.matmul(x, x, out=out(2, 2)),
    "kron": lambda x, out: torch.kron(x, x, out=out(4, 4)),
    "sum": lambda x, out: torch.sum(x, 0, out=out(2)),
    "without dims": lambda x, out: torch.amax(x, (0, 1), out=out()),
    "max": lambda x, out: torch.max(x, 0, out=(out(2), out(2).long())),
    "sort": lambda x, out: torch.sort(x, out=(out(2, 2), out(2, 2).long())),
    "inv": lambda x, out: torch.linalg.inv(x, out=out(2, 2)),
    "outer": lambda x, out: torch.outer(x[0], x[0], out=out(2, 2)),
    "nonzero": lambda x, out: torch.nonzero(x, out=out(4, 2).long()),
    "on the host": lambda x, out: torch.linalg.eigvals(x, out=out(2).cfloat()),
    "one of two": lambda x, out: torch.max(x, 0, out=(torch.empty_like(x[0]), out(2).long())),
}


@pytest.mark.parametrize("to", ["cpu", "xla"])
@pytest.mark.parametrize("name", MIXED)
def test_an_out_tensor_on_another_device_is_refused(name, to):
    x = torch.eye(2, device="xla" if to == "cpu" else "cpu")
    made = []

    def out(*shape):
        made.append(torch.full(shape, 7.0, device=to))
        return made[-1]

    message = (
        r"also those that it writes; .* got out= on cpu .* Leave out= out"
        if to == "cpu"
        else r"also those that it writes; .* got an input on cpu .* Move it with \.to\('xla'\)"
    )
    with pytest.raises(spmd.errors.DeviceMismatchError, match=message):
        MIXED[name](x, out)
    assert all((t == 7).all() for t in made) and not spmd.metrics.host_fallbacks()


def test_what_the_refusal_of_an_out_tensor_advises():
    x, out = torch.eye(2), torch.empty(2, 2, device="xla")
    assert torch.add(x.to("xla"), x.to("xla"), out=out).tolist() == [[2.0, 0], [0, 2]]
    assert torch.add(out, out).to("cpu").tolist() == [[4.0, 0], [0, 4]]
    # A number on the host is no mistake, as on other devices.
    assert torch.mul(out, torch.tensor(2.0), out=out).tolist() == [[4.0, 0], [0, 4]]


def test_lists_of_out_tensors_are_resized_and_written():
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(12.0, device=device).view(3, 4)
        outs = [torch.empty(0, device=device) for _ in range(3)]
        torch.unbind_copy(x, out=outs)
        pieces = [torch.empty(0, device=device), torch.empty(0, device=device)]
        torch.split_with_sizes_copy(x, [1, 2], out=pieces)
        results.append([t.tolist() for t in (*outs, *pieces)])
    assert results[1] == results[0]


@pytest.mark.parametrize("name", ["sum", "nansum", "prod", "mean", "cumsum", "cumprod"])
@pytest.mark.parametrize(
    ("given", "out"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float32, torch.int64),
        (torch.int8, torch.int8),
    ],
)
def test_reductions_are_computed_in_the_dtype_of_out(name, given, out):
    """As if it were their `dtype`: a sum of bfloat16 into float32 keeps what bfloat16 rounds."""
    x = (torch.arange(300) % 7 * 0.37 + 0.9).to(given)[: 12 if "prod" in name else 300]
    results = []
    for device in ("cpu", "xla"):
        try:
            function = getattr(torch, name)
            made = function(x.to(device), 0, out=torch.empty(0, dtype=out, device=device))
            results.append(made.cpu())
        except (RuntimeError, NotImplementedError) as error:
            results.append((type(error), str(error)))
    if isinstance(results[0], tuple):
        assert results[1] == results[0]
    else:
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, dtype=torch.float8_e4m3fnuz).to("xla"),
        lambda: torch.empty(2, dtype=torch.float8_e4m3fnuz, device="xla"),
    ],
)
def test_a_dtype_that_the_device_cannot_hold_is_refused(make):
    with pytest.raises(
        TypeError,
        match=r"must have one of the dtypes bool, .*got torch\.float8_e4m3fnuz\. Convert it first",
    ):
        make()


@pytest.mark.parametrize(
    "write",
    [
        lambda d: torch.full((2,), 300, dtype=torch.int8, device=d),
        lambda d: torch.zeros(2, dtype=torch.int8, device=d).fill_(300),
        lambda d: torch.full_like(torch.zeros(2, device=d), 300, dtype=torch.int8),
        lambda d: torch.zeros(2, dtype=torch.int8, device=d).masked_fill(
            torch.ones(2, dtype=torch.bool, device=d), 300
        ),
        lambda d: torch.full((2,), 2**40, dtype=torch.int32, device=d),
        lambda d: torch.zeros(2, device=d).new_full((2,), 300, dtype=torch.int8),
        lambda d: torch.zeros(2, dtype=torch.uint8, device=d).index_fill_(
            0, torch.tensor([1], device=d), 300
        ),
        lambda d: F.threshold(torch.zeros(2, dtype=torch.uint8, device=d), 1, 300),
    ],
)
def test_a_number_that_does_not_fit_its_integers_is_refused_as_on_the_cpu(write):
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match="overflow"):
            write(device)
    both(
        lambda x, y: (
            torch.full_like(x.to(torch.uint8), 200) + torch.full((3, 4), True, device=x.device)
        ),
        a,
        b,
    )


def test_batch_norm_moves_its_statistics():
    layers = [torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to("xla")]
    for step in range(3):
        x = torch.randn(4, 3, 5, 5) + step
        outs = [layer(x.to(device)) for layer, device in zip(layers, ("cpu", "xla"))]
        [out.square().sum().backward() for out in outs]
        torch.testing.assert_close(outs[1].detach().cpu(), outs[0].detach(), rtol=1e-4, atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            getattr(layers[1], name).cpu(), getattr(layers[0], name), rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(
        layers[1].weight.grad.cpu(), layers[0].weight.grad, rtol=1e-4, atol=1e-4
    )
    [layer.eval() for layer in layers]
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(
        layers[1](x.to("xla")).detach().cpu(), layers[0](x).detach(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(causal, masked):
    if causal and masked:
        pytest.skip("torch refuses both")
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.randn(2, 1, 8, 8) > 0 if masked else None
    grads = []
    for device in ("cpu", "xla"):
        args = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *args, attn_mask=None if mask is None else mask.to(device), is_causal=causal
        )
        out.square().sum().backward()
        grads.append([out.detach().cpu(), *(t.grad.cpu() for t in args)])
    for mine, right in zip(grads[1], grads[0]):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


MODULES = {
    "conv": (lambda: torch.nn.Conv2d(3, 8, 3, padding=1, stride=2), (2, 3, 9, 9)),
    "conv transpose": (
        lambda: torch.nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        (2, 3, 5, 5),
    ),
    "max pool": (lambda: torch.nn.MaxPool2d(3, 2, 1), (2, 3, 9, 9)),
    "adaptive pool": (lambda: torch.nn.AdaptiveAvgPool2d(1), (2, 3, 9, 9)),
    "group norm": (lambda: torch.nn.GroupNorm(2, 4), (2, 4, 5)),
    "rms norm": (lambda: torch.nn.RMSNorm(8), (2, 8)),
    "lstm": (lambda: torch.nn.LSTM(4, 6, batch_first=True), (2, 5, 4)),
    "gru": (lambda: torch.nn.GRU(4, 6), (5, 2, 4)),
    "transformer layer": (
        lambda: torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
        (2, 5, 16),
    ),
    "mha": (
        lambda: torch.nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
        (2, 5, 16),
    ),
    "prelu": (lambda: torch.nn.PReLU(), (3, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_train_as_on_the_cpu(name):
    make, shape = MODULES[name]
    reference = make()
    model = make()
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    x = torch.randn(shape)
    results = []
    for module, device in ((reference, "cpu"), (model, "xla")):
        data = x.detach().to(device).requires_grad_()
        out = module(data, data) if name == "mha" else module(data)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append(
            [out.detach().cpu(), data.grad.cpu(), *(p.grad.cpu() for p in module.parameters())]
        )
    for mine, right in zip(results[1], results[0]):
        torch.testing.assert_close(mine, right, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_with_and_without_gradients(grad, affine):
    x = torch.randn(4, 6)
    layers = [
        torch.nn.LayerNorm(6, elementwise_affine=affine),
        torch.nn.LayerNorm(6, elementwise_affine=affine).to("xla"),
    ]
    with torch.set_grad_enabled(grad):
        outs = [layer(x.to(device)) for layer, device in zip(layers, ("cpu", "xla"))]
    torch.testing.assert_close(outs[1].detach().cpu(), outs[0].detach(), rtol=1e-5, atol=1e-5)
    assert outs[1].requires_grad == (grad and affine)
    with pytest.raises(RuntimeError, match=r"(?i)normalized_shape"):
        torch.nn.functional.layer_norm(torch.ones(4, 6, device="xla"), (5,))


def test_dropout_stops_in_eval():
    layer = torch.nn.Dropout(0.5).to("xla")
    x = torch.ones(100, device="xla")
    assert set(layer(x).tolist()) == {0.0, 2.0}
    assert layer.eval()(x).tolist() == [1.0] * 100


def test_a_users_kernel_for_the_device():
    library = torch.library.Library("spmd_router_test", "DEF")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "XLA")
    x = torch.ones(2, device="xla")
    before = spmd.metrics.host_fallbacks()
    assert torch.ops.spmd_router_test.triple(x).tolist() == [3, 3]

    @torch.library.custom_op("spmd_router_test::double", mutates_args=(), device_types="cpu")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * -2

    double.register_kernel("xla")(lambda x: x * 2)
    double.register_autograd(lambda ctx, gradient: gradient * 2)
    leaf = x.clone().requires_grad_()
    out = double(leaf)
    out.sum().backward()
    assert out.tolist() == [2, 2] and leaf.grad.tolist() == [2, 2]
    assert double(torch.ones(1)).tolist() == [-2]
    assert spmd.metrics.host_fallbacks() == before
    library._destroy()
