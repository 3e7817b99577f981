"""The command lists and verifies a folder, and starts no device."""

import json
import os
import subprocess
import sys

import pytest
import torch

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, command, store


@pytest.fixture
def folder(tmp_path, mesh_1d):
    t = spmd.mark_sharding(torch.arange(4096.0).to("xla"), mesh_1d, ("x",))
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in (3, 20):
            saving.save(step, {"t": {"w": t, "half": torch.ones(2, 3).bfloat16(), "n": 1}})
    return tmp_path


def test_steps_and_arrays(folder, capsys, mesh_1d):
    assert command.main(["ls", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "3" and second.split()[0] == "20"
    assert int(first.split()[1].replace(",", "")) > 4 * 4096 and "20" in first.split()[3]
    assert command.main(["show", str(folder), "--step", "3"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["random", "t.half", "t.w"]
    assert "bfloat16[2, 3]  cpu" in lines["t.half"] and lines["t.half"].endswith(" 12 bytes")
    assert "float32[4096]" in lines["t.w"] and lines["t.w"].endswith(" 16,384 bytes")
    assert "'x'" in lines["t.w"] and str(mesh_1d) in lines["t.w"]


def test_verify_reads_every_chunk(folder, capsys):
    assert command.main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("3 arrays: as written") == 2
    files = (folder / "20" / "arrays" / "d").iterdir()
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 255
    largest.write_bytes(data)
    assert command.main(["verify", str(folder)]) == 1
    said = capsys.readouterr()
    assert "3  3 arrays: as written" in said.out and "20  3 arrays: WRONG" in said.out
    assert "step 20 in" in said.err and "t.w/c/" in said.err
    assert "is not what its checksum says" in said.err
    (folder / "3" / "state" / "metadata").write_text("{}")
    assert command.main(["verify", str(folder), "--step", "3"]) == 1
    assert "metadata is not what its checksum says" in capsys.readouterr().err
    whole = json.dumps({"sha256": store._checksum({})})
    (folder / "3" / "state" / "metadata").write_text(whole)
    assert command.main(["verify", str(folder), "--step", "3"]) == 1
    assert "its state lacks 'parts'" in capsys.readouterr().err
    assert command.main(["ls", str(folder)]) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_what_is_not_there(folder, tmp_path, capsys):
    assert command.main(["show", str(folder), "--step", "4"]) == 1
    assert "has no step 4. Its steps are 3, 20. Name another one." in capsys.readouterr().err
    assert command.main(["ls", str(tmp_path / "none")]) == 1
    assert "there is none at" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert command.main(["verify", str(tmp_path / "empty")]) == 1
    assert "has no step. Its steps are none. Name another folder." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["show", str(folder), "--step", "last"])
    assert "a step is a whole number from 0; got 'last'" in capsys.readouterr().err


@pytest.mark.slow
def test_no_device_is_started(folder):
    code = """
import sys
from jax._src import xla_bridge
from spmd_core.checkpoint import command
assert command.main(["verify", sys.argv[1]]) == 0
assert command.main(["show", sys.argv[1]]) == 0
assert not xla_bridge._backends, xla_bridge._backends
"""
    done = subprocess.run(
        [sys.executable, "-c", code, folder], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
