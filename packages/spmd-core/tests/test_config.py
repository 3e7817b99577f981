"""The settings: where the defaults come from, and `strict` for a block."""

import dataclasses
import os
import re
from pathlib import Path

import fresh
import pytest

import spmd_core as spmd
from spmd_core.config import Config, _switch, user_cache

SOURCE = Path(spmd.__file__).parents[1]


def test_strict_ends_with_its_own_block():
    with spmd.strict():
        with spmd.strict():
            assert spmd.config.strict
        assert spmd.config.strict
        with spmd.strict(False):
            assert not spmd.config.strict
        assert spmd.config.strict
    assert not spmd.config.strict


def test_strict_ends_when_the_block_raises():
    with pytest.raises(KeyError, match="inside"), spmd.strict():
        raise KeyError("inside")
    assert not spmd.config.strict


def test_a_setting_is_not_deleted():
    with spmd.strict():
        with pytest.raises(
            AttributeError, match=r"got del spmd\.config\.strict\. Assign to it instead"
        ):
            del spmd.config.strict
        assert spmd.config.strict
        spmd.config.strict = False


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda f: f.name)
def test_each_setting_refuses_other_values_and_stays(field):
    before = getattr(spmd.config, field.name)
    is_number = str(field.type).startswith(("<class 'int", "<class 'float", "int", "float"))
    wrong = [[1], object(), b"1", 1j]
    wrong += ["many", True, -5, float("nan")] if is_number else [2, 0.5]
    wrong += [] if "None" in str(field.type) else [None]
    wrong += [2.5] if "int" in str(field.type) else []
    wrong += [1e10, float("inf")] if "float" in str(field.type) else []  # no clock takes them
    for value in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            setattr(spmd.config, field.name, value)
        message = str(caught.value)
        assert message.startswith(f"spmd.config.{field.name} takes "), message
        assert f"got {value!r}" in message and "Its default is " in message
        assert getattr(spmd.config, field.name) is before
    for value in (before, *([1, 3] if is_number else [])):
        setattr(spmd.config, field.name, value)
    if "None" in str(field.type):
        setattr(spmd.config, field.name, None)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-5, ValueError, "takes an int of at least 1; got -5. Its default is 256."),
        (0, ValueError, "takes an int of at least 1; got 0"),
        ("many", TypeError, "takes an int of at least 1; got 'many', of type str."),
        (True, TypeError, "got True, of type bool."),
    ],
)
def test_a_number_of_programs(value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        spmd.config.max_programs = value
    assert spmd.config.max_programs == 256


def test_a_misspelt_setting_names_the_near_one():
    with pytest.raises(
        AttributeError, match=r"got 'max_program'. Write spmd.config.max_programs\.$"
    ):
        spmd.config.max_program = 5
    with pytest.raises(AttributeError, match=r"has the settings cache_dir, .*Assign to one of"):
        spmd.config.nothing_like_it = 5
    assert not hasattr(spmd.config, "max_program")


def test_the_options_of_xla_have_names():
    with pytest.raises(TypeError, match="takes a dict of XLA's names to str, bool, int or float"):
        spmd.config.compiler_options = {1: True}
    with pytest.raises(TypeError, match=r"got \{'a': None\}"):
        spmd.config.compiler_options = {"a": None}
    spmd.config.compiler_options = {"a": True, "b": 1, "c": 0.5, "d": "x"}


def test_a_switch_of_the_environment_is_on_or_off(monkeypatch):
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("SPMD_STRICT", value)
        assert _switch("SPMD_STRICT") is expected
    monkeypatch.setenv("SPMD_STRICT", "yes")
    with pytest.raises(ValueError, match=r"SPMD_STRICT is 1 .* got 'yes'. Set it to 1, or unset"):
        _switch("SPMD_STRICT")


@pytest.mark.slow
def test_the_environment_sets_defaults():
    code = (
        "from spmd_core.config import config as c; "
        "print(c.cache_dir, c.strict, c.record_source_lines, c.verify_programs, "
        "c.explain_recompiles_after)"
    )
    given = {
        "SPMD_CACHE_DIR": "here",
        "SPMD_STRICT": "1",
        "SPMD_SOURCE_LINES": "1",
        "SPMD_VERIFY": "1",
        "SPMD_EXPLAIN_RECOMPILES": "3",
    }
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **given}
    result = fresh.run(["-c", code], env)
    assert result.stdout.split() == ["here", "True", "True", "True", "3"], result.stderr


@pytest.mark.one_device
def test_the_users_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/spmd-core")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache() == Path("/home/someone/.cache/spmd-core")
