"""Tests environment variables: those with an effect, refused ones, those with a warning."""

import os
import sys

import fresh
import pytest
import torch

import spmd_core as spmd
import torch_xla
from spmd_core.program import automatic, compile_cache
from torch_xla import _environment


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("XLA_", "PT_XLA_", "CPU_NUM", "PJRT_")):
            monkeypatch.delenv(name)
    before = spmd.config.record_source_lines, spmd.config.explain_recompiles_after
    yield
    spmd.config.record_source_lines, spmd.config.explain_recompiles_after = before
    spmd.eager_mode(False)


@pytest.mark.parametrize("shape", [None, "", "2,2", "1, 8"])
def test_automatic_sharding(monkeypatch, shape):
    monkeypatch.setenv("XLA_AUTO_SPMD", "1")
    if shape is not None:
        monkeypatch.setenv("XLA_AUTO_SPMD_MESH", shape)
    _environment.apply()
    assert torch_xla._XLAC._xla_get_auto_sharding() and spmd.is_spmd()
    expected = {"2,2": (2, 2), "1, 8": (1, 8)}.get(shape, ())
    assert automatic.search.mesh == expected


@pytest.mark.parametrize("text", ["2x2", "2,", "0,8"])
def test_the_shape_of_automatic_sharding(monkeypatch, text):
    monkeypatch.setenv("XLA_AUTO_SPMD", "1")
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", text)
    with pytest.raises(ValueError, match=f"with commas between them; got '{text}'. Write for"):
        _environment.apply()
    assert not torch_xla._XLAC._xla_get_auto_sharding()


def test_groups_of_parameters_are_always_sharded_alike(monkeypatch):
    monkeypatch.setenv("XLA_AUTO_USE_GROUP_SHARDING", "1")
    _environment.apply()
    monkeypatch.setenv("XLA_AUTO_USE_GROUP_SHARDING", "0")
    with pytest.warns(UserWarning, match="XLA_AUTO_USE_GROUP_SHARDING=0 has no effect"):
        _environment.apply()


@pytest.mark.parametrize("text", ["0", "many", "-1"])
def test_number_of_devices_is_positive(monkeypatch, text):
    monkeypatch.setenv("CPU_NUM_DEVICES", text)
    with pytest.raises(
        ValueError, match=f"CPU_NUM_DEVICES is a positive number of emulated devices; got '{text}'"
    ):
        _environment.apply()


@pytest.mark.parametrize("name", ["XLA_IR_DEBUG", "XLA_HLO_DEBUG"])
def test_source_lines(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    _environment.apply()
    assert spmd.config.record_source_lines


@pytest.mark.parametrize("name", ["PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL"])
def test_explained_compiles(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    _environment.apply()
    assert spmd.config.explain_recompiles_after == 0


def test_eager_mode(monkeypatch):
    monkeypatch.setenv("XLA_USE_EAGER_DEBUG_MODE", "1")
    _environment.apply()
    assert torch_xla.experimental.is_eager_mode()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (None, ["BEGIN_GRAPH\ninput 0: float32[3]", "aten::sinh(input 0) -> float32[3]"]),
        ("hlo", ["BEGIN_GRAPH\nHloModule", "sinh"]),
        ("stablehlo", ["BEGIN_GRAPH\nmodule @", "sinh"]),
    ],
)
def test_saved_programs(monkeypatch, tmp_path, form, words):
    monkeypatch.setattr(compile_cache, "observers", list(compile_cache.observers))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    if form is not None:
        monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", form)
    _environment.apply()
    compile_cache.clear()
    x = torch.ones(3).to("xla")
    for _ in range(2):
        y = x.sinh()
        torch_xla.sync()
    assert y is not None
    text = (tmp_path / "graphs.0").read_text()
    assert all(word in text for word in words) and text.count("## BEGIN_GRAPH") == 1
    assert f" for {__file__}:" in text


def test_other_forms_of_saved_programs_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "dot")
    with pytest.raises(ValueError, match=r"is one of text, hlo, stablehlo; got 'dot'\. Set one"):
        _environment.apply()


def test_sync_that_waits(monkeypatch):
    waited = []
    monkeypatch.setattr("spmd_core.sync", lambda *, wait=False: waited.append(wait))
    torch_xla.sync()
    monkeypatch.setenv("XLA_SYNC_WAIT", "1")
    torch_xla.sync()
    monkeypatch.setenv("XLA_SYNC_WAIT", "0")
    torch_xla.core.xla_model.mark_step()
    assert waited == [False, True, False]


@pytest.mark.parametrize("text", ["yes", "on", "-1", "1.5"])
def test_a_switch_is_on_or_off(monkeypatch, text):
    for name, read in (("XLA_SYNC_WAIT", torch_xla.sync), ("XLA_AUTO_SPMD", _environment.apply)):
        with monkeypatch.context() as context:
            context.setenv(name, text)
            message = rf"{name} is 1 or true .*; got '{text}'\. Set {name}=1, or unset it"
            with pytest.raises(ValueError, match=message):
                read()


@pytest.mark.parametrize("name", sorted(_environment._WITHOUT_EFFECT))
def test_what_has_no_effect_is_said(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"{name} has no effect in this torch_xla.*got '1'"):
        _environment.apply()


def test_a_program_started_with_variables(tmp_path):
    program = (
        "import torch, torch_xla, torch_xla.runtime as xr\n"
        "assert xr.is_spmd() and xr.global_runtime_device_count() == 4\n"
        "print((torch.ones(4, device='xla') + 1).tolist())\n"
    )
    cache = tmp_path / "programs"
    variables = {
        "CPU_NUM_DEVICES": "4",
        "XLA_USE_SPMD": "true",
        "XLA_PERSISTENT_CACHE_PATH": str(cache),
        "PJRT_DEVICE": "CPU",
    }
    ran = fresh.run(
        ["-c", program],
        {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0 and "[2.0, 2.0, 2.0, 2.0]" in ran.stdout, ran.stderr[-2000:]
    assert list(cache.iterdir())
