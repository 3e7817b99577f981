"""Options made of a dataclass: the command line, --help, --smoke, and their errors."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from examples.training.knobs import (
    KnobError,
    add_smoke,
    check_at_least,
    check_command_line,
    knob,
    parse,
    parser_of,
)


@dataclass(frozen=True)
class Config:
    steps: int = knob(10, "steps of a run")
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
    for option in ("--step", "--nothing"):
        with pytest.raises(SystemExit):
            parsed(option, "3")
    assert "unrecognized arguments: --nothing 3" in capsys.readouterr().err


def test_a_number_that_is_too_small() -> None:
    check_at_least(Config(), 1, ["steps"])
    with pytest.raises(KnobError, match=r"--steps must be at least 1; got 0\. Leave it out"):
        check_at_least(Config(steps=0), 1, ["steps"])


def test_what_cannot_work_ends_a_command_before_its_imports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_command_line(lambda: check_at_least(Config(), 1, ["steps"]))
    with pytest.raises(SystemExit) as ended:
        check_command_line(lambda: check_at_least(Config(steps=0), 1, ["steps"]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --steps must be at least 1; got 0")
