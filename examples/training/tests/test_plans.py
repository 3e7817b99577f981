"""Every recipe can be planned, with whatever it would read or write in a run."""

import os
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
from tiers import exhaustive

import spmd_core as spmd
from examples.gpt2.config import SMOKE as GPT2
from examples.gpt2.config import TrainConfig as GPT2Config
from examples.gpt2.train import run as gpt2
from examples.llama_tp.config import SMOKE as LLAMA
from examples.llama_tp.config import TrainConfig as LlamaConfig
from examples.llama_tp.train import run as llama
from examples.resnet_spatial.config import SMOKE as RESNET
from examples.resnet_spatial.config import TrainConfig as ResnetConfig
from examples.resnet_spatial.train import run as resnet
from spmd_core.auto import registration
from spmd_core.planner import plan as planner
from spmd_core.planner import topology
from spmd_core.planner.planned import TopologyPlan

pytestmark = pytest.mark.slow  # each records a few steps of a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts' cache, a model, and for each recipe a run that was saved after its first step."""
    folder = tmp_path_factory.mktemp("plans")
    of_all: dict[str, Any] = {"device": "cpu", "steps": 1, "eval_batches": 0, "progress": False}
    text = {"cache_dir": str(folder / "cache")}
    gpt2(GPT2Config(**GPT2 | of_all | text, checkpoint=str(folder / "gpt2")))
    files = {"checkpoint": str(folder / "llama"), "export": str(folder / "base")}
    llama(LlamaConfig(**LLAMA | of_all | text | files))
    resnet(ResnetConfig(**RESNET | of_all, ema=0.9, checkpoint=str(folder / "resnet")))
    return folder


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is tested, and other tests compile it."""

    def refuse(*program: Any, **options: Any) -> None:
        raise spmd.errors.DeviceMemoryError("not compiled")

    monkeypatch.setattr(planner, "_compiled", refuse)


def planned(run: Any, config: Any, num_devices: int) -> TopologyPlan:
    made = spmd.plan(lambda: run(config), topology=f"cpu-{num_devices}")
    assert not made.ended_by
    return made


def writing(folder: Path) -> dict[str, Any]:
    """Whatever reads values: evaluations, log lines and files."""
    new = folder / "new"
    return {
        "eval_every": 1,
        "log_every": 1,
        "save_every": 1,
        "progress": False,
        "checkpoint": f"{new}/run",
        "log_dir": f"{new}/log",
        "results": f"{new}/results",
    }


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("spmd", "fsdp=4,tensor=2"),
        exhaustive("fsdp", "data=2,fsdp=4"),
        ("ddp", "data=8"),
        exhaustive("pipeline", "pipe=2,data=4"),
    ],
)
def test_gpt2(
    strategy: str,
    mesh: str,
    folder: Path,
    num_devices: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes have eight devices")
    common: dict[str, Any] = {"cache_dir": str(folder / "cache"), "batch": 16}
    if strategy == "pipeline":  # XLA places what it makes, so each of its programs compiles
        common |= {"steps": 1}
    config = GPT2Config(**GPT2 | common | {"strategy": strategy, "mesh": mesh} | writing(folder))
    made = planned(gpt2, config, num_devices)
    assert made.num_steps >= {"pipeline": 1}.get(strategy, 4)
    assert not (folder / "new").exists()
    out = capsys.readouterr().out
    assert "GPT-2 smoke" in out and "nan" not in out and "saved to" not in out


@pytest.mark.usefixtures("finding_a_mesh")
def test_a_mesh_that_is_found(
    folder: Path, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(**GPT2 | writing(folder), mesh="auto", cache_dir=str(folder / "cache"))
    made = planned(gpt2, config, num_devices)
    assert made.shardings[0].text.startswith("mesh ")
    assert capsys.readouterr().out.count("mesh   auto: ") == 1
    assert not (folder / "new").exists() and not registration.is_automatic()


def test_llama_with_adapters_text_and_files(
    folder: Path, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if num_devices != 8:
        pytest.skip("the mesh has eight devices")
    # Two steps: it ends by itself, where a run would say and write what it has learnt.
    options = {"steps": 2, "weights": str(folder / "base"), "lora": 4, "prompt": "def main("}
    options |= {"adapters": f"{folder}/new/lora", "export": f"{folder}/new/model"}
    options |= {"mesh": "data=2,tensor=4", "sequence_parallel": True, "loss_parallel": True}
    config = LlamaConfig(**LLAMA | writing(folder) | options, cache_dir=str(folder / "cache"))
    planned(llama, config, num_devices)
    assert not (folder / "new").exists()
    assert "Training run" not in capsys.readouterr().out


def test_resnet_of_which_a_run_is_saved(folder: Path, num_devices: int) -> None:
    """A plan is that of a new run, and reads and writes nothing."""
    if num_devices != 8:
        pytest.skip("the mesh has eight devices")
    options = {"mesh": "data=2,height=2,width=2", "ema": 0.9, "steps": 2}
    options |= {"checkpoint": str(folder / "resnet")}
    before = sorted((folder / "resnet").rglob("*"))
    made = planned(resnet, ResnetConfig(**RESNET | writing(folder) | options), num_devices)
    assert made.num_steps >= 2 and sorted((folder / "resnet").rglob("*")) == before
    assert not (folder / "new").exists()


@pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)
# As the tests above plan the recipes, those of `planner/test_command.py` run the command, and those
# of `planner/test_topology.py` and `benchmarks/tests/test_compiles.py` need libtpu.
@pytest.mark.exhaustive
def test_the_plan_that_the_planner_recommends(folder: Path) -> None:
    """By its own command, up to libtpu's words on memory."""
    words = ["-m", "spmd_core.plan", "--topology", "v4-16", "--", "python", "-m"]
    words += ["examples.gpt2.train", "--smoke", "--mesh", "fsdp=8"]
    words += ["--cache-dir", str(folder / "cache")]
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    done = fresh.run(words, {**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert "Plan for v4:2x2x2: 8 devices (TPU v4). Nothing was run." in done.stdout
    assert "runs in every further step" in done.stdout and "ended early" not in done.stdout
