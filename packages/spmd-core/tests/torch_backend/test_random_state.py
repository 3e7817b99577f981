"""The state of the random generator: seeds, states and forks."""

import pytest
import torch

from spmd_core.torch_backend import random_state


def draw():
    return torch.rand(3, device="xla").tolist()


def test_a_seed_and_a_state_give_the_same_numbers_again():
    random_state.manual_seed(5)
    first, state, second = draw(), random_state.get_rng_state(), draw()
    random_state.set_rng_state(state)
    assert draw() == second
    random_state.set_rng_state(5)
    assert draw() == first != second
    torch.manual_seed(5)
    assert draw() == first


def test_a_fork_leaves_no_trace():
    random_state.manual_seed(1)
    with random_state.fork_rng():
        random_state.manual_seed(2)
        inside = draw()
    outside = draw()
    random_state.manual_seed(1)
    assert draw() == outside != inside
    with random_state.fork_rng(enabled=False):
        random_state.manual_seed(2)
    assert draw() == inside


def test_what_is_no_state():
    for wrong in ("1", True, None):
        with pytest.raises(
            TypeError,
            match=r"a tensor from get_rng_state\(\) or a seed \(int\); got (str|bool|NoneType). "
            r"Pass one",
        ):
            random_state.set_rng_state(wrong)


def test_the_state_as_a_number():
    torch.manual_seed(5)
    number = random_state.as_seed()
    after = torch.rand(3, device="xla").cpu()
    torch.manual_seed(6)
    random_state.set_rng_state(number)
    assert torch.equal(torch.rand(3, device="xla").cpu(), after)
