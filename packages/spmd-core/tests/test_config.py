"""The settings: where the defaults come from, and `strict` for a block."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spmd_core as spmd
from spmd_core.config import user_cache

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
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout.split() == ["here", "True", "True", "True", "3"], result.stderr


@pytest.mark.one_device
def test_the_users_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/spmd-core")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache() == Path("/home/someone/.cache/spmd-core")
