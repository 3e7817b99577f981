"""Every figure: its commands parse, it reads what they write, and it shows what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from benchmarks.published import gpt2, hbm, llama, overheads, recipes, resnet
from benchmarks.published.__main__ import FIGURES
from benchmarks.published.figures import Figure
from benchmarks.published.rows import Device, Measured, Row, Scale, Settings
from examples.gpt2 import train as gpt2_train
from examples.llama_tp import train as llama_train
from examples.resnet_spatial import train as resnet_train
from examples.resnet_spatial.search import search_from

QUICK = Settings()
SETTINGS = {
    "quick": QUICK,
    "full": Settings(Scale.FULL),
    "v4-16": Settings(topology="v4-16"),
    "v5e-4, full": Settings(Scale.FULL, topology="v5e-4"),
    "one GPU": Settings(device=Device.CUDA, num_devices=1),
    "four GPUs, full": Settings(Scale.FULL, Device.CUDA, 4),
}
RECIPES: dict[str, Any] = {
    "examples.gpt2.train": gpt2_train.config_from,
    "examples.llama_tp.train": llama_train.config_from,
    "examples.resnet_spatial.train": resnet_train.config_from,
    "examples.resnet_spatial.max_batch": search_from,
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_rows(figure: Figure, settings: Settings) -> None:
    rows = figure.rows(settings)
    assert rows and len({row.slug for row in rows}) == len(rows)
    for row in rows:
        assert row.figure == figure.name
        assert json.loads(json.dumps(dict(row.settings))) == row.settings
        words = list(row.command)
        if "--" in words:  # a plan, of another command
            words = words[words.index("--") + 2 :]
        if words[1] in RECIPES:
            RECIPES[words[1]](words[2:])


def test_quick_rows_are_few() -> None:
    assert sum(row.rounds for figure in FIGURES for row in figure.rows(QUICK)) <= 60


def measured(row: Row, samples: Mapping[str, Sequence[float]]) -> Measured:
    runs = [{"started": "", "seconds": 1.0, "samples": dict(samples)}] * row.rounds
    return Measured(
        row.figure,
        row.name,
        list(row.command),
        dict(row.settings),
        row.rounds,
        commit="abc",
        versions={"torch": "2.13.0"},
        hardware={"cores": 2},
        runs=runs,
    )


TRAINED = {
    "step_s": [0.1, 0.3, 0.2],
    "tokens_per_s": [5120.0],
    "images_per_s": [5120.0],
    "num_params": [4e6],
    "peak_flops": [1e11],
    "peak_bytes": [2e7],
    "argument_bytes": [1e7],
    "sent_bytes": [3e6],
    "last_loss": [6.5],
}
OF_FIGURE = {
    "hbm": {"fits": [1.0], "peak_bytes": [3e10]},
    "resnet": {
        "images": [512.0],
        "images_per_device": [128.0],
        "tried_images": [8.0, 24.0, 512.0],
        "tried_peak_bytes": [1e9, 2e9, 3e10],
    },
}


def samples_of(row: Row) -> Mapping[str, Sequence[float]]:
    if row.read in (recipes.trained, recipes.peer):
        return TRAINED
    if row.figure in OF_FIGURE:
        return OF_FIGURE[row.figure]
    if "layers" in row.settings:
        names = ("first_record_s", "record_s", "lower_s", "compile_s", "num_ops")
        return {name: [0.5] for name in names}
    if row.name == overheads.RECORDING:
        return {f"{name}_us": [3.0, 4.0] for name in ("floor", *overheads.PUBLISHED_OPS)}
    return {name: [0.25] for of, name in overheads._LABELS if of == row.name}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_sections(figure: Figure, settings: Settings) -> None:
    rows = figure.rows(settings)
    found = {row.name: measured(row, samples_of(row)) for row in rows}
    section = figure.section(settings, found)
    assert len(section.lines) >= len(rows)
    assert all(len(line) == len(section.columns) for line in section.lines)
    # And with one row alone, or none: the others failed.
    figure.section(settings, dict(list(found.items())[:1]))
    assert not figure.section(settings, {}).pictures


def comparisons(figure: Figure, settings: Settings) -> dict[str, str]:
    found = {row.name: measured(row, samples_of(row)) for row in figure.rows(settings)}
    return {c.what: c.measured for c in figure.section(settings, found).comparisons}


def test_published_figures_stand_beside_ours() -> None:
    texts = comparisons(gpt2.FIGURE, QUICK)
    assert texts["1-D SPMD against user-mode FSDP, step time"].startswith("tiny: 1.00, small: 1.00")
    texts = comparisons(hbm.FIGURE, SETTINGS["v4-16"])
    assert texts["2B, unsharded, nothing recomputed"] == "30.0 GB"
    texts = comparisons(resnet.FIGURE, QUICK)
    assert texts["Largest batch over a 2 x 2 spatial mesh"] == "512 fit 32 GiB"
    texts = comparisons(llama.FIGURE, QUICK)
    assert texts["What loss parallelism saves of the peak"] == "20.0 MB to 20.0 MB, 1.00 times"


def test_two_sizes_are_bars_and_three_a_line(tmp_path: Path) -> None:
    for settings, num_sizes in ((QUICK, 2), (SETTINGS["full"], 3)):
        presets = {row.settings["preset"]: row for row in gpt2.rows(settings)}
        assert len(presets) == num_sizes
        params = {preset: 1e6 * 5**i for i, preset in enumerate(presets)}
        found = {
            row.name: measured(row, TRAINED | {"num_params": [params[row.settings["preset"]]]})
            for row in gpt2.rows(settings)
        }
        (picture,) = gpt2.section(settings, found).pictures
        figure = matplotlib.figure.Figure()
        picture.draw(figure)
        time, ratio, share = figure.axes
        assert bool(time.patches) == bool(share.patches) == (num_sizes == 2)
        assert not any(line.get_marker() == "*" for line in share.lines)  # a TPU's figure
        # fully_shard beside itself is no ratio.
        labels = share.get_legend_handles_labels()[1]
        assert labels == ["fully_shard", "1-D SPMD", "2-D SPMD", "PyTorch FSDP2"]
        assert ratio.get_legend_handles_labels()[1] == labels[1:]


def test_mfu_has_one_peak_for_all_rows() -> None:
    rows = gpt2.rows(QUICK)
    found = [measured(rows[0], TRAINED | {"peak_flops": [peak]}) for peak in (1e11, 3e11, 9e11)]
    assert gpt2._peak(found) == 3e11
    share = gpt2._quantity(found[0], "mfu", {rows[0].settings["preset"]: 4e6}, 3e11)
    assert share is not None
    assert share.median == pytest.approx(6 * 4e6 * 8 * 64 / 0.2 / (4 * 3e11))


# --- What a run left behind -----------------------------------------------------------------------


def test_a_recipes_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [{"step": 1}, {"step": 2, "speed/step_time_s": 0.5}, {"speed/step_time_s": 0.25}]
    lines += [{"speed/step_time_s": 0.25}, {"speed/step_time_s": 0.5}]
    (logs / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = {
        "config": {"log_dir": str(logs)},
        "unit": "tokens",
        "items_per_s": 1000.0,
        "step_time_s": 0.4,
        "peak_bytes": 7,
        "argument_bytes": None,
        "collectives": [{"moved_bytes": 3.0}, {"moved_bytes": 4.0}],
        "peak_flops": 1e9,
        "num_devices": 4,
        "num_params": 10,
        "losses": [2.0, 1.0],
        "compile_s": 3.0,
        "mfu": {"6N": 0.5},
    }
    (tmp_path / recipes.REPORT).write_text(json.dumps(report))
    found = recipes.trained(tmp_path, 1.0)
    # Without the first run of the step's program, which reaches two intervals.
    assert found["step_s"] == [0.25, 0.5] and found["tokens_per_s"] == [1600.0, 800.0]
    assert found["sent_bytes"] == [7.0] and found["last_loss"] == [1.0]
    assert found["6N_step_flops"] == [0.5 * 1e9 * 4 * 0.4]
    assert "argument_bytes" not in found
    (logs / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="a run must time a step after its program's first two"):
        recipes.trained(tmp_path, 1.0)


def test_a_plans_file(tmp_path: Path) -> None:
    plan: dict[str, Any] = {
        "refusals": [],
        "ended_by": "",
        "step": {
            "peak_bytes": 100,
            "state_bytes": 60,
            "compile_s": 2.0,
            "parts": {"optimizer state": 40},
        },
    }
    path = tmp_path / recipes.PLAN
    path.write_text(json.dumps(plan))
    found = recipes.planned(tmp_path, 1.0)
    assert (found["fits"], found["peak_bytes"], found["state_bytes"]) == ([1.0], [100], [60])
    assert found["optimizer_state_bytes"] == [40]
    path.write_text(json.dumps(plan | {"refusals": ["Used 64.50G of 30.75G hbm."]}))
    assert recipes.planned(tmp_path, 1.0) == {"fits": [0.0], "needed_bytes": [64.5 * 2**30]}
    path.write_text(json.dumps(plan | {"step": None, "ended_by": "it read a value"}))
    with pytest.raises(ValueError, match="a plan must have a step; got none: it read a value"):
        recipes.planned(tmp_path, 1.0)


def test_what_does_not_fit_is_shown_so() -> None:
    row = next(row for row in hbm.rows(SETTINGS["v4-16"]) if row.name == "4B, unsharded")
    found = {row.name: measured(row, {"fits": [0.0], "needed_bytes": [64e9]})}
    (line,) = hbm.section(SETTINGS["v4-16"], found).lines
    assert line[2] == "does not fit: needs 64.0 GB"


def test_meshes_by_the_chips_of_a_topology() -> None:
    assert list(hbm.shardings(SETTINGS["v4-16"], 8)) == [
        "unsharded",
        "fsdp=4",
        "fsdp=8",
        "fsdp=4,tensor=2",
    ]
    assert "fsdp=16" in hbm.shardings(SETTINGS["v4-16"], 16)
    assert resnet.four_chips("v5litepod-8") == "v5e-4"
