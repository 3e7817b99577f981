"""An index as it was encoded; what is damaged, and what has another form."""

import numpy as np
import pytest
import tensorstore as ts

from spmd_core.checkpoint import index_reading, ocdbt
from spmd_core.checkpoint.index_reading import OtherFormError


def opened(folder):
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()


def written(folder, entries):
    (folder / "d").mkdir()
    nodes, manifest = ocdbt.index(entries, "d/nodes")
    (folder / "d/nodes").write_bytes(nodes)
    (folder / "manifest.ocdbt").write_bytes(manifest)


@pytest.mark.parametrize("node_bytes", [1, 400, 500_000])
@pytest.mark.parametrize("count", [1, 2, 3, 300])
def test_what_was_encoded(tmp_path, monkeypatch, node_bytes, count):
    monkeypatch.setattr(ocdbt, "_NODE_BYTES", node_bytes)
    rng = np.random.default_rng(count)
    entries = {}
    for number in range(count):
        place = ocdbt.Place(f"of.{number % 3}/d/{number % 5}", number << (number % 50), 2000)
        key = f"part.{number % 7}/layer.{number}/c/0".encode()
        entries[key] = rng.bytes(number % 200) if number % 3 == 0 else place
    written(tmp_path, entries.items())
    assert index_reading.index(tmp_path) == entries


@pytest.mark.parametrize("name", ["d/nodes", "manifest.ocdbt"])
def test_what_is_damaged_is_told(tmp_path, name):
    written(tmp_path, [(b"a", b"value"), (b"b", ocdbt.Place("d/0", 5, 2000))])
    path = tmp_path / name
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{name} is not what its checksum says"):
            index_reading.index(tmp_path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{name} is not what its checksum says"):
            index_reading.index(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        index_reading.index(tmp_path)


def test_what_tensorstore_has_written_or_changed_has_another_form(tmp_path):
    opened(tmp_path).write(b"a", b"value").result()
    with pytest.raises(OtherFormError):
        index_reading.index(tmp_path)
    changed = tmp_path / "changed"
    changed.mkdir()
    written(changed, [(b"a", b"value")])
    opened(changed).write(b"b", b"more").result()
    with pytest.raises(OtherFormError):
        index_reading.index(changed)
