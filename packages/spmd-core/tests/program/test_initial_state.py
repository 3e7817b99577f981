"""State that begins in the first step: training loops compile one program for the step."""

import copy
import math

import jax
import pytest
import torch
from tiers import crossed, exhaustive
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.errors import DeviceMemoryError
from spmd_core.program import compile_cache, initial_state
from spmd_core.runtime import constants

pytestmark = pytest.mark.one_device


class Lion(torch.optim.Optimizer):
    """As published with the paper (arXiv:2302.06675): its state is made at the first step."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * b1 + p.grad * (1 - b1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)


class Muon(torch.optim.Optimizer):
    """As users write it: momentum of the gradient, orthogonalised by five Newton-Schulz steps."""

    def __init__(self, params, lr=2e-2, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                if update.ndim == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(5):
                        a = update @ update.T
                        update = 3.4445 * update + (-4.775 * a + 2.0315 * a @ a) @ update
                p.add_(update, alpha=-group["lr"])


class Adafactor(torch.optim.Optimizer):
    """Factored second moments without a read on the host, as in T5's training code."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    if grad.ndim == 2:
                        state["row"] = torch.zeros(grad.shape[:-1]).to(grad)
                        state["column"] = torch.zeros(grad.shape[-1], device=grad.device)
                    else:
                        state["square"] = torch.zeros_like(grad)
                state["step"] += 1
                decay = 1 - state["step"] ** -0.8
                square = grad.square() + 1e-30
                if grad.ndim == 2:
                    row, column = state["row"], state["column"]
                    row.mul_(decay).add_(square.mean(-1), alpha=1 - decay)
                    column.mul_(decay).add_(square.mean(-2), alpha=1 - decay)
                    scale = (row / row.mean()).rsqrt()[:, None] * column.rsqrt()[None]
                else:
                    state["square"].mul_(decay).add_(square, alpha=1 - decay)
                    scale = state["square"].rsqrt()
                update = grad * scale
                update.div_((update.square().mean().sqrt()).clamp(min=1.0))
                p.add_(update, alpha=-group["lr"])


class Loop:
    """A training loop of few operations; subclasses are what users add to it.

    Attributes:
        programs: how many programs its steps compile.
    """

    programs = 1

    def __init__(self, optimizer, device, mesh):
        torch.manual_seed(0)
        self.device, self.mesh = device, mesh
        self.model = self.build().to(device)
        if mesh is not None:
            for p in self.model.parameters():
                spmd.mark_sharding(p, mesh, ("x",))
        self.optimizer = optimizer(self.model.parameters())
        self.start()

    def build(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def start(self):
        pass

    def batch(self, size=16):
        batch = []
        for x in (torch.randn(size, 8), torch.randint(0, 8, (size,))):
            x = x.to(self.device)
            batch.append(x if self.mesh is None else spmd.mark_sharding(x, self.mesh, ("x",)))
        return batch

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def step(self, number):
        loss = self.loss(*self.batch())
        loss.backward()
        self.update(number)
        return loss.detach()

    def update(self, number):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Clipped(Loop):
    def update(self, number):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        super().update(number)


class Scheduled(Loop):
    def start(self):
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1, n / 3) * math.cos(0.1 * n)
        )

    def update(self, number):
        super().update(number)
        self.schedule.step()


class Accumulated(Loop):
    def step(self, number):
        total = torch.zeros((), device=self.device)
        for _ in range(2):
            loss = self.loss(*self.batch()) / 2
            loss.backward()
            total += loss.detach()
        self.update(number)
        return total


class Averaged(Loop):
    """A moving average of a model with a frozen layer and a buffer, from before the loop."""

    def build(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
        model[0].bias.requires_grad_(False)
        return model

    def start(self):
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def update(self, number):
        super().update(number)
        for a, p in zip(self.average.parameters(), self.model.parameters()):
            if p.requires_grad:
                a.lerp_(p, 0.1)


class Dropped(Loop):
    """Its losses are those of another random stream than the CPU's, and are not compared."""

    def build(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 8))


class Wide(Loop):
    """Parameters of 16 bits, whose wide copies the optimizer updates."""

    def start(self):
        self.model.to(torch.bfloat16)
        self.wide = [p.detach().float() for p in self.model.parameters()]
        kind, group = type(self.optimizer), self.optimizer.param_groups[0]
        self.optimizer = kind(self.wide, lr=group["lr"])

    def batch(self, size=16):
        x, y = super().batch(size)
        return x.bfloat16(), y

    def loss(self, x, y):
        return F.cross_entropy(self.model(x).float(), y)

    @torch.no_grad()
    def update(self, number):
        for w, p in zip(self.wide, self.model.parameters()):
            w.grad, p.grad = p.grad.float(), None
        super().update(number)
        for w, p in zip(self.wide, self.model.parameters()):
            p.copy_(w)


class Scaled(Loop):
    """It reads on the host whether the gradients are finite: two programs in each step."""

    programs = 2

    def start(self):
        self.scaler = torch.amp.GradScaler(self.device, init_scale=128.0)

    def step(self, number):
        loss = self.loss(*self.batch())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


class Logged(Loop):
    """A running loss is read and set back in every second step, which is another program."""

    programs = 2

    def start(self):
        self.running, self.read = torch.zeros((), device=self.device), []

    def step(self, number):
        loss = super().step(number)
        self.running += loss
        if number % 2:
            self.read.append(self.running.item())
            self.running.zero_()
        return loss


class Evaluated(Loop):
    """An evaluation, and a last batch that is smaller: one program each."""

    programs = 3

    def step(self, number):
        if number == 2:
            with torch.no_grad():
                return self.loss(*self.batch(8))
        if number == 3:
            loss = self.loss(*self.batch(8))
            loss.backward()
            self.update(number)
            return loss.detach()
        return super().step(number)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd, foreach": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True, foreach=True
    ),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "lion": Lion,
    "muon": Muon,
    "adafactor": Adafactor,
}
LOOPS = [
    *((name, Loop) for name in OPTIMIZERS),
    *(("adamw", kind) for kind in Loop.__subclasses__()),
    ("sgd", Averaged),
    ("sgd", Clipped),
    ("adamw, foreach", Averaged),
    ("adamw, fused", Scheduled),
    ("lion", Accumulated),
    ("muon", Clipped),
    ("adafactor", Scheduled),
    ("rmsprop", Wide),
    ("adagrad", Dropped),
]
# Every optimizer with the plain loop and every loop with AdamW, and of further pairs these.
TYPICAL = len(OPTIMIZERS) + len(Loop.__subclasses__()) + 2


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step", "ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (pytest.param if i < TYPICAL else exhaustive)(*case, id=f"{case[0]}, {case[1].__name__}")
        for i, case in enumerate(LOOPS)
    ],
)
def test_a_training_loop_compiles_its_step_once(optimizer, kind, mesh_1d):
    is_marked = LOOPS.index((optimizer, kind)) % 2 == 0
    expected = kind(OPTIMIZERS[optimizer], "cpu", None)
    right = [float(expected.step(i)) for i in range(4)]
    spmd.sync()
    compile_cache.clear()  # loops are alike
    before = spmd.metrics.counter("compiles")
    loop = kind(OPTIMIZERS[optimizer], "xla", mesh_1d if is_marked else None)
    losses, counts = [], []
    for i in range(4):
        losses.append(loop.step(i))
        spmd.sync()
        counts.append(spmd.metrics.counter("compiles") - before)
    assert counts[-1] == kind.programs, counts
    got = [float(loss) for loss in losses]
    if kind is Dropped:
        assert all(map(math.isfinite, got))
        return
    tolerance = 2e-2 if kind is Wide else 1e-4
    assert got == pytest.approx(right, rel=tolerance)
    for mine, theirs in zip(loop.model.state_dict().values(), expected.model.state_dict().values()):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=tolerance)


def test_the_first_step_takes_no_more_memory_than_the_state(mesh_1d, num_devices, monkeypatch):
    """The state lies in shards from the beginning, and the program takes its buffers over."""
    made, arrays_of = [], constants.arrays_of

    def watched(wanted):
        made.extend(arrays_of(wanted))
        return [*made]

    monkeypatch.setattr(constants, "arrays_of", watched)
    compile_cache.clear()
    w = torch.ones(num_devices * 64, 1024).to("xla").requires_grad_()
    spmd.mark_sharding(w, mesh_1d, ("x", None))
    optimizer = torch.optim.AdamW([w])
    for _ in range(2):
        w.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    assert len(made) == 2 and all(array.is_deleted() for array in made)  # donated
    assert {array.sharding.shard_shape(array.shape) for array in made} == {(64, 1024)}
    (program,) = compile_cache.programs()
    state = 3 * 64 * 1024 * 4
    assert program.record.argument_bytes == pytest.approx(state, rel=0.01)
    assert program.record.alias_bytes >= state
    assert program.record.output_bytes - program.record.alias_bytes < 1000
    # What is sharded unevenly is filled with its padding.
    average = optimizer.state[w]["exp_avg"]
    assert average.sharding_spec == w.sharding_spec


UPDATES = {
    "constants": lambda w: [torch.full_like(w, 0.3), torch.ones_like(w), torch.zeros_like(w)],
    "a constant of another dtype": lambda w: [
        torch.full(w.shape, 2, device=w.device, dtype=torch.int32).to(torch.float32),
        torch.ones(w.shape, device=w.device, dtype=torch.bfloat16),
        torch.zeros(w.shape, device=w.device).fill_(-1.5),
    ],
    "copies": lambda w: [w.clone(), w.bfloat16().float(), torch.empty_like(w).copy_(w)],
    "of few elements": lambda w: [
        torch.zeros((), device=w.device),
        torch.full((w.shape[1],), -0.0, device=w.device),
        torch.ones((), device=w.device, dtype=torch.float64),
    ],
}


@pytest.mark.parametrize(
    ("axes", "kind", "rows"),
    crossed([(), ("x",), ("a", "b"), (None, "a")], [*UPDATES], [8, 10], rounds=3),
)
def test_what_begins_in_a_step_is_updated_as_in_eager_torch(kind, rows, axes, mesh_1d, mesh_2d):
    mesh = mesh_1d if "x" in axes else mesh_2d
    found = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        w = torch.randn(rows, 6).to(device)
        spmd.sync()
        compile_cache.clear()
        counts = []
        if device == "xla" and axes:
            spmd.mark_sharding(w, mesh, axes)
        state = UPDATES[kind](w)
        for _ in range(3):
            w.mul_(0.5)
            for s in state:
                s.mul_(0.9).add_(w if s.shape == w.shape else w.sum(0) if s.dim() else w.sum())
                s.view(-1)[0] += 1
            if device == "xla":
                spmd.sync()
                counts.append(len(compile_cache.keys()))
        found.append([w.cpu(), *(s.cpu() for s in state)])
    assert counts == [1, 1, 1]
    for right, mine in zip(*found):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", exhaustive("sgd"), "sgd, foreach", exhaustive("muon")])
def test_losses_are_those_of_a_first_step_that_makes_its_state(name, mesh_1d, monkeypatch):
    def losses():
        loop = Clipped(OPTIMIZERS[name], "xla", mesh_1d)
        return torch.stack([loop.step(i) for i in range(3) if spmd.sync() is None]).cpu()

    now = losses()
    monkeypatch.setattr(
        initial_state, "find_state", lambda live, nodes, returned: initial_state.State()
    )
    compile_cache.clear()
    before = losses()
    assert len(compile_cache.keys()) > 2
    assert torch.equal(now, before)


def test_where_the_partitioner_is_to_place_a_large_state(mesh_1d, num_devices, monkeypatch):
    """Nothing places it, and on several devices it may be too large to be whole on each."""
    monkeypatch.setattr(initial_state, "_REPLICATED_BYTES", 64)
    compile_cache.clear()
    x = torch.arange(2.0 * num_devices * 3).view(2 * num_devices, 3)
    on_device = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x",))
    total = torch.zeros(x.shape, device="xla")
    for _ in range(3):
        total.add_(on_device.cos())
        spmd.sync()
    assert len(compile_cache.keys()) == (1 if num_devices == 1 else 2)
    torch.testing.assert_close(total.cpu(), 3 * x.cos())


def test_a_local_state_is_made_in_its_region(mesh_1d, num_devices):
    held = []

    def block(x):
        sums = torch.zeros_like(x)
        sums += x
        held.append(sums)
        return sums * 2

    x = torch.arange(2.0 * num_devices).to("xla")
    for _ in range(2):
        made = spmd.shard_map(block, mesh=mesh_1d, in_specs=(("x",),), out_specs=("x",))(x)
        spmd.sync()
        assert torch.equal(made.cpu(), torch.arange(2.0 * num_devices) * 2)


def test_what_is_not_updated_stays_a_constant():
    x = torch.arange(6.0).to("xla")
    for _ in range(2):
        compile_cache.clear()
        mask = torch.ones(6, device="xla")  # read, and held
        batch = x.clone()
        batch[1] = 7.0  # a copy of data that no step updates
        out = torch.empty(6, device="xla").copy_(x * mask)  # nothing reads what it begins with
        total = (batch * mask).sum() + out.sum()
        spmd.sync()
        (program,) = compile_cache.programs()
        assert len(program.graph.leaves) == 1
        assert total.item() == 36.0


def test_a_scaler_s_first_step_is_the_program_of_all():
    """Its scale is read before it is updated, and the loss is read in between."""
    compile_cache.clear()
    w = torch.ones(4).to("xla").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler, scales = torch.amp.GradScaler("xla", init_scale=4.0, growth_interval=2), []
    for _ in range(4):
        scaler.scale((w * w).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        spmd.sync()
        scales.append(len(compile_cache.keys()))
    assert scales == [2, 2, 2, 2] and scaler.get_scale() == 16.0


def test_nothing_is_lost_where_the_memory_is_too_small(monkeypatch):
    w = torch.ones(64).to("xla")

    def too_small(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    average = torch.zeros_like(w)
    average.lerp_(w, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "arrays_of", too_small)
        with pytest.raises(DeviceMemoryError, match="must fit the device's memory"):
            spmd.sync()
    # The tensors stay pending, with every write; a later read computes them.
    assert average.tolist() == [0.5] * 64


def test_rolled_back_and_tried_again(monkeypatch):
    """After a step that failed, parameters are as before, and a new optimizer begins anew."""
    w = torch.ones(8).to("xla").requires_grad_()
    spmd.sync()
    failing = {"is_on": True}
    build = compile_cache.building

    def fails(*args, **kwargs):
        if failing["is_on"]:
            raise DeviceMemoryError("too large")
        return build(*args, **kwargs)

    monkeypatch.setattr(compile_cache, "building", fails)
    compile_cache.clear()
    for attempt in range(2):
        optimizer = torch.optim.AdamW([w], lr=0.5)
        w.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if attempt:
            failing["is_on"] = False
            spmd.sync()
        else:
            with pytest.raises(DeviceMemoryError):
                spmd.sync()
            spmd.roll_back()
    right = torch.ones(8, requires_grad=True)
    other = torch.optim.AdamW([right], lr=0.5)
    right.square().sum().backward()
    other.step()
    torch.testing.assert_close(w.detach().cpu(), right.detach())


@pytest.mark.usefixtures("nothing_pending")
def test_programs_that_are_verified_repeat_too(mesh_1d):
    compile_cache.clear()
    with spmd.debugging.verify():
        loop = Loop(OPTIMIZERS["adamw"], "xla", mesh_1d)
        for i in range(3):
            loop.step(i)
            spmd.sync()
        assert len(compile_cache.keys()) == 1
