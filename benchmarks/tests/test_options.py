"""Types of options: what is wrong ends a command with the rule, what was got, and what to write."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import options


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "message"),
    [
        (options.whole(), ["1", "8"], ["0", "-1", "2.5", "nan", "", "x"], "of at least 1; got"),
        (options.whole(0), ["0"], ["-1"], "of at least 0; got '-1'. Write for instance 8"),
        (options.whole(1, 4), ["4"], ["5"], "from 1 to 4; got '5'. Write for instance 4"),
        (
            options.whole(0),
            ["0"],
            [str(10**12)],
            "from 0 to 2147483647; got '1000000000000'. Write",
        ),
        (options.num_devices(), ["1", "2048"], ["0", "1000000"], "from 1 to 2048; got"),
        (options.num_devices(0), ["0"], ["-1"], "from 0 to 2048; got"),
        (options.num_jobs(), ["1"], ["0", "1000000"], "from 1 to 256; got"),
        (options.num_layers(), ["1"], ["0", "1000000"], "from 1 to 1000; got"),
        (options.number(), ["0", "2.5"], ["-0.1", "nan", "inf", "x"], "of at least 0; got"),
        (options.mesh_shape(2), ["2,2", "8,1"], ["2", "0,8", "2,x", "4,4", ""], "of 2 axes with"),
        (options.mesh_shape(1, 2), ["8", "2,4"], ["2,2,2", "9"], "sizes of 1 or 2 axes with"),
        (options.part, ["0/1", "1/2"], ["2/2", "1", "-1/2", "a/b"], "Write for instance 0/2"),
        (options.existing("folder"), ["/"], ["/none", __file__], "a folder that exists; '/"),
        (options.existing("file"), [__file__], ["/none", "/"], "a file that exists; '/"),
        (options.new_file, ["/new"], ["/none/new", "/"], "in a folder that exists; got '/"),
        (options.interpreter, ["python3"], ["/none/python"], "'/none/python' cannot be run. Write"),
    ],
)
def test_a_type_of_options(
    kind: Callable[[str], Any], right: list[str], wrong: list[str], message: str
) -> None:
    for text in right:
        kind(text)
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            kind(text)
        assert message in str(refused.value)


def test_what_is_read() -> None:
    assert options.whole()("8") == 8 and options.number()("2.5") == 2.5
    assert options.mesh_shape(2)("2,4") == "2,4" and options.part("1/2") == (1, 2)
    assert options.existing("folder")("/").is_dir()


def test_patterns_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["add", "addmm", "mul"]
    assert options.selected("--ops", "mul,add*", known) == known
    options.check_names("--case", ["mul"], known)
    for call, message in (
        (
            lambda: options.selected("--ops", "add,adx", known),
            "--ops has patterns of names, such as add, each of which matches one; got 'adx'. Corr",
        ),
        (
            lambda: options.check_names("--case", ["mull"], known),
            "--case is of add, addmm, mul; got 'mull'. Correct it.",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            call()
        assert ended.value.code == 2 and message in capsys.readouterr().err
