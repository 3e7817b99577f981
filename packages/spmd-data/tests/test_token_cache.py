"""Tests the cache of tokens: written once, whole or not at all, and read without copies."""

import contextlib
import io
import os
import pickle
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_core.errors import DataError
from spmd_data.packing import PackedSequences
from spmd_data.token_cache import TokenCache, cached_tokens

TEXTS = [f"{'ab' * (i % 7)}{i}" for i in range(2345)]


def encode(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def written(folder: Path, **options: object) -> TokenCache:
    arguments = {"key": {"texts": "of the tests"}, "cache_dir": folder, "progress": False}
    return cached_tokens(TEXTS, encode, **arguments | options)  # type: ignore[arg-type]


def test_the_tokens_come_back(tmp_path: Path) -> None:
    cache = written(tmp_path)
    assert len(cache) == len(TEXTS)
    assert [bytes(cache.tokens(i).tolist()).decode() for i in range(len(TEXTS))] == TEXTS
    assert cache.lengths.tolist() == [len(text) for text in TEXTS]
    assert cache.tokens(5).dtype == cache.all_tokens.dtype == np.int32
    assert bytes(cache.all_tokens.tolist()).decode() == "".join(TEXTS)
    assert not cache.tokens(5).flags.owndata  # a view of the mapped file
    assert cache.dataset[7] == {"tokens": list(TEXTS[7].encode())}
    with pytest.raises(IndexError, match="document 2345 is out of range"):
        cache.tokens(2345)


def test_it_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path)

    def never(texts: list[str]) -> list[list[int]]:
        raise AssertionError("the tokens are there")

    monkeypatch.setitem(sys.modules, "datasets", None)  # seconds, and only to write
    again = cached_tokens([], never, key={"texts": "of the tests"}, cache_dir=tmp_path)
    assert again.lengths.tolist() == [len(text) for text in TEXTS]
    assert again.folder == first.folder
    monkeypatch.undo()
    assert written(tmp_path, key={"texts": "others"}).folder != first.folder


def test_a_pickle_names_the_file(tmp_path: Path) -> None:
    packed = PackedSequences(written(tmp_path), 64)
    data = pickle.dumps(packed._documents)
    assert len(data) < 500
    assert pickle.loads(data).tokens(3).tolist() == list(TEXTS[3].encode())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_the_writing_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal):
        written(tmp_path / "terminal", progress=True, num_documents=len(TEXTS))
    assert "tokenizing" in terminal.getvalue()
    written(tmp_path / "file", progress=True, num_documents=len(TEXTS))
    assert capsys.readouterr().err == ""


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing(texts: list[str]) -> list[list[int]]:
        if "2000" in texts[0] or len(texts) < 1000:
            raise OSError("the disk is full")
        return encode(texts)

    with pytest.raises(OSError, match="disk is full"):
        cached_tokens(TEXTS, failing, key={}, cache_dir=tmp_path, progress=False)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert len(cached_tokens(TEXTS, encode, key={}, cache_dir=tmp_path, progress=False)) == 2345


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_damage_is_written_again(tmp_path: Path, data: st.DataObject) -> None:
    """A flip or a cut anywhere: the tokens are right, with a warning where they were written."""
    texts = TEXTS[:50]
    arguments = {"key": {}, "cache_dir": tmp_path, "progress": False}
    folder = cached_tokens(texts, encode, **arguments).folder  # type: ignore[arg-type]
    path = folder / data.draw(st.sampled_from(["tokens.arrow", "key.json"]))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = cached_tokens(texts, encode, **arguments)  # type: ignore[arg-type]
    assert [bytes(again.tokens(i).tolist()).decode() for i in range(50)] == texts
    told = [str(warning.message) for warning in caught]
    assert all(f"the cached tokens in {folder} are damaged, so they are wri" in t for t in told)
    assert len(told) == 1 or path.name == "key.json"  # its spaces may be others
    assert again.bounds == (min(map(min, encode(texts))), max(map(max, encode(texts))))
    assert {p.name for p in tmp_path.iterdir()} <= {folder.name, f"{folder.name}.lock"}


@pytest.mark.parametrize("change", ["a file", "without the tokens", "without the key"])
def test_another_thing_in_the_place_of_a_cache(tmp_path: Path, change: str) -> None:
    folder = written(tmp_path).folder
    if change == "a file":
        shutil.rmtree(folder)
        folder.write_text("")
    else:
        (folder / ("tokens.arrow" if change == "without the tokens" else "key.json")).unlink()
    with pytest.warns(UserWarning, match="are damaged, so they are written again"):
        assert len(written(tmp_path)) == len(TEXTS)
    assert len(written(tmp_path)) == len(TEXTS)


WRITER = """
import sys, time
from spmd_data.token_cache import cached_tokens

def encode(texts):
    with open(sys.argv[2], "a") as file:
        file.write("called\\n")
    time.sleep(float(sys.argv[3]))
    return [list(text.encode()) for text in texts]

cache = cached_tokens(["abc", "de"], encode, key={}, cache_dir=sys.argv[1], progress=False)
print(cache.lengths.tolist(), flush=True)
"""


@pytest.mark.slow
def test_others_wait_and_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    """The first process is killed while it writes; of the two that wait, one writes for both."""
    calls, folder = tmp_path / "calls", tmp_path / "cache"

    def start(seconds: float) -> fresh.Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return fresh.Process(["-c", WRITER, folder, calls, seconds], environment)

    killed = start(600)
    while not calls.exists():
        with pytest.raises(TimeoutError):
            killed.wait(0.05)
    waiting = [start(0), start(0)]
    assert killed.end()[0] == "" and killed.wait() == -signal.SIGKILL
    assert [process.wait() for process in waiting] == [0, 0]
    assert [process.end()[0] for process in waiting] == ["[3, 2]\n"] * 2
    assert calls.read_text().count("called") == 2
    assert [path.suffix for path in folder.iterdir() if path.suffix != ".lock"] == [""]


def test_no_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs documents; got none\."):
        cached_tokens([], encode, key={}, cache_dir=tmp_path, progress=False)


def test_an_encoder_that_loses_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one list of tokens for each text; got 1 for 2 texts"):
        cached_tokens(["a", "b"], lambda _: [[1]], key={}, cache_dir=tmp_path, progress=False)


NO_TOKENS = r"encode\(\) gives for each text a list of integers from 0 to 2\*\*31 - 1; got .*Return"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"one list of tokens for each text; got a NoneType for 1000 texts\. Return"),
        ("ab" * 500, r"one list of tokens for each text; got a str for 1000 texts"),
        ([[1.5]] * 1000, NO_TOKENS),
        ([["a"]] * 1000, NO_TOKENS),
        ([[[1], [1, 2]]] * 1000, NO_TOKENS),
        ([1] * 1000, NO_TOKENS),
        ([[-1]] * 1000, NO_TOKENS),
        ([np.array([2**31])] * 1000, NO_TOKENS),
        ([[2**70]] * 1000, NO_TOKENS),
    ],
)
def test_an_encoder_that_gives_no_tokens(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        cached_tokens(TEXTS, lambda texts: given, key={}, cache_dir=tmp_path, progress=False)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_tokens_of_other_kinds_of_lists(tmp_path: Path) -> None:
    kinds = [np.array([2**31 - 1]), (0, 1), torch.tensor([2]), [], np.array([3], np.uint8)]
    cache = cached_tokens(
        list("abcde"), lambda texts: kinds, key={}, cache_dir=tmp_path, progress=False
    )
    assert cache.all_tokens.tolist() == [2**31 - 1, 0, 1, 2, 3]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'spmd-data\[text\]'"):
        written(tmp_path)
