"""A cached tokenizer is the one that was written, or it is trained again."""

import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from examples.training.tokenizer_cache import cached_tokenizer

TRAINED = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))


def cached(folder: Path, trained: list[Tokenizer]) -> Tokenizer:
    def train() -> Tokenizer:
        trained.append(TRAINED)
        return TRAINED

    return cached_tokenizer(train, key={"of": "a test"}, cache_dir=folder)


def test_it_is_trained_once_for_a_key(tmp_path: Path) -> None:
    trained: list[Tokenizer] = []
    found = [cached(tmp_path / "new", trained) for _ in range(2)]
    assert [one.to_str() for one in found] == [TRAINED.to_str()] * 2
    assert len(trained) == 1
    cached_tokenizer(lambda: TRAINED, key={"of": "another"}, cache_dir=tmp_path / "new")
    assert len([*(tmp_path / "new").iterdir()]) == 2


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_damage_is_trained_again(tmp_path: Path, data: st.DataObject) -> None:
    """A flip or a cut anywhere: the tokenizer is right, with a warning where it was trained."""
    trained: list[Tokenizer] = []
    cached(tmp_path, [])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    content = bytearray(whole)
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cached(tmp_path, trained)
    assert found.to_str() == TRAINED.to_str()
    told = [str(warning.message) for warning in caught]
    assert len(told) == len(trained)
    if trained:
        assert f"the cached tokenizer in {path} is damaged, so it is trained again: " in told[0]
        assert path.read_bytes() == whole
    path.unlink()


def test_what_is_no_file(tmp_path: Path) -> None:
    cached(tmp_path, [])
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    with (
        pytest.warns(UserWarning, match="is damaged, so it is trained again"),
        pytest.raises(OSError, match="regular file"),
    ):
        cached(tmp_path, [])
