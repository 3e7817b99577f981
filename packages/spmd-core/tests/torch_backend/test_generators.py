"""`torch.Generator(device="xla")` is a generator as on any device, and feeds every random function.

The oracle of states and seeds is torch's generator for the CPU; that of values is the device's own
result with a CPU generator of the same seed, as the device draws its seeds from those.
"""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from spmd_core.recording import calls

X = torch.linspace(0.1, 2, 12).view(3, 4)

# Every random function of torch that takes a generator.
DRAWS = {
    "rand": lambda x, g: torch.rand(3, 4, generator=g, device=x.device),
    "randn": lambda x, g: torch.randn(3, 4, generator=g, device=x.device),
    "randint": lambda x, g: torch.randint(99, (3, 4), generator=g, device=x.device),
    "randint low": lambda x, g: torch.randint(5, 99, (3, 4), generator=g, device=x.device),
    "randperm": lambda x, g: torch.randperm(50, generator=g, device=x.device),
    "rand out": lambda x, g: torch.rand(3, 4, generator=g, out=torch.empty_like(x)),
    "randperm out": lambda x, g: torch.randperm(
        50, generator=g, out=torch.empty(50, dtype=torch.int64, device=x.device)
    ),
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "randn_like": lambda x, g: torch.randn_like(x, generator=g),
    "randint_like": lambda x, g: torch.randint_like(x, 99, generator=g),
    "normal": lambda x, g: torch.normal(x, x, generator=g),
    "normal mean": lambda x, g: torch.normal(x, 1.0, generator=g),
    "normal std": lambda x, g: torch.normal(0.0, x, generator=g),
    "normal out": lambda x, g: torch.normal(x, x, generator=g, out=torch.empty_like(x)),
    "multinomial": lambda x, g: torch.multinomial(x, 20, replacement=True, generator=g),
    "multinomial once": lambda x, g: torch.multinomial(x, 3, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x / 2, generator=g),
    "poisson": lambda x, g: torch.poisson(x * 20, generator=g),
    "standard gamma": lambda x, g: torch._standard_gamma(x * 20, generator=g),
    "binomial": lambda x, g: torch.binomial(x.round() * 50, x / 2, generator=g),
    "rrelu": lambda x, g: torch.ops.aten.rrelu_with_noise(
        -x, torch.empty_like(x), 0.1, 0.3, True, g
    ),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.5, generator=g),
    "bernoulli_ tensor": lambda x, g: x.clone().bernoulli_(x / 2, generator=g),
    "cauchy_": lambda x, g: x.clone().cauchy_(generator=g),
    "exponential_": lambda x, g: x.clone().exponential_(generator=g),
    "geometric_": lambda x, g: x.clone().geometric_(0.1, generator=g),
    "log_normal_": lambda x, g: x.clone().log_normal_(generator=g),
    "normal_": lambda x, g: x.clone().normal_(generator=g),
    "random_": lambda x, g: x.clone().random_(generator=g),
    "random_ to": lambda x, g: x.clone().random_(99, generator=g),
    "random_ from to": lambda x, g: x.clone().random_(5, 99, generator=g),
    "uniform_": lambda x, g: x.clone().uniform_(generator=g),
    "init": lambda x, g: torch.nn.init.kaiming_uniform_(x.clone(), generator=g),
    "trunc_normal_": lambda x, g: torch.nn.init.trunc_normal_(x.clone(), generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_random_function_draws_from_it(name):
    draw, x = DRAWS[name], X.to("xla")
    generator = torch.Generator(device="xla").manual_seed(7)
    before = torch.get_rng_state()
    first, second = (draw(x, generator).tolist() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before), "it drew from the default generator"
    assert first != second
    assert draw(x, torch.Generator().manual_seed(7)).tolist() == first
    recorded = len(calls.entries)
    assert draw(x, torch.Generator("xla").manual_seed(8)).tolist() != first
    assert len(calls.entries) == recorded, "the entry must not depend on the generator"


def test_seeds_and_states_are_those_of_torch():
    ours, torchs = torch.Generator(device="xla"), torch.Generator()
    for g in (ours, torchs):
        assert g.manual_seed(5) is g
    assert ours.initial_seed() == torchs.initial_seed() == 5
    assert torch.equal(ours.get_state(), torchs.get_state())
    state = ours.get_state()
    drawn = torch.rand(3, device="xla", generator=ours).tolist()
    assert not torch.equal(ours.get_state(), state)
    assert ours.set_state(state) is ours
    assert torch.rand(3, device="xla", generator=ours).tolist() == drawn
    ours.set_state(state.to("xla"))  # as a checkpoint that was loaded to the device has it
    assert torch.rand(3, device="xla", generator=ours).tolist() == drawn
    seed = ours.seed()
    assert ours.initial_seed() == seed and 0 <= seed < 2**64
    # A CPU function takes it, too: a seeded shuffle of indices, for instance.
    assert torch.equal(
        torch.randperm(9, generator=ours.manual_seed(5)),
        torch.randperm(9, generator=torchs.manual_seed(5)),
    )


@pytest.mark.parametrize(
    "clone",
    [
        lambda g: g.clone_state(),
        copy.deepcopy,
        lambda g: pickle.loads(pickle.dumps(g)),
    ],
)
def test_a_copy_has_the_state_and_the_device(clone):
    generator = torch.Generator(device="xla").manual_seed(3)
    torch.rand(2, device="xla", generator=generator)
    other = clone(generator)
    assert other is not generator and other.device == generator.device == torch.device("xla:0")
    assert isinstance(other, torch.Generator)
    assert torch.equal(other.get_state(), generator.get_state())
    a = torch.rand(4, device="xla", generator=generator).tolist()
    assert torch.rand(4, device="xla", generator=other).tolist() == a


@pytest.mark.parametrize("device", ["xla", "xla:0", torch.device("xla"), torch.device("xla", 0)])
def test_the_device_by_any_name(device):
    for generator in (torch.Generator(device), torch.Generator(device=device)):
        assert generator.device == torch.device("xla:0")


def test_other_generators_stay_those_of_torch():
    for args in ((), ("cpu",), (None,), (torch.device("cpu"),)):
        generator = torch.Generator(*args)
        assert type(generator) is torch._C.Generator
        assert generator.device == torch.device("cpu")
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(pickle.loads(pickle.dumps(torch.Generator())), torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    assert issubclass(type(torch.Generator("xla")), torch.Generator)
    assert not issubclass(int, torch.Generator)
    with pytest.raises(TypeError):
        torch.Generator(3.5)
    with pytest.raises(RuntimeError, match="nowhere"):
        torch.Generator("nowhere")

    class Own(torch.Generator):
        name = "own"

    assert Own().name == "own" and isinstance(Own(), torch.Generator)
    assert not isinstance(torch.Generator(), Own)
    assert not issubclass(torch._C.Generator, Own)


def test_loaders_and_dropout_in_a_program():
    data = torch.arange(20)
    orders = []
    for device in ("cpu", "xla"):
        g = torch.Generator(device).manual_seed(1)
        sampler = RandomSampler(data, generator=g)
        orders.append([int(b) for b in DataLoader(data, sampler=sampler, generator=g)])
    assert orders[0] == orders[1]


def test_sampling_as_language_models_do():
    generator = torch.Generator(device="xla").manual_seed(42)
    logits = torch.randn(4, 10, device="xla")
    sampled = torch.multinomial(F.softmax(logits, -1), 1, generator=generator)
    assert sampled.shape == (4, 1) and int(sampled.min()) >= 0 and int(sampled.max()) < 10
