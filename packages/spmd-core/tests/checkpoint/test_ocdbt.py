"""tensorstore reads what is written as an index, whatever its number of levels."""

import numpy as np
import pytest
import tensorstore as ts

from spmd_core.checkpoint import ocdbt


def opened(folder, entries, data=b""):
    (folder / "d").mkdir(parents=True)
    nodes, manifest = ocdbt.index(entries, "d/nodes")
    for name, content in {"d/nodes": nodes, "d/0": data, "manifest.ocdbt": manifest}.items():
        (folder / name).write_bytes(content)
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()


@pytest.mark.parametrize("node_bytes", [1, 400, 500_000])
@pytest.mark.parametrize("count", [1, 2, 3, 300])
def test_values_in_nodes_and_in_files(tmp_path, monkeypatch, node_bytes, count):
    monkeypatch.setattr(ocdbt, "_NODE_BYTES", node_bytes)
    rng = np.random.default_rng(count)
    data = rng.bytes(50_000)
    right, entries = {}, []
    for number in rng.permutation(count).tolist():
        key = f"part.{number % 7}/layer.{number}/c/0".encode()
        start = number * 100
        right[key] = data[start : start + number % 5 * 40]
        place = ocdbt.Place("d/0", start, len(right[key]))
        entries.append((key, right[key] if number % 3 == 0 else place))
    store = opened(tmp_path, entries, data)
    assert {*store.list().result()} == right.keys()
    assert {key: store.read(key).result().value for key in right} == right
    assert store.read(b"part.9").result().state == "missing"


def test_a_database_can_be_changed(tmp_path):
    data = bytes(range(256))
    store = opened(tmp_path, [(b"a/c/0", ocdbt.Place("d/0", 16, 100))], data)
    store.write(b"c", b"more").result()
    assert store.read(b"c").result().value == b"more"
    assert store.read(b"a/c/0").result().value == data[16:116]


def test_what_is_damaged_is_told(tmp_path):
    opened(tmp_path, [(b"a", b"value")])
    for name in "d/nodes", "manifest.ocdbt":
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-9] + b"\xff" + content[-8:])
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
        with pytest.raises(ValueError, match="CRC-32C checksum verification failed"):
            store.read(b"a").result()
        (tmp_path / name).write_bytes(content)
