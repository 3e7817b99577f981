"""Pipelines against eager torch on the CPU: losses, gradients, names, and what is refused."""

import copy
import gc

import pytest
import torch
from pipeline_models import LENGTH, VOCABULARY, WIDTH, Block, Model, check, loss_of, made, to_device
from tiers import exhaustive
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.graph import storage


def mesh_of(**axes):
    count = 1
    for size in axes.values():
        count *= size
    if count != spmd.global_runtime_device_count():
        pytest.skip(f"a mesh of {axes} needs another number of devices")
    return spmd.Mesh(range(count), tuple(axes.values()), tuple(axes))


def batch_of(rows):
    return torch.randint(0, VOCABULARY, (2, rows, LENGTH)).unbind()


# --- Losses and gradients of the plain model ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "schedule", "m", "rows", "num_blocks", "rounds"),
    [
        exhaustive({"pipe": 2, "fsdp": 2, "tensor": 2}, "gpipe", 2, 8, 4, 1),
        ({"pipe": 2, "fsdp": 2, "tensor": 2}, "1f1b", 3, 6, 2, 1),  # rows that stages cannot share
        ({"pipe": 2, "fsdp": 2, "tensor": 2}, "circular", 3, 6, 4, 2),
        exhaustive({"pipe": 4, "fsdp": 2}, "1f1b", 2, 16, 4, 1),
        exhaustive({"pipe": 4, "data": 2}, "circular", 8, 16, 8, 2),
        exhaustive({"pipe": 4, "data": 2}, "gpipe", 5, 10, 4, 1),
        exhaustive({"data": 2, "pipe": 2, "fsdp": 2}, "1f1b", 8, 32, 4, 1),
        exhaustive({"data": 2, "pipe": 2, "fsdp": 2}, "gpipe", 1, 4, 4, 1),
        exhaustive({"pipe": 8}, "gpipe", 8, 8, 8, 1),
        exhaustive({"pipe": 8}, "1f1b", 8, 64, 8, 1),
        exhaustive({"pipe": 8}, "1f1b", 1, 3, 8, 1),
        exhaustive({"pipe": 8}, "circular", 7, 7, 16, 2),
        exhaustive({"pipe": 1, "fsdp": 8}, "1f1b", 2, 16, 2, 1),
        exhaustive({"pipe": 2, "tensor": 4}, "circular", 6, 6, 12, 3),
    ],
)
def test_loss_and_gradients_are_those_of_eager_torch(axes, schedule, m, rows, num_blocks, rounds):
    mesh = mesh_of(**axes)
    ours = check(
        Model(num_blocks),
        batch_of(rows),
        mesh,
        schedule=schedule,
        num_microbatches=m,
        rounds=rounds,
    )
    pipe = ours.blocks[0]
    idle = (pipe.num_runs - pipe.num_useful_runs) / pipe.num_runs
    assert idle == pytest.approx(pipe.plan.bubble_fraction)
    first = pipe.slots[0].up.weight
    assert first.shape == (axes["pipe"], 2 * WIDTH, WIDTH) and first.num_stacked_dims == 1
    assert first.partition_spec[0] == "pipe"


@pytest.mark.exhaustive
@pytest.mark.one_device
@pytest.mark.parametrize("schedule", [exhaustive("gpipe"), "1f1b"])
def test_on_one_axis_of_all_devices(num_devices, schedule):
    mesh = mesh_of(pipe=num_devices)
    check(Model(num_devices), batch_of(2), mesh, schedule=schedule, num_microbatches=2)


@pytest.mark.slow
def test_checkpointed_blocks_and_an_optimizer_step(num_devices):
    mesh = mesh_of(pipe=2, data=num_devices // 2)
    model = Model(4)
    batch = batch_of(2 * mesh.mesh_shape[1])
    plain = copy.deepcopy(model)
    for block in model.blocks:
        spmd.checkpoint_module(block)
    ours = made(model, mesh, num_microbatches=2)
    losses = {}
    for each, given in ((plain, batch), (ours, to_device(batch, mesh))):
        decayed = [p for p in each.parameters() if p.ndim - getattr(p, "num_stacked_dims", 0) >= 2]
        others = [p for p in each.parameters() if all(p is not d for d in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        losses[each] = []
        for _ in range(3):
            loss = (
                spmd.pipeline_loss(loss_of, each, *given) if each is ours else loss_of(each, *given)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[each].append(loss.detach())
            spmd.sync()
    assert torch.stack(losses[ours]).tolist() == pytest.approx(
        torch.stack(losses[plain]).tolist(), abs=1e-5
    )
    expected = plain.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=1e-5)


class Scaled(nn.Module):
    """Linear in its parameter, with dropout as a layer and inside of attention."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.rand(WIDTH) + 1), nn.Dropout(0.5)

    def forward(self, x):
        query = torch.ones_like(x)
        value = self.drop(x * self.scale)
        return F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [exhaustive("gpipe"), "1f1b"])
def test_dropout_has_one_mask_for_forward_and_backward(num_devices, schedule):
    """The loss is linear in each block's scale: it is the product of scale and gradient."""
    mesh = mesh_of(pipe=2, data=num_devices // 2)
    model = nn.Sequential(Scaled(), Scaled()).to("xla")
    pipe = spmd.pipeline(model, mesh, num_microbatches=2, schedule=schedule, batch_axes=("data",))
    x = torch.ones(4 * mesh.mesh_shape[1], LENGTH, WIDTH).to("xla")
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        loss = spmd.pipeline_loss(lambda model, x: model(x).mean(), model, x)
        model.zero_grad()
        loss.backward()
        for slot in pipe.slots:
            products = (slot.scale.grad * slot.scale).sum(1).tolist()
            assert products == pytest.approx([loss.item()] * 2, rel=1e-4)
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_a_step_leaves_nothing_to_the_garbage_collector(num_devices):
    """What lives until a collection is computed by the program, or by the next one."""
    mesh = mesh_of(pipe=2, data=num_devices // 2)
    model = nn.Sequential(Scaled(), Scaled()).to("xla")
    spmd.pipeline(model, mesh, num_microbatches=2, schedule="1f1b", batch_axes=("data",))
    x = torch.ones(2 * num_devices, LENGTH, WIDTH).to("xla")

    def num_pending():
        return len(storage.pending())

    gc.collect()
    before = num_pending()
    gc.disable()
    try:
        spmd.pipeline_loss(lambda model, x: model(x).mean(), model, x)
        assert num_pending() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_masks_differ_between_stages_microbatches_and_parts_of_the_batch(num_devices):
    mesh = mesh_of(pipe=2, data=num_devices // 2)
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).to("xla")
    spmd.pipeline(model, mesh, num_microbatches=2, batch_axes=("data",))
    rows = model(torch.ones(2 * mesh.mesh_shape[1], 64, device="xla")).cpu()
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    assert rows.unique().tolist() == [0.0, 4.0]
    assert 0.1 < (rows > 0).float().mean() < 0.4  # a quarter, as two masks are drawn


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("schedule", [exhaustive("gpipe"), "1f1b"])
def test_bfloat16_and_evaluation(num_devices, schedule):
    mesh = mesh_of(pipe=2, fsdp=num_devices // 2)
    model, batch = Model(2), batch_of(4 * mesh.mesh_shape[1])
    ours = made(model, mesh, num_microbatches=2, schedule=schedule)
    given = to_device(batch, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        right = loss_of(model, *batch)
    right.backward()
    with torch.autocast("xla", torch.bfloat16):
        loss = spmd.pipeline_loss(loss_of, ours, *given)
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), rel=2e-2)
    torch.testing.assert_close(
        ours.table.weight.grad.cpu(), model.table.weight.grad, rtol=0.1, atol=2e-3
    )
    ours.eval()
    with torch.no_grad():
        logits, plain = ours(given[0]), model(batch[0])
    torch.testing.assert_close(logits.cpu(), plain, rtol=0, atol=1e-4)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.rand(()))
        self.linear.bias.requires_grad_(False)

    def forward(self, x, position, *, shift=0.0):
        return torch.tanh(self.linear(x)) * self.factor + position + shift


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Shifted(), Shifted()])
        self.position = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.position, shift=0.5)
        return x


def test_buffers_frozen_parameters_and_further_arguments(num_devices):
    mesh = mesh_of(pipe=2, data=num_devices // 2)
    model, x = Positions(), torch.randn(num_devices, LENGTH, WIDTH)
    ours = copy.deepcopy(model).to("xla")
    pipe = spmd.pipeline(ours.blocks, mesh, num_microbatches=2, batch_axes=("data",))
    right = model(x).square().mean()
    right.backward()
    loss = ours(x.to("xla")).square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), abs=1e-5)
    torch.testing.assert_close(ours.position.grad.cpu(), model.position.grad)
    assert pipe.slots[0].linear.bias.grad is None
    assert pipe.slots[0].factor.tolist() == [block.factor.item() for block in model.blocks]


# --- Names ----------------------------------------------------------------------------------------


def test_a_state_dict_has_the_plain_models_names(num_devices):
    mesh = mesh_of(pipe=2, fsdp=num_devices // 2)
    model, other = Model(4), Model(4)
    ours = made(model, mesh, num_microbatches=2, rounds=2, schedule="circular")
    state = ours.state_dict()
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=0, atol=0)
    assert ours.load_state_dict(other.state_dict()).missing_keys == []
    for name, value in other.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), value, rtol=0, atol=0)
    assert ours.blocks[0].slots[1].up.weight.partition_spec[0] == "pipe"
    model.load_state_dict({name: value.cpu() for name, value in ours.state_dict().items()})

    state = other.state_dict()
    del state["blocks.3.up.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.3\.up\.bias"):
        ours.load_state_dict(state)
    state["blocks.3.up.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.2\.up\.bias"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.4\.up"):
        ours.load_state_dict({**other.state_dict(), "blocks.4.up.weight": torch.zeros(3)})


# --- What is refused ------------------------------------------------------------------------------


def pipelined(model, **options):
    mesh = options.pop("mesh", None) or mesh_of(
        pipe=2, data=spmd.global_runtime_device_count() // 2
    )
    model = model.to("xla")
    given = {"num_microbatches": 2, "batch_axes": ("data",), **options}
    return spmd.pipeline(model, mesh, **given)


def blocks(*, n=2, last=None):
    return nn.Sequential(
        *(Block() for _ in range(n - (last is not None))), *([last] if last else [])
    )


def shared():
    block = Block()
    return nn.Sequential(block, block)


def refused(model=None, **options):
    return lambda: pipelined(blocks() if model is None else model, **options)


def a_unit():
    mesh = mesh_of(pipe=2, data=spmd.global_runtime_device_count() // 2)
    model = blocks()
    spmd.fully_shard(model[0], mesh, axis="data")
    return pipelined(model, mesh=mesh)


def twice():
    model = blocks()
    pipelined(model)
    pipelined(model)


class Numbered(Block):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale


REFUSED = {
    "no axis": (refused(axis="stages"), spmd.errors.MeshError, "an axis 'stages'.*pass axis="),
    "batch_axes": (
        refused(batch_axes=("pipe",)),
        spmd.errors.MeshError,
        r"got \('pipe',\).*'data'",
    ),
    "batch_axes is a str": (refused(batch_axes="data"), spmd.errors.MeshError, "got 'data'"),
    "a module": (lambda: spmd.pipeline(Block(), num_microbatches=2), TypeError, "got Block"),
    "blocks": (
        lambda: pipelined(blocks(n=3)),
        spmd.errors.WrapError,
        "3 blocks for 2 stages.*4 blocks",
    ),
    "rounds of blocks": (
        lambda: pipelined(blocks(n=6), schedule="circular", rounds=2),
        spmd.errors.WrapError,
        "6 blocks for 2 stages x 2 rounds.*8 blocks",
    ),
    "other layers": (
        lambda: pipelined(blocks(last=nn.Linear(WIDTH, WIDTH))),
        spmd.errors.WrapError,
        "block 1, whose layers are",
    ),
    "other attributes": (
        lambda: pipelined(nn.Sequential(Numbered(1.0), Numbered(2.0))),
        spmd.errors.WrapError,
        "attribute scale is 2.0, and that of block 0 is 1.0",
    ),
    "shared blocks": (
        lambda: pipelined(shared()),
        spmd.errors.WrapError,
        "block 1, which block 0 has",
    ),
    "units": (a_unit, spmd.errors.WrapError, "unit of fully_shard.*batch_axes"),
    "twice": (twice, spmd.errors.WrapError, "one already.*anew"),
    "schedule": (refused(schedule="zigzag"), ValueError, "gpipe, 1f1b, circular; got 'zigzag'"),
    "microbatches": (refused(num_microbatches=0), ValueError, "num_microbatches=0.*at least 2"),
    "one round": (refused(schedule="circular"), ValueError, "got rounds=1.*Pass rounds=2"),
    "rounds": (refused(rounds=2), ValueError, "got rounds=2 for 'gpipe'.*Leave rounds out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_when_the_pipeline_is_made(case, num_devices):
    if num_devices < 2:
        pytest.skip("needs two stages")
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        make()


def test_blocks_on_the_meta_device(num_devices):
    with torch.device("meta"):
        model = blocks()
    with pytest.raises(spmd.errors.WrapError, match=r"on the meta device.*to_empty"):
        spmd.pipeline(model, mesh_of(pipe=2, data=num_devices // 2), num_microbatches=2)


class Halved(nn.Module):
    def forward(self, x):
        return x[..., : WIDTH // 2]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x * mask


@pytest.mark.parametrize(
    ("model", "rows", "given", "error", "message"),
    [
        (blocks(), 1, {}, ValueError, "1 rows for 2 microbatches on 4 parts.*batch of 8"),
        (
            nn.Sequential(Halved(), Halved()),
            8,
            {},
            spmd.errors.WrapError,
            r"8\) for.*Return the tensor",
        ),
        (
            nn.Sequential(Counting(), Counting()),
            8,
            {},
            spmd.errors.WrapError,
            "writes to 'calls'.*eval",
        ),
        (
            nn.ModuleList([Masked(), Masked()]),
            8,
            {"mask": torch.ones(8, 1, 1)},
            ValueError,
            r"\(8, 1, 1\) for a batch of 8",
        ),
    ],
    ids=["batch", "shape", "buffer", "mask"],
)
def test_what_is_refused_in_a_forward(num_devices, model, rows, given, error, message):
    if num_devices != 8:
        pytest.skip("the numbers are those of 8 devices")
    pipe = pipelined(copy.deepcopy(model))
    given = {name: value.to("xla") for name, value in given.items()}
    with pytest.raises(error, match=f"(?s){message}"):
        pipe(torch.ones(rows, LENGTH, WIDTH, device="xla"), **given)


class Twice(nn.Module):
    """A model that has a pipeline in it; `how` it is called is wrong."""

    def __init__(self, how):
        super().__init__()
        self.blocks, self.how = blocks(), how

    def forward(self, x):
        return self.how(self.blocks, x)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda blocks, x: blocks(blocks(x)).mean(), "2 calls and"),
        (lambda blocks, x: blocks(x), r"1 calls and \(.*Return the mean"),
        (lambda blocks, x: x.mean(), "one that does not"),
    ],
    ids=["twice", "no mean", "not at all"],
)
def test_what_a_loss_function_must_do(num_devices, how, message):
    if num_devices < 2:
        pytest.skip("needs two stages")
    model = Twice(how)
    pipelined(model.blocks, schedule="1f1b")
    x = torch.ones(num_devices, LENGTH, WIDTH, device="xla")
    with pytest.raises(spmd.errors.WrapError, match=f"(?s){message}"):
        spmd.pipeline_loss(lambda model, x: model(x), model, x)
    with pytest.raises(spmd.errors.SpmdError, match=r"gradients enabled.*pipeline_loss"):
        model.blocks(x)
    with pytest.raises(ValueError, match="equally many rows"):
        spmd.pipeline_loss(lambda model, *xs: model(xs[0]), model, x, x[:1])
    with pytest.raises(spmd.errors.WrapError, match=r"a Linear with 0.*Call spmd\.pipeline"):
        spmd.pipeline_loss(lambda model, x: model(x), nn.Linear(2, 2), x)
