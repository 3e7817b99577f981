"""Wrap policies and the walk over module trees, against torch's functions of the same names."""

from functools import partial

import pytest
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from spmd_core.modules import wrap_policies


class Wrapper(nn.Module):
    def __init__(self, module, tag=None):
        super().__init__()
        self.inner, self.tag = module, tag

    def forward(self, x):
        return self.inner(x)


def model():
    block = lambda: nn.TransformerEncoderLayer(8, 2, 16)  # noqa: E731
    return nn.Sequential(
        nn.Embedding(40, 8),
        nn.ModuleList([block(), block()]),
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 40)),
    )


def wrapped_names(root, wrapper=Wrapper):
    """The names of the modules that are wrapped."""
    return {
        name.replace(".inner", "") for name, m in root.named_modules() if isinstance(m, wrapper)
    }


def by_torch(policy):
    root = model()
    torch_wrap._recursive_wrap(root, policy, Wrapper, set(), set(), only_wrap_children=True)
    return wrapped_names(root)


def by_us(policy, **kwargs):
    root = model()
    wrap_policies.recursive_wrap(root, policy, Wrapper, only_wrap_children=True, **kwargs)
    return wrapped_names(root)


CASES = {
    "transformer": (
        "transformer_auto_wrap_policy",
        {"transformer_layer_cls": {nn.TransformerEncoderLayer}},
    ),
    "lambda": (
        "lambda_auto_wrap_policy",
        {"lambda_fn": lambda m: isinstance(m, nn.Linear) and m.out_features == 40},
    ),
    **{
        f"size {n}": ("size_based_auto_wrap_policy", {"min_num_params": n})
        for n in (1, 70, 300, 400, 700, 1200, 10**6)
    },
    "leaves": (
        "size_based_auto_wrap_policy",
        {"min_num_params": 50, "force_leaf_modules": {nn.TransformerEncoderLayer}},
    ),
    "excluded": (
        "size_based_auto_wrap_policy",
        {"min_num_params": 50, "exclude_wrap_modules": {nn.Linear, nn.ModuleList}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_policies_wrap_what_torchs_wrap(name):
    function, kwargs = CASES[name]
    expected = by_torch(partial(getattr(torch_wrap, function), **kwargs))
    assert by_us(partial(getattr(wrap_policies, function), **kwargs)) == expected
    # torch's function with our walk, and our function with torch's walk.
    assert by_us(partial(getattr(torch_wrap, function), **kwargs)) == expected
    assert by_torch(partial(getattr(wrap_policies, function), **kwargs)) == expected


def test_a_container_is_never_wrapped():
    assert by_us(wrap_policies.always_wrap_policy) == by_torch(torch_wrap.always_wrap_policy) - {
        "1"
    }
    assert wrap_policies.has_forward(nn.Sequential()) and not wrap_policies.has_forward(
        nn.ModuleList()
    )


def test_torchs_policy_objects():
    blocks = {"1.0", "1.1"}
    assert by_us(torch_wrap.ModuleWrapPolicy({nn.TransformerEncoderLayer})) == blocks
    policy = torch_wrap.CustomPolicy(
        lambda m: (
            {"tag": "wide"}
            if isinstance(m, nn.Linear) and m.out_features == 40
            else isinstance(m, nn.Embedding)
        )
    )
    root = model()
    wrap_policies.recursive_wrap(root, policy, Wrapper, only_wrap_children=True, tag="all")
    assert wrapped_names(root) == {"0", "2.1"}
    assert root[0].tag == "all" and root[2][1].tag == "wide"


def test_the_walk_counts_and_ignores():
    root = model()
    wrapped, num = wrap_policies.recursive_wrap(
        root, wrap_policies.always_wrap_policy, Wrapper, ignored_modules=[root[1]]
    )
    assert isinstance(wrapped, Wrapper) and num == sum(p.numel() for p in model().parameters())
    assert wrapped_names(wrapped.inner) == {"0", "2", "2.0", "2.1"}
    alone = nn.Sequential(nn.Linear(4, 4))
    policy = partial(wrap_policies.size_based_auto_wrap_policy, min_num_params=5)
    assert (
        wrap_policies.recursive_wrap(alone, policy, Wrapper, ignored_params=[alone[0].weight])[1]
        == 0
    )
    assert wrap_policies.recursive_wrap(alone, policy, Wrapper)[1] == 20


def test_a_shared_module_is_wrapped_once():
    shared = nn.Linear(4, 4)
    root = nn.Sequential(shared, nn.Sequential(shared))
    wrap_policies.recursive_wrap(
        root,
        partial(wrap_policies.lambda_auto_wrap_policy, lambda_fn=lambda m: m is shared),
        Wrapper,
    )
    assert isinstance(root[0], Wrapper) and root[1][0] is root[0]


def test_errors():
    with pytest.raises(
        TypeError,
        match=r"a wrap policy is a function of \(module, recurse, unwrapped_params\)"
        r".*got int.*partial",
    ):
        wrap_policies.recursive_wrap(model(), 3, Wrapper)
    root = nn.Sequential(Wrapper(nn.Linear(2, 2)))
    with pytest.raises(
        ValueError,
        match=r"starts from modules that are not wrapped; got '0', which is a Wrapper already"
        r".*leave the policy out",
    ):
        wrap_policies.recursive_wrap(root, wrap_policies.always_wrap_policy, Wrapper)
