"""`verify()`: right programs pass, and an operation that errs under partitioning is named."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import VerificationError
from spmd_core.graph.values import Entry
from spmd_core.program import verification
from spmd_core.recording import calls

counter = spmd.metrics.counter


def record(name, kernel, *inputs):
    """Records an operation of our own whose result has the spec of its first input."""
    spec = inputs[0]._handle.spec
    return calls.record_own(Entry(name, kernel, (spec,)), inputs)


def wrong_when_split(x):
    """Exchanges the first two rows on several devices, as an error of the partitioner would."""

    def kernel(context, inputs, numbers):
        x = inputs[0]
        return [x.at[0].set(x[1]).at[1].set(x[0]) if context.num_devices > 1 else x]

    return record("test::wrong_when_split", kernel, x)


def needs_several(num_devices):
    if num_devices == 1:
        pytest.skip("one device is what is compared with")


def test_a_training_step_passes(mesh_2d, num_devices):
    model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.BatchNorm1d(10), nn.Linear(10, 3))
    model.to("xla")
    spmd.mark_sharding(model[0].weight, mesh_2d, ("a", "b"))
    spmd.mark_sharding(model[3].weight, mesh_2d, (None, "a"))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(12, 6).to("xla")
    spmd.mark_sharding(x, mesh_2d, ("a", None))
    with spmd.debugging.verify():
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            spmd.sync()
    verified = counter("programs_verified")
    assert verified == (0 if num_devices == 1 else 2) and counter("programs_not_verified") == 0
    assert not spmd.config.verify_programs and not spmd.config.record_source_lines
    (model(x) + 1).sum().item()
    assert counter("programs_verified") == verified


def test_the_first_operation_that_differs_is_named(mesh_1d, num_devices):
    needs_several(num_devices)
    x = torch.arange(4.0 * num_devices).reshape(num_devices * 2, 2).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x", None))
    with pytest.raises(VerificationError) as raised, spmd.debugging.verify():
        wrong_when_split(x + 1).sqrt().tolist()
    message = str(raised.value)
    assert message.startswith(
        "a program's results must not depend on its partitioning; operation 1"
    )
    assert "test::wrong_when_split" in message and "test_verification.py" in message
    assert f"4 of {4 * num_devices} elements, first [0, 0]: 3.0, not 1.0" in message
    assert f"It reads float32[{num_devices * 2}, 2] split ('x'" in message
    assert "Mark its" not in message and "Mark the inputs in another way" in message


def test_nothing_is_lost_by_the_error(mesh_1d, num_devices):
    needs_several(num_devices)
    x = torch.arange(2.0 * num_devices).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x",))
    spmd.sync()
    state = torch.zeros(3).to("xla")
    spmd.sync()
    state += 1
    x.copy_(wrong_when_split(x))
    with pytest.raises(VerificationError), spmd.debugging.verify():
        spmd.sync()
    assert state.tolist() == [1.0] * 3
    assert x.tolist() == [1.0, 0.0, *range(2, 2 * num_devices)]  # read anew, unverified


def test_what_is_pending_at_the_end_is_verified(mesh_1d, num_devices):
    needs_several(num_devices)
    x = torch.arange(2.0 * num_devices).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x",))
    with pytest.raises(VerificationError), spmd.debugging.verify():
        y = wrong_when_split(x)
    assert y.shape == x.shape


def test_indices_are_checked(mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "check_indices", False)
    x = torch.arange(16.0).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x",))
    with (
        pytest.raises(spmd.errors.IndexRangeError, match="must lie inside the dim"),
        spmd.debugging.verify(),
    ):
        x[torch.tensor([3, 15]).to("xla") + 1].tolist()
    assert not spmd.config.check_indices


def test_an_error_that_hides_from_the_search_is_still_raised(mesh_1d, num_devices, monkeypatch):
    needs_several(num_devices)
    x = torch.arange(2.0 * num_devices).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x",))
    monkeypatch.setattr(verification, "_first_difference", lambda *_: None)
    monkeypatch.setattr(verification, "_vanishes", lambda *_: True)
    with (
        pytest.raises(VerificationError, match=r"no single operation can be named; it has aten::"),
        spmd.debugging.verify(),
    ):
        wrong_when_split(x + 1).tolist()


def test_rounding_that_grows_is_no_error(mesh_1d, num_devices):
    needs_several(num_devices)
    x = torch.linspace(0, 1, 4 * num_devices).to("xla")
    spmd.mark_sharding(x, mesh_1d, ("x",))

    def rounding(context, inputs, numbers):
        return [inputs[0] * (1 + 1e-6 * (context.num_devices > 1))]

    with spmd.debugging.verify():
        y = record("test::rounding", rounding, x)
        for _ in range(30):  # a chaotic map doubles a difference each time
            y = 4 * y * (1 - y)
        y.tolist()
    assert counter("programs_verified") == 1


def test_a_manual_region_is_left_out_with_a_warning(mesh_1d, num_devices):
    needs_several(num_devices)
    x = torch.arange(2.0 * num_devices).to("xla")
    twice = spmd.shard_map(lambda block: block * 2, mesh_1d, in_specs=(("x",),), out_specs=("x",))
    with (
        pytest.warns(RuntimeWarning, match=r"spmd_\w+ has a manual region, and was not verified"),
        spmd.debugging.verify(),
    ):
        assert twice(x).tolist() == [2.0 * i for i in range(2 * num_devices)]
    assert counter("programs_not_verified") == 1


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("ours", "expected", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0005], None),
        ([1.0, 2.0], [1.0, 2.5], "1 of 2 elements, first [1]: 2.0, not 2.5"),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], None),
        ([float("nan"), 1.0], [0.0, 1.0], "1 of 2 elements, first [0]: nan, not 0.0"),
        ([float("inf"), 1.0], [-float("inf"), 1.0], "1 of 2 elements, first [0]: inf, not -inf"),
        ([float("inf"), 1.0], [5.0, 1.0], "1 of 2 elements, first [0]: inf, not 5.0"),
        ([3, 4], [3, 5], "1 of 2 elements, first [1]: 4, not 5"),
        ([True], [False], "1 of 1 elements, first [0]: True, not False"),
        ([], [], None),
        ([1 + 1j], [1 - 1j], "1 of 1 elements, first [0]: (1+1j), not (1-1j)"),
    ],
)
def test_differences(ours, expected, found):
    assert verification.difference(torch.tensor(ours), torch.tensor(expected)) == found
