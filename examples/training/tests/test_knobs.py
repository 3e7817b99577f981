"""Options made of a dataclass: the command line, --help, --smoke, and their errors."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import examples.gpt2.config as gpt2
import examples.llama_serving.config as serving
import examples.llama_tp.config as llama
import examples.resnet_spatial.config as resnet
from examples.training.choices import MOST_DEVICES
from examples.training.knobs import (
    KnobError,
    add_smoke,
    begin_command,
    check_ranges,
    knob,
    option,
    parse,
    parser_of,
)
from spmd_core.chips import MAX_EMULATED_DEVICES


@dataclass(frozen=True)
class Config:
    steps: int = knob(10, "steps of a run", least=1)
    lr: float = knob(0.1, "learning rate", most=1)
    log_dir: str = knob("", "folder for logs", resumable=True)
    data: Sequence[str] = knob(("a", "b"), "files", type=str, nargs="+")
    size: str = knob("small", "size of the model", choices=("small", "large"))
    bar: bool = knob(True, "progress bar", action=argparse.BooleanOptionalAction)


def parsed(*argv: str) -> Config:
    parser = parser_of(Config, module="examples.some.train", usage="Trains.\n\nLegend: N steps.")
    add_smoke(parser, {"steps": 2})
    parser.add_argument("--compare", action="store_true")
    return parse(parser, Config, argv, smoke={"steps": 2})


def test_options_become_fields() -> None:
    assert parsed() == Config()
    assert parsed("--log-dir", "x", "--data", "c", "--no-bar", "--compare") == Config(
        log_dir="x", data=["c"], bar=False
    )


def test_smoke_changes_defaults_alone() -> None:
    assert parsed("--smoke").steps == 2
    assert parsed("--smoke", "--steps", "3").steps == 3


def test_help_has_each_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "python -m examples.some.train" in out and "Trains." in out and "Legend" not in out
    assert "steps of a run (default: 10)" in out
    assert "files (default: a b)" in out
    assert re.search(r"--log-dir LOG_DIR folder for logs --data", out)
    assert "a run that takes seconds: steps=2" in out


def test_abbreviations_and_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("--step", "--nothing"):
        with pytest.raises(SystemExit):
            parsed(name, "3")
    assert "unrecognized arguments: --nothing 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"--steps must be at least 1; got 0\. Leave it out"),
        ({"steps": 2**63}, r"--steps must be at most 9\d+; got 9\d+\. Leave it out"),
        ({"lr": -0.1}, r"--lr must be at least 0; got -0\.1\. Leave it out"),
        ({"lr": 1.5}, r"--lr must be at most 1; got 1\.5\. Leave it out"),
        ({"lr": float("nan")}, r"--lr must be a number that is finite; got nan\. Leave it out"),
        ({"lr": float("-inf")}, r"--lr must be a number that is finite; got -inf\. Leave it out"),
    ],
)
def test_a_number_out_of_its_range(options: dict[str, float], message: str) -> None:
    check_ranges(Config())
    with pytest.raises(KnobError, match=message):
        check_ranges(dataclasses.replace(Config(), **options))  # type: ignore[arg-type]


def test_numbers_that_would_hang_are_too_large() -> None:
    assert MOST_DEVICES == MAX_EMULATED_DEVICES
    checks: list[tuple[Any, Callable[[Any], object], str]] = [
        (
            gpt2.TrainConfig(),
            gpt2.with_defaults,
            "devices batch accumulate seq vocab pad_vocab workers",
        ),
        (
            llama.TrainConfig(),
            llama.check_options,
            "devices batch accumulate seq vocab lora new_tokens",
        ),
        (resnet.TrainConfig(), resnet.with_defaults, "devices batch image_size classes workers"),
        (
            serving.ServeConfig(model="/"),
            serving.checked,
            "devices slots max_length queue connections grace_s",
        ),
    ]
    for config, check, names in checks:
        for name in names.split():
            for value in (10**9, 10**18):
                message = rf"{option(name)} must be at most \d+; got {value}\. Leave it out"
                with pytest.raises(KnobError, match=message):
                    check(dataclasses.replace(config, **{name: value}))


def test_every_number_of_every_recipe_has_a_range() -> None:
    checks: list[tuple[Any, Callable[[Any], object]]] = [
        (gpt2.TrainConfig(), gpt2.with_defaults),
        (llama.TrainConfig(), llama.check_options),
        (resnet.TrainConfig(), resnet.with_defaults),
        (serving.ServeConfig(model="/"), serving.checked),
    ]
    for config, check in checks:
        check(config)
        for field in dataclasses.fields(config):
            if type(field.default) in (int, float):
                bad = [2**63, float("nan"), float("inf")]
                bad += [] if field.name == "min_lr" else [-1]  # negative: a tenth of the peak
                bad += [2] if field.name in ("dropout", "ema", "label_smoothing") else []
                for value in bad:
                    with pytest.raises(KnobError, match=rf"{option(field.name)} .* got {value}\. "):
                        check(dataclasses.replace(config, **{field.name: value}))


def test_what_cannot_work_ends_a_command_before_its_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr("examples.training.knobs.begin_imports", lambda: begun.append(True))
    begin_command(lambda: check_ranges(Config()))
    with pytest.raises(SystemExit) as ended:
        begin_command(lambda: check_ranges(Config(steps=0)))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --steps must be at least 1; got 0")
    assert begun == [True]
