"""Every module of torch.nn against eager torch on the CPU, with no operation on the host.

Results, gradients of inputs and parameters, and buffers are compared. A family is one program: all
of its modules run before the first result is read.
"""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiers import by_tier, exhaustive
from torch import nn
from torch.utils import _pytree as pytree
from training import check_training

import spmd_core as spmd

BATCH = 8  # divides over the devices: inputs whose first dim has this size are split
FAMILIES: dict[str, list["Case"]] = {}
torch.manual_seed(0)  # the import makes the modules and inputs below


class Case(NamedTuple):
    name: str
    make: object  # () -> module, or a module
    inputs: tuple
    call: object  # (module, *inputs) -> results
    atol: float


def case(family, make, *inputs, call=None, name=None, atol=2e-5):
    """Registers a module and its inputs, each a tensor or the shape of a random tensor."""
    FAMILIES.setdefault(family, []).append(
        Case(
            name or repr(make)[:60],
            make,
            inputs,
            call or (lambda module, *given: module(*given)),
            atol,
        )
    )


def value_of(given):
    return given.detach().clone() if isinstance(given, torch.Tensor) else torch.randn(given)


def tensors_of(results):
    return [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def run(case, module, inputs, device):
    """Results, gradients, buffers and parameters, by name."""
    inputs = [
        x.detach().to(device).requires_grad_(x.is_floating_point() and not torch.equal(x, x.sign()))
        for x in inputs
    ]
    if device == "xla":
        for x in inputs:
            if x.dim() and x.shape[0] == BATCH:
                spmd.mark_sharding(x, spmd.get_global_mesh(), ("x",))
    results = tensors_of(case.call(module, *inputs))
    floats = [x for x in results if x.is_floating_point()]
    # Each element has its own weight, so that a permutation of the gradients shows.
    sum(
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape).to(x.device)).sum()
        for x in floats
    ).backward()
    found = {f"result {i}": x.detach() for i, x in enumerate(results)}
    found |= {
        f"gradient of input {i}": x.grad
        for i, x in enumerate(inputs)
        if x.requires_grad and x.grad is not None
    }
    found |= {
        f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    return found | {
        name: x.detach() for name, x in [*module.named_buffers(), *module.named_parameters()]
    }


# ---- recurrent -----------------------------------------------------------------------------------


def packed(module, x, lengths=(5, 5, 4, 3, 3, 2, 1, 1), **options):
    return module(nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), **options))


def packed_and_padded(module, x):
    out, state = packed(module, x, (3, 5, 1, 5, 2, 4, 3, 1), enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(out, total_length=6)[0], state


for kind in (nn.RNN, nn.LSTM, nn.GRU):
    case("recurrent", kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), (BATCH, 5, 3))
    case(
        "recurrent packed",
        kind(3, 4, bidirectional=True),
        (5, BATCH, 3),
        call=lambda m, x: packed(m, x)[0].data,
    )
    case("recurrent packed", kind(3, 4, bias=False), (5, BATCH, 3), call=packed_and_padded)
for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
    case("recurrent", kind(3, 4), (BATCH, 3))
case("recurrent", nn.RNN(3, 4, nonlinearity="relu"), (5, BATCH, 3))
case("recurrent", nn.LSTM(3, 4, num_layers=2, proj_size=2), (5, BATCH, 3))
case("recurrent", nn.GRU(3, 4), (5, BATCH, 3), (1, BATCH, 4))

# ---- attention -----------------------------------------------------------------------------------

PADDING = torch.arange(4) >= torch.tensor([4, 2, 3, 4, 1, 4, 2, 2])[:, None]


def padded(module, x):
    return module(x, src_key_padding_mask=PADDING.to(x.device))


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


def causal(module, x):
    return module(x, nn.Transformer.generate_square_subsequent_mask(5).to(x.device), is_causal=True)


case(
    "attention",
    nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
    (BATCH, 5, 8),
    (BATCH, 4, 8),
)
case("attention", encoder_layer(activation="gelu", norm_first=True), (BATCH, 5, 8), call=causal)
case("attention", nn.TransformerEncoder(encoder_layer(), 2).eval(), (BATCH, 4, 8), call=padded)
case(
    "attention",
    nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), 1),
    (5, BATCH, 8),
    (4, BATCH, 8),
)
case("attention", nn.MultiheadAttention(8, 2), (5, BATCH, 8), (4, BATCH, 8), (4, BATCH, 8))
case(
    "attention",
    nn.MultiheadAttention(
        8, 2, kdim=4, vdim=6, add_bias_kv=True, add_zero_attn=True, batch_first=True
    ),
    (BATCH, 5, 8),
    (BATCH, 3, 4),
    (BATCH, 3, 6),
)
case(
    "attention",
    nn.MultiheadAttention(8, 2, batch_first=True),
    (BATCH, 4, 8),
    call=lambda m, x: m(x, x, x, key_padding_mask=PADDING.to(x.device)),
)

# ---- convolutions, normalisations, pools, padding: one to three dims -----------------------------


def by_dims(name, num_dims):
    return getattr(nn, f"{name}{num_dims}d")


def unpooled(module, x):
    return module[1](*module[0](x))


def fractional(module, x):
    module._random_samples = module._random_samples.to(x.device)
    return module(x)


for n in (1, 2, 3):
    image, even = (BATCH, 2, *(7, 6, 5)[:n]), (BATCH, 2, *(6, 4, 8)[:n])
    for conv in ("Conv", "ConvTranspose"):
        case(
            "convolution",
            by_dims(conv, n)(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
            (BATCH, 4, *(9, 8, 7)[:n]),
            atol=1e-4,
        )
    case(
        "convolution",
        by_dims("ConvTranspose", n)(2, 3, 3, stride=2, output_padding=1, bias=False),
        image,
        atol=1e-4,
    )
    case("convolution", by_dims("Conv", n)(2, 3, 4, padding="same"), image, atol=1e-4)
    case("convolution", by_dims("Conv", n)(2, 3, 3), image[1:], atol=1e-4)
    for mode in ("reflect", "replicate", "circular"):
        case(
            "convolution with padding",
            by_dims("Conv", n)(2, 3, 3, padding=1, padding_mode=mode),
            image,
            atol=1e-4,
        )
    case("normalisation", by_dims("BatchNorm", n)(2), image, atol=1e-4)
    case("normalisation", by_dims("BatchNorm", n)(2, momentum=None, affine=False), image, atol=1e-4)
    case(
        "normalisation",
        by_dims("BatchNorm", n)(2).eval(),
        image,
        name=f"BatchNorm{n}d in evaluation",
    )
    case(
        "normalisation",
        by_dims("InstanceNorm", n)(2, affine=True, track_running_stats=True),
        image,
        atol=1e-4,
    )
    case("pooling", by_dims("MaxPool", n)(3, stride=2, padding=1, ceil_mode=True), image)
    case("pooling", by_dims("MaxPool", n)(2, dilation=2, return_indices=True), image)
    case(
        "pooling",
        nn.Sequential(by_dims("MaxPool", n)(2, return_indices=True), by_dims("MaxUnpool", n)(2)),
        even,
        call=unpooled,
    )
    case(
        "pooling",
        by_dims("AvgPool", n)(3, stride=2, padding=1, ceil_mode=True, count_include_pad=n == 1),
        image,
    )
    case("pooling", by_dims("LPPool", n)(2, 2), torch.rand(image) + 0.1)
    case("pooling", by_dims("AdaptiveAvgPool", n)(3), image)
    case("pooling", by_dims("AdaptiveMaxPool", n)(3, return_indices=True), image)
    if n > 1:
        samples = torch.rand(BATCH, 2, n)
        case(
            "pooling",
            by_dims("FractionalMaxPool", n)(2, output_size=(3, 2, 2)[:n], _random_samples=samples),
            image,
            call=fractional,
        )
    for pad in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
        case("padding", by_dims(pad, n)(tuple(range(2 * n)) if n < 3 else 1), image)
    case("padding", by_dims("ConstantPad", n)(1, 1.5), image)
case("normalisation", nn.GroupNorm(2, 4), (BATCH, 4, 5), atol=1e-4)
case("normalisation", nn.LayerNorm((4, 5)), (BATCH, 4, 5), atol=1e-4)
case("normalisation", nn.RMSNorm(5), (BATCH, 4, 5))
case("normalisation", nn.LocalResponseNorm(2), (BATCH, 4, 5, 3))

# ---- embeddings, layout, resampling --------------------------------------------------------------

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
for mode in ("sum", "mean", "max"):
    case("embedding", nn.EmbeddingBag(10, 3, mode=mode), INDICES, torch.tensor([0, 4, 4, 6]))
    case("embedding", nn.EmbeddingBag(10, 3, mode=mode, padding_idx=4), INDICES.view(2, 4))
    case(
        "embedding",
        nn.EmbeddingBag(10, 3, mode=mode, include_last_offset=True),
        INDICES,
        torch.tensor([0, 4, 4, 8]),
    )
case(
    "embedding",
    nn.EmbeddingBag(10, 3, mode="sum"),
    INDICES.view(2, 4),
    (2, 4),
    call=lambda m, i, w: m(i, per_sample_weights=w),
)
case("embedding", nn.EmbeddingBag(10, 3, max_norm=1.0), INDICES.view(2, 4))
case("embedding", nn.Embedding(10, 3, padding_idx=2, scale_grad_by_freq=True), INDICES)
case("embedding", nn.Embedding(10, 3, max_norm=1.0), INDICES)
case("layout", nn.Bilinear(4, 5, 3), (BATCH, 4), (BATCH, 5))
case("layout", nn.PixelShuffle(2), (BATCH, 8, 3, 4))
case("layout", nn.PixelUnshuffle(2), (BATCH, 2, 4, 6))
case("layout", nn.ChannelShuffle(2), (BATCH, 4, 3, 3))
case("layout", nn.Fold((4, 5), (2, 2)), (BATCH, 12, 12))
case("layout", nn.Unfold((2, 2), padding=1, stride=2), (BATCH, 3, 4, 5))
case("layout", nn.Unflatten(1, (2, 2)), (BATCH, 4))
case("layout", nn.Flatten(), (BATCH, 3, 4))
case("layout", nn.CosineSimilarity(), (BATCH, 5), (BATCH, 5))
case("layout", nn.PairwiseDistance(), (BATCH, 5), (BATCH, 5))
case("layout", nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), (BATCH, 4))
case("layout", nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), (BATCH, 4))
for mode, size in (
    ("nearest", (4,)),
    ("nearest", (4, 5)),
    ("nearest", (3, 4, 5)),
    ("nearest-exact", (4, 5)),
):
    case("resampling", nn.Upsample(scale_factor=1.7, mode=mode), (BATCH, 2, *size))
for mode, size in (
    ("linear", (4,)),
    ("bilinear", (4, 5)),
    ("bicubic", (4, 5)),
    ("trilinear", (3, 4, 5)),
):
    for align in (False, True):
        case(
            "resampling",
            nn.Upsample(scale_factor=1.7, mode=mode, align_corners=align),
            (BATCH, 2, *size),
        )
for mode in ("bilinear", "bicubic"):
    case(
        "resampling",
        nn.Identity(),
        (BATCH, 2, 7, 8),
        call=lambda m, x, mode=mode: F.interpolate(x, (5, 3), mode=mode, antialias=True),
        name=f"antialiased {mode}",
    )
case(
    "resampling",
    nn.Identity(),
    (BATCH, 2, 3),
    call=lambda m, x: F.affine_grid(x, (BATCH, 3, 4, 5), align_corners=False),
    name="affine_grid",
)
for mode in ("bilinear", "nearest", "bicubic"):
    grid = torch.rand(BATCH, 3, 3, 2) * 2.4 - 1.2
    case(
        "resampling",
        nn.Identity(),
        (BATCH, 2, 5, 6),
        grid,
        call=lambda m, x, at, mode=mode: F.grid_sample(x, at, mode=mode, align_corners=False),
        name=f"grid_sample {mode}",
        atol=1e-4,
    )

# ---- activations and losses ----------------------------------------------------------------------

for kind in (
    nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid,
    nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish,
    nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.GLU, nn.Softmax2d,
):  # fmt: skip
    case("activation", kind(), (BATCH, 4, 2, 6))
for kind in (nn.Softmin, nn.Softmax, nn.LogSoftmax):
    case("activation", kind(dim=1), (BATCH, 6))
case("activation", nn.Threshold(0.1, 20.0), (BATCH, 6))
case("activation", nn.GELU("tanh"), (BATCH, 6))
case("activation", nn.RReLU().eval(), (BATCH, 6), name="RReLU in evaluation")
case("activation", nn.RReLU(0.25, 0.25), (BATCH, 6), name="RReLU with one slope")
case("activation", nn.Dropout2d().eval(), (BATCH, 6, 2, 2), name="dropout in evaluation")
case("activation", nn.AlphaDropout().eval(), (BATCH, 6), name="alpha dropout in evaluation")

CLASSES = torch.tensor([1, 0, 4, 3, 2, 2, 0, 1])
LISTS = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0], [0, 1, 2, 3], [2, -1, 0, 0]]).repeat(2, 1)
SIGNS = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
case("loss", nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2), (BATCH, 5), CLASSES)
case(
    "loss", nn.CrossEntropyLoss(weight=torch.rand(5)), (BATCH, 5, 3), CLASSES[:, None].repeat(1, 3)
)
case("loss", nn.CrossEntropyLoss(reduction="none"), (BATCH, 5), torch.rand(BATCH, 5))
case("loss", nn.NLLLoss(), (BATCH, 5, 2, 2), CLASSES[:, None, None].repeat(1, 2, 2))
for kind in (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss):
    case("loss", kind(), (BATCH, 5), (BATCH, 5))
case("loss", nn.SoftMarginLoss(), (BATCH,), SIGNS)
case(
    "loss",
    nn.PoissonNLLLoss(full=True),
    (BATCH, 5),
    torch.rand(BATCH, 5) * 5,
    call=lambda m, x, y: m(x, y.detach()),
)
case("loss", nn.GaussianNLLLoss(), (BATCH, 5), (BATCH, 5), torch.rand(BATCH, 5) + 0.1)
case("loss", nn.KLDivLoss(reduction="batchmean"), (BATCH, 5), torch.rand(BATCH, 5))
case("loss", nn.BCELoss(), torch.rand(BATCH, 5) * 0.9 + 0.05, torch.rand(BATCH, 5))
case("loss", nn.BCEWithLogitsLoss(pos_weight=torch.rand(5)), (BATCH, 5), torch.rand(BATCH, 5))
case("loss", nn.HingeEmbeddingLoss(), (BATCH,), SIGNS)
case("loss", nn.MultiLabelMarginLoss(), (BATCH, 4), LISTS)
case("loss", nn.MultiLabelSoftMarginLoss(), (BATCH, 5), torch.rand(BATCH, 5))
case("loss", nn.MultiMarginLoss(p=2), (BATCH, 5), CLASSES)
case("loss", nn.CosineEmbeddingLoss(margin=0.2), (BATCH, 5), (BATCH, 5), SIGNS)
case("loss", nn.MarginRankingLoss(), (BATCH,), (BATCH,), SIGNS)
case("loss", nn.TripletMarginLoss(), (BATCH, 5), (BATCH, 5), (BATCH, 5))
case("loss", nn.TripletMarginWithDistanceLoss(), (BATCH, 5), (BATCH, 5), (BATCH, 5))
case(
    "loss",
    nn.CTCLoss(),
    (12, BATCH, 6),
    torch.randint(1, 6, (BATCH, 5)),
    call=lambda m, x, y: m(x.log_softmax(-1), y, (12, 11, 12, 9) * 2, (5, 3, 0, 4) * 2),
)

# Not in a family: its shapes depend on the data. The host reads the positions of a mask, so it is
# not one program.
ADAPTIVE = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])


@pytest.fixture
def global_mesh(mesh_1d):
    before = spmd.get_global_mesh()
    spmd.set_global_mesh(mesh_1d)
    yield mesh_1d
    spmd.set_global_mesh(before)


def compare(cases):
    found = []
    for one in cases:
        torch.manual_seed(0)
        inputs = [value_of(given) for given in one.inputs]
        module = copy.deepcopy(one.make)
        device_module = copy.deepcopy(module).to("xla")
        found.append((one, run(one, module, inputs, "cpu"), run(one, device_module, inputs, "xla")))
    for one, right, ours in found:
        assert right.keys() == ours.keys(), one.name
        for name, expected in right.items():
            assert ours[name].device.type == "xla"
            torch.testing.assert_close(
                ours[name].cpu(),
                expected,
                rtol=1e-4,
                atol=one.atol,
                msg=lambda text, one=one, name=name: f"{one.name}, {name}: {text}",
            )


@pytest.mark.slow
# The first warning is of torch's CPU kernels.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_modules(family, global_mesh, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    compare(FAMILIES[family][:: by_tier(2, in_all=1)])


@pytest.mark.filterwarnings("ignore:the shape of the result of:UserWarning")
def test_adaptive_log_softmax(global_mesh):
    compare(
        [
            Case(
                "adaptive",
                ADAPTIVE,
                ((BATCH, 16), torch.tensor([1, 6, 7, 12, 19, 3, 0, 0])),
                lambda m, x, y: m(x, y).output,
                2e-5,
            )
        ]
    )


# ---- training ------------------------------------------------------------------------------------


LENGTHS = torch.tensor((6, 6, 6, 5, 5, 5, 4, 4))


class Recurrent(nn.Module):
    """Sequences of different lengths through a packed LSTM and a GRU into a CTC loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.gru, self.head = (
            nn.Embedding(16, 8),
            nn.LSTM(8, 8, bidirectional=True),
            nn.GRU(16, 8),
            nn.Linear(8, 6),
        )

    def forward(self, ids):
        x = nn.utils.rnn.pack_padded_sequence(self.embed(ids.t()), LENGTHS)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(x)[0])
        return self.head(self.gru(x)[0]).log_softmax(-1)


def recurrent():
    batch = {"ids": torch.randint(0, 16, (BATCH, 6)), "labels": torch.randint(1, 6, (BATCH, 2))}
    return (
        Recurrent(),
        batch,
        lambda m, b: F.ctc_loss(
            m(b["ids"]), b["labels"], LENGTHS, torch.tensor((2, 2, 1, 2, 2, 2, 2, 1))
        ),
    )


class Unpooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Mish())
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.up = nn.Sequential(
            nn.GroupNorm(2, 8),
            nn.ConvTranspose2d(8, 2, 3, padding=1),
            nn.Upsample(scale_factor=0.5, mode="bilinear"),
        )

    def forward(self, x):
        return self.up(self.unpool(*self.pool(self.down(x))))


def unpooling():
    return (
        Unpooling(),
        {"x": torch.randn(BATCH, 2, 8, 8)},
        lambda m, b: F.mse_loss(m(b["x"]), b["x"][..., ::2, ::2]),
    )


def transformer():
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    return (
        model,
        {"x": torch.randn(BATCH, 5, 16), "y": torch.randn(BATCH, 4, 16)},
        lambda m, b: F.smooth_l1_loss(m(b["x"], b["y"]), b["y"]),
    )


def bags():
    model = nn.Sequential(
        nn.EmbeddingBag(16, 8, mode="mean", padding_idx=0),
        nn.BatchNorm1d(8),
        nn.PReLU(),
        nn.Linear(8, 4),
    )
    batch = {"ids": torch.randint(0, 16, (BATCH, 6)), "labels": torch.randint(0, 4, (BATCH,))}
    return model, batch, lambda m, b: F.cross_entropy(m(b["ids"]), b["labels"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        exhaustive(recurrent),
        unpooling,
        transformer,
        pytest.param(bags, marks=pytest.mark.one_device),
    ],
)
def test_three_steps(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model, batch, loss = make()
    check_training(model, batch, mesh_1d, loss_of=loss)


# ---- randomness in training ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout],
)
def test_dropout_drops_in_training_and_stops_in_evaluation(kind):
    sizes = {nn.Dropout1d: 3, nn.Dropout3d: 5}.get(kind, 4)
    x = torch.ones(4, 64, *(3,) * (sizes - 2)).to("xla")
    module = kind(0.5).to("xla")
    changed = (module(x) != 1).float().mean().item()
    assert changed > 0.2
    assert torch.equal(module.eval()(x).cpu(), torch.ones_like(x.cpu()))
