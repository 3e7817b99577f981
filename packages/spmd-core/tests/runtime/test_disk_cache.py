"""The folder of compiled programs: private, bounded, and no damaged entry is used or stays."""

import os
import stat
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache

from spmd_core import releases
from spmd_core.config import config
from spmd_core.runtime import disk_cache
from spmd_core.runtime.disk_cache import ProgramCache

VALUE = zlib.compress(bytes(range(200)) * 3)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_damage_is_never_another_program(tmp_path, data):
    cache = ProgramCache(tmp_path / "programs")
    path = tmp_path / "programs" / "key-cache"
    if data.draw(st.booleans(), label="of jax"):
        path.write_bytes(VALUE)
    else:
        cache.put("key", VALUE)
    assert cache.get("key") == VALUE
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cache.get("key")
    if found is None:
        assert not path.exists() and len(caught) == 1
        assert f"{path} is damaged: it is removed, and made ag" in str(caught[0].message)
        assert cache.get("key") is None
        path.write_bytes(content)
        assert cache.get("key") is None  # without another word
    else:
        assert zlib.decompress(found) == zlib.decompress(VALUE) and not caught
    cache.put("key", VALUE)
    assert cache.get("key") == VALUE


@pytest.mark.one_device
def test_jax_compiles_again_what_is_damaged(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    before = jax.config.values["jax_compilation_cache_dir"]
    smallest_s = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    monkeypatch.setattr(config, "cache_dir", str(folder))
    disk_cache.install()
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()

        def compiled():
            return jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(5)).compile()

        compiled()
        whole = {path: path.read_bytes() for path in folder.iterdir()}
        assert whole and stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path, content in whole.items():
            path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
        with pytest.warns(UserWarning, match="is damaged: it is removed") as caught:
            assert compiled()(jnp.ones(5)).tolist() == [4.0] * 5
        assert len(caught) == 1 and set(folder.iterdir()) == set(whole)
        compiled()  # warnings are errors: the entry was replaced
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", smallest_s)
        compilation_cache.reset_cache()


def test_what_was_used_longest_ago_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "max_cache_bytes", 1000)
    cache = ProgramCache(tmp_path)
    left = tmp_path / "key.0123456789abcdef.part"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    for number in range(8):
        cache.put(f"k{number}", bytes([number]) * 100)
        os.utime(tmp_path / f"k{number}-cache", (1000 + number, 1000 + number))
        assert cache.get("k0") is not None  # in use all the time
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"k{number}-cache" for number in (0, 3, 4, 5, 6, 7)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    cache.put("large", bytes(2000))
    assert cache.get("large") is None and sorted(p.name for p in tmp_path.iterdir()) == kept


def test_a_folder_that_others_can_write(tmp_path, monkeypatch):
    old_mask = os.umask(0o002)
    try:
        ProgramCache(tmp_path / "new" / "programs")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "new" / "programs").stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    with pytest.warns(UserWarning, match=r"are executed, and other users can write there \(mode 7"):
        ProgramCache(shared)
    shared.chmod(0o755)  # chmod go-w
    ProgramCache(shared)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = tmp_path / "spmd-core" / "xla"
    default.mkdir(parents=True)
    default.chmod(0o775)  # as an earlier release made it
    ProgramCache(default)
    assert stat.S_IMODE(default.stat().st_mode) == 0o700


def test_a_jax_without_that_function_keeps_its_own_cache(monkeypatch):
    monkeypatch.setattr(releases, "_absent", {})
    monkeypatch.setattr(disk_cache, "_jax_cache", releases.jax_module("jax._src.no_such"))
    disk_cache.install()


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "programs")
    monkeypatch.setattr(config, "cache_dir", below)
    disk_cache.install()
    with pytest.warns(UserWarning, match="compiled programs are not kept: the folder .* cannot be"):
        assert disk_cache._jax_cache.get_file_cache(below) is None
    other = disk_cache._jax_cache.get_file_cache(str(tmp_path / "jax"))
    assert not isinstance(other[0], ProgramCache) and Path(other[1]) == tmp_path / "jax"
