"""Damaged weights are never other values: each piece of a file has a checksum."""

import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_core.steps import weight_checksums

RIGHT = {
    "a": torch.arange(20.0).reshape(4, 5),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c.d": torch.tensor(3, dtype=torch.int64),
}


def loaded(path):
    """The values of a file; None if it is refused with a sentence that names it."""
    found = {name: torch.full_like(tensor, 7) for name, tensor in RIGHT.items()}
    message = None
    try:
        spmd.load_safetensors(found, path)
    except DataError as error:
        message = str(error)
    if message is None:
        return found
    assert str(path) in message
    assert all(tensor.eq(7).all() for tensor in found.values())  # nothing was loaded
    return None


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(weight_checksums, "PIECE_BYTES", 16)


def saved(tmp_path):
    spmd.save_safetensors(RIGHT, tmp_path)
    return tmp_path / "model.safetensors"


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_damage_is_never_other_values(tmp_path, small_pieces, data):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.sampled_from([1, 1, 2]), label="flips")):
            bit = data.draw(st.integers(0, len(content) * 8 - 1))
            content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    found = loaded(path)
    for name, right in RIGHT.items():
        assert found is None or torch.equal(found[name], right)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_damaged_index_is_never_other_values(tmp_path, data):
    spmd.save_safetensors(RIGHT, tmp_path, max_shard_bytes=20)
    path = tmp_path / "model.safetensors.index.json"
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    found = loaded(path)
    for name, right in RIGHT.items():
        assert found is None or torch.equal(found[name], right)


def test_every_byte_of_the_data_is_covered(tmp_path, small_pieces):
    path = saved(tmp_path)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        assert loaded(path) is None
    path.write_bytes(whole)
    assert loaded(path) is not None


def test_a_damaged_name_of_the_checksums_hides_nothing(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1].replace(b"spmd.crc32", b"spmd.crc33") + b"\x80")
    assert loaded(path) is None


def test_the_message_says_where_and_what_to_do(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x80")
    message = re.escape(f"{str(path)!r} is damaged: bytes ") + "[0-9,]+ to [0-9,]+ differ from the"
    with pytest.raises(DataError, match=f"{message}.*Copy or download it again, or load an earl"):
        spmd.load_safetensors({name: tensor.clone() for name, tensor in RIGHT.items()}, path)
    spmd.save_safetensors(RIGHT, tmp_path)
    assert loaded(path) is not None


def test_files_of_others_have_no_checksums(tmp_path):
    save_file(RIGHT, tmp_path / "other.safetensors", metadata={"format": "pt"})
    assert torch.equal(loaded(tmp_path / "other.safetensors")["a"], RIGHT["a"])
    assert torch.equal(load_file(saved(tmp_path))["a"], RIGHT["a"])  # and others read ours


@pytest.mark.one_device
def test_a_device_checks_what_it_reads(tmp_path, small_pieces, mesh_1d):
    """Its blocks alone: the others' bytes are other processes' to check."""
    table = torch.arange(64.0).reshape(16, 4)
    spmd.save_safetensors({"a": table}, tmp_path)
    for spec in (("x", None), (None, "x"), None):
        target = {"a": torch.zeros(16, 4).to("xla")}
        if spec:
            spmd.mark_sharding(target["a"], mesh_1d, spec)
        spmd.load_safetensors(target, tmp_path)
        assert torch.equal(target["a"].cpu(), table)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + b"\x01" + whole[-2:])
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    assert len(header["__metadata__"][weight_checksums.NAME]) == 8 * (1 + 16)
    with pytest.raises(DataError, match="is damaged"):
        spmd.load_safetensors(target, path)
