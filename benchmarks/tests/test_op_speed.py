"""Times of operations: samples are enlarged, both sides are timed, and slow ones are listed."""

import pytest

from benchmarks import op_speed
from benchmarks.opinfo import samples

pytestmark = pytest.mark.one_device


ENTRIES = {op.formatted_name: op for op in samples.entries()}


@pytest.mark.parametrize("name", ["sum", "matmul", "gather"])
def test_samples_are_enlarged(name: str) -> None:
    sample = op_speed._largest(ENTRIES[name], "forward")
    assert sample is not None
    assert 50_000 < max(t.numel() for t in sample.tensors()) <= op_speed.ELEMENTS


def test_samples_that_cannot_be_enlarged_stay() -> None:
    sample = op_speed._largest(ENTRIES["split_with_sizes"], "forward")  # the sizes are given
    assert sample is not None and sample.input.numel() < 10_000


def test_matrices_keep_their_sizes() -> None:
    sample = op_speed._largest(ENTRIES["linalg_cholesky"], "forward")
    assert sample is not None
    assert sample.input.numel() > 10_000 and max(sample.input.shape[-2:]) < 100
    sample = op_speed._largest(ENTRIES["linalg_matrix_power"], "gradient")
    assert sample is not None and max(sample.input.shape[-2:]) < 100


def test_integers_have_no_gradient_to_time() -> None:
    assert op_speed.measure("nn_functional_one_hot", "gradient", 1)["skipped"] == "no sample"


@pytest.mark.parametrize("variant", ["forward", "gradient"])
def test_both_sides_are_timed(variant: str) -> None:
    found = op_speed.measure("layer_norm", variant, rounds=1)
    assert found["eager"] > 0 and found["ours"] >= 0 and found["elements"] == 1024 * 512 + 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", op_speed.CALLS)
def test_the_calls_can_be_made(name: str) -> None:
    function, sample = op_speed._call(name, "forward")
    assert sample is not None
    assert op_speed._run(function, sample, "forward") is not None


def test_what_cannot_be_timed_says_why() -> None:
    assert op_speed.measure("bincount", "gradient", 1)["skipped"].startswith("eager torch: ")
    assert op_speed.measure("sparse_sampled_addmm", "forward", 1)["skipped"] == "no sample"


def test_slow_operations_are_listed_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_speed.REASONS, "for a reason", ("slow*",))
    times = {"fast": 1e-3, "slow one": 9e-3, "other": 4e-3}
    found = [
        {"name": n, "variant": "forward", "eager": 1e-3, "ours": s, "elements": 5}
        for n, s in times.items()
    ]
    found.append({"name": "bad", "variant": "forward", "error": "it failed"})
    table = op_speed._table(found)
    assert [row[0] for row in table.rows] == ["slow one, forward", "other, forward"]
    assert [row[-1] for row in table.rows] == ["for a reason", ""]
    assert "3 calls timed" in table.notes[0] and "bad, forward: it failed" in table.notes


def test_a_table_without_calls() -> None:
    assert op_speed._table([]).notes[0] == "No call is long enough to be timed."
