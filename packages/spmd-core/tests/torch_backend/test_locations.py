"""Checkpoints move between devices as torch's own do: `map_location`, shared storages, any dtype.

The oracle is `torch.load` of the same file to the CPU.
"""

import copy
import io
import pickle
import zipfile

import pytest
import torch
from tiers import crossed
from torch import nn

import spmd_core as spmd

LOCATIONS = {
    "name": "xla",
    "index": "xla:0",
    "device": torch.device("xla"),
    "dict": {"cpu": "xla", "xla:0": "xla"},
    "function": lambda storage, location: torch.serialization.default_restore_location(
        storage, "xla"
    ),
}
FORMS = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
}


def saved(what, **form):
    file = io.BytesIO()
    torch.save(what, file, **form)
    file.seek(0)
    return file


def examples(device):
    base = torch.arange(24.0, device=device).view(4, 6)
    return {
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "t": base.t(),
        "step": base[::2, 1::2],
        "flat": base.view(-1),
        "grad": torch.ones(3, device=device, requires_grad=True),
        "frozen": nn.Parameter(torch.ones(3, device=device), requires_grad=False),
        "expanded": torch.ones(3, 1, device=device).expand(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64, device=device),
        "empty": torch.empty(0, 3, dtype=torch.int32, device=device),
        "permuted": torch.arange(120.0, device=device).view(2, 4, 5, 3).permute(0, 3, 1, 2),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).to(device).conj(),
        "real": torch.view_as_real(torch.tensor([1 + 2j, 3 - 1j]).to(device))[:, 1],
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16, device=device),
        "bool": torch.tensor([True, False], device=device),
        "float8": torch.tensor([1.5, -2], device=device).to(torch.float8_e5m2),
        "uint16": torch.tensor([1, 60000], dtype=torch.uint16, device=device),
        "number": 3,
        "list": [torch.zeros(2, device=device), "text"],
    }


def same(found, expected, device):
    assert found.device.type == device and found.dtype is expected.dtype
    assert found.shape == expected.shape and found.stride() == expected.stride()
    assert found.requires_grad == expected.requires_grad
    assert isinstance(found, nn.Parameter) == isinstance(expected, nn.Parameter)
    assert found.storage_offset() == expected.storage_offset()
    assert torch.equal(found.detach().cpu().double(), expected.detach().double())


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("written_on", ["cpu", "xla"])
def test_a_checkpoint_is_loaded_to_the_device(written_on, weights_only, form, location):
    written, left_out = examples(written_on), ["conjugate"]
    if written_on == "cpu" and form == "legacy":
        left_out += ["float8", "uint16"]  # torch cannot write them in this form
    for name in left_out:
        del written[name]
    found = torch.load(
        saved(written, **FORMS[form]), map_location=LOCATIONS[location], weights_only=weights_only
    )
    expected = torch.load(saved(examples("cpu")))
    assert list(found) == [name for name in expected if name not in left_out]
    for name in found:
        if isinstance(found[name], torch.Tensor):
            same(found[name], expected[name], "xla")
    assert found["number"] == 3 and found["list"][1] == "text"
    assert found["list"][0].device.type == "xla"
    found["row"].fill_(-1)
    expected["row"].fill_(-1)
    for name in ("base", "column", "t", "step", "flat"):
        assert torch.equal(found[name].cpu(), expected[name])
    (found["grad"] * 2).sum().backward()
    assert found["grad"].grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["cpu", lambda storage, location: storage, {"xla:0": "cpu"}])
def test_a_checkpoint_of_the_device_is_loaded_to_the_host(to, form):
    file = saved(examples("xla"), **FORMS[form])
    found, expected = torch.load(file, map_location=to), examples("cpu")
    for name in ("base", "row", "column", "t", "step", "flat", "grad", "frozen", "half", "real"):
        same(found[name], expected[name], "cpu")
    assert torch.equal(found["conjugate"], expected["conjugate"])
    found["row"].fill_(-1)
    assert (found["base"][1] == -1).all() and (found["flat"][6:12] == -1).all()


def test_without_a_location_it_returns_to_where_it_was():
    for weights_only in (True, False):
        found = torch.load(saved({"w": torch.ones(2, device="xla")}), weights_only=weights_only)
        assert found["w"].device == torch.device("xla:0") and found["w"].tolist() == [1, 1]


class Tied(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, device=device)
        self.body = nn.Linear(4, 4, device=device)
        self.head = nn.Linear(4, 7, bias=False, device=device)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def data_bytes(file):
    with zipfile.ZipFile(file) as archive:
        found = sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)
    file.seek(0)
    return found


@pytest.mark.parametrize("written_on", ["cpu", "xla"])
def test_tied_weights_stay_tied(written_on):
    model = Tied(written_on)
    file = saved(model.state_dict())
    assert data_bytes(file) == 4 * (7 * 4 + 4 * 4 + 4), "the tied weight must be written once"
    state = torch.load(file, map_location="xla")
    tied = state["embedding.weight"], state["head.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr() != state["body.weight"].data_ptr()
    tied[0].zero_()
    assert tied[1].abs().sum().item() == 0
    whole = torch.load(saved(model), map_location="xla", weights_only=False)
    assert whole.head.weight is whole.embedding.weight and whole.head.weight.device.type == "xla"


def test_a_written_storage_is_read_again_after_a_change():
    x = torch.zeros(3, device="xla")
    file = saved([x])
    x.add_(1)
    assert torch.load(saved([x]))[0].tolist() == [1.0, 1.0, 1.0]
    assert torch.load(file)[0].tolist() == [0.0, 0.0, 0.0]
    first = saved([x, x[:2]])
    assert data_bytes(first) == 12


def train(model, optimizer, steps, device):
    for step in range(steps):
        x = torch.arange(step, step + 5).to(device) % 7
        nn.functional.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    ("written_on", "settings"),
    crossed(["cpu", "xla"], [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}]),
)
def test_training_is_resumed_from_a_checkpoint(written_on, settings):
    torch.manual_seed(1)
    reference = Tied()
    start = copy.deepcopy(reference.state_dict())
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, **settings)
    train(reference, reference_optimizer, 2, "cpu")
    model = Tied(written_on)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    train(model, optimizer, 2, written_on)
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint = torch.load(file, map_location="xla")
    resumed = Tied("xla")
    resumed.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1, **settings)
    optimizer.load_state_dict(checkpoint["optimizer"])
    spmd.sync()
    before = spmd.metrics.counter("host_reads")
    found = train(resumed, optimizer, 3, "xla")
    # A count of steps on the device would be read at each step.
    assert spmd.metrics.counter("host_reads") == before + len(found)
    expected = train(reference, reference_optimizer, 3, "cpu")
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_memory_of_the_file_is_used_as_it_is(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.arange(6.0).view(2, 3)}, path)
    found = torch.load(path, map_location="xla", mmap=True)
    assert (found["w"] * 2).tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    found["w"].add_(1)
    assert torch.load(path)["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_loaded_memory_is_freed():
    file = saved(torch.arange(4.0))
    tensor = torch.load(file, map_location="xla")
    storage = tensor._handle.storage.value.data.untyped_storage()
    assert storage.restored() is tensor._handle.storage
    held = storage.restored
    del tensor
    assert held() is None


def test_pickle_keeps_values_strides_and_dtypes():
    for name, tensor in examples("cpu").items():
        if isinstance(tensor, torch.Tensor):
            found = pickle.loads(pickle.dumps(examples("xla")[name]))
            assert found.device.type == "xla" and found.dtype is tensor.dtype
            assert torch.equal(found.detach().cpu(), tensor.detach())
            if name != "conjugate":
                assert found.stride() == tensor.stride()


def test_other_locations_are_those_of_torch():
    file = saved(torch.ones(2))
    assert torch.load(file, map_location="meta").device.type == "meta"
    file.seek(0)
    with pytest.raises(RuntimeError, match="tagged with nowhere"):
        torch.load(file, map_location={"cpu": "nowhere"})
