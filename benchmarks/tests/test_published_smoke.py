"""A real row of the published plots, from the command to its TensorBoard logs."""

import dataclasses
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.published import gpt2, runner
from benchmarks.published.rows import Place, Settings, Store


@pytest.mark.exhaustive  # as the runner and the recipe have tests of their own
def test_a_row_of_gpt2_and_its_logs(tmp_path: Path) -> None:
    (tiny,) = [row for row in gpt2.rows(Settings()) if row.name == "tiny, fully_shard"]
    row = dataclasses.replace(
        tiny,
        command=["smoke" if word == "tiny" else word for word in tiny.command],
        settings={**tiny.settings, "preset": "smoke"},
    )
    store = Store(tmp_path, Place("abc", {}, {}))
    runner.run([row], store)
    measured = store.of(row)
    assert measured.status == "done", measured.reason
    assert len(measured["step_s"].samples) >= 3
    assert measured["peak_bytes"].spread == 0 and measured["num_params"].median == 141_056
    assert gpt2.section(Settings(), {row.name: measured}).lines[0][:2] == ("smoke", "fully_shard")

    logs = tmp_path / "tensorboard" / "gpt2" / row.slug / "round-1"
    events = EventAccumulator(str(logs)).Reload()
    tags = events.Tags()
    assert {"loss/train", "optimizer/grad_norm", "optimizer/lr"} <= set(tags["scalars"])
    assert {"speed/step_time_s", "speed/tokens_per_s", "mfu/6N"} <= set(tags["scalars"])
    assert tags["images"] == ["mesh"]
    losses = json.loads((logs / "report.json").read_text())["losses"]
    for event in events.Scalars("loss/train"):
        assert event.value == pytest.approx(losses[event.step - 1], rel=1e-6)
