"""The search for the largest batch: on made-up memory, on compiled programs, and its files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from children import figures

from examples.resnet_spatial import max_batch, search
from examples.resnet_spatial.config import TrainConfig

PEAKS: dict[str, Callable[[int], int]] = {
    "a straight line": lambda batch: 1000 + 7 * batch,
    "a step": lambda batch: 1000 + 7 * batch + 2000 * (batch > 500),
    "bent": lambda batch: int(1000 + 3 * batch**1.2),
}


@pytest.mark.parametrize("limit", [900, 1010, 1100, 4000, 9000, 70000])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", PEAKS)
def test_the_largest_that_fits_is_found(name: str, multiple: int, limit: int) -> None:
    peak = PEAKS[name]
    batch, points = max_batch.largest(peak, limit, multiple=multiple, first=8 * multiple)
    assert batch % multiple == 0
    assert batch == 0 or peak(batch) <= limit
    step = max(multiple, int(batch * max_batch.PRECISION))
    assert peak(batch + step) > limit
    assert len(points) <= 25
    assert points == {tried: peak(tried) for tried in points}


@pytest.mark.exhaustive
def test_resnet50_takes_3_6_times_the_batch_over_four_devices() -> None:
    script = """
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.max_batch import compiled_peak
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(%d)
print(compiled_peak(TrainConfig(batch=%d, mesh="%s")))
"""
    assert figures(script % (4, 231, "height=2,width=2")) <= figures(script % (1, 64, ""))


@pytest.mark.exhaustive  # of any model: `planner/test_plan.py`
def test_a_planned_step_takes_what_a_compiled_one_takes() -> None:
    script = """
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.max_batch import compiled_peak, planned_peak
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(2)
def peaks(batch):
    sizes = dict(batch=batch, image_size=32, classes=10)
    config = TrainConfig(model="smoke", mesh="height=2", **sizes)
    return [compiled_peak(config), planned_peak(config, "cpu-2")]
print([peaks(16), peaks(64)])
"""
    (few, few_planned), (many, many_planned) = figures(script)
    assert many > 3 * few  # the activations: the state is small
    assert few <= few_planned <= 1.1 * few and many <= many_planned <= 1.1 * many


def test_the_files_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def searched(
        config: TrainConfig, topology: str, limit: int, multiple: int
    ) -> tuple[int, dict[int, int]]:
        assert topology == "v4-8"
        parts = 4 if config.mesh else 1

        def peak(batch: int) -> int:
            return int((0.1 + batch / parts / 100) * max_batch.GIB)

        return max_batch.largest(peak, limit, multiple=multiple, first=8 * multiple)

    monkeypatch.setattr(max_batch, "_in_process", searched)
    options = ["--memory-gib", "4", "--folder", str(tmp_path), "--topology", "v4-8"]
    assert max_batch.main(["--model", "small", *options]) == 0
    found = json.loads((tmp_path / "max_batch.json").read_text())["found"]
    batches = [each["batch"] for each in found]
    assert [each["mesh"] for each in found] == list(search.MESHES)
    assert batches[0] == pytest.approx(390, rel=0.04) and batches[2] / batches[0] > 3.6
    assert (tmp_path / "max_batch.png").stat().st_size > 10_000
    assert "| height=2,width=2 |" in (tmp_path / "max_batch.md").read_text()
    assert "one device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-gib", "0"], "--memory-gib must be above 0; got 0.0"),
        (["--data", "photos"], "the search needs no images; got --data 'photos'"),
        (["--meshes", "rows=2"], "mesh axes must be among data, height, width; got ['rows']"),
        (["--meshes", "", "auto"], "got auto, which finds the fastest mesh for one batch. Name"),
        (["--mesh", "data=4"], "got --mesh 'data=4'. Pass --meshes data=4."),
    ],
)
def test_what_a_search_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert max_batch.main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive  # the search is tested above
def test_the_search_of_a_mesh_in_its_process() -> None:
    config = TrainConfig(model="smoke", mesh="data=2", image_size=32, data="fake", classes=10)
    batch, points = max_batch._in_process(config, "", 2**24, 2)
    assert batch in points and points[batch] <= 2**24
    assert any(peak > 2**24 for peak in points.values())


@pytest.mark.exhaustive
def test_a_batch_that_does_not_compile() -> None:
    config = TrainConfig(model="smoke", mesh="data=3", image_size=32)
    with pytest.raises(max_batch.CompileError, match=r"(?s) on data=3: .* 8 images: --batch must"):
        max_batch._in_process(config, "", 2**24, 1)
