"""LoRA: losses, text and files are those of peft on the CPU; what moves is small."""

import contextlib
import copy
import io
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from tiers import exhaustive
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_serving import loading
from examples.llama_tp import lora, shardings
from examples.llama_tp.config import SMOKE, TrainConfig
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS
from examples.llama_tp.train import main, run
from examples.training.knobs import KnobError

KNOBS = {**SMOKE, "steps": 4, "eval_batches": 0, "progress": False, "lr": 0.02, "max_mb": 0.2}
RANK, TOKENS = 4, 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that was trained a little, and the texts' cache."""
    folder = tmp_path_factory.mktemp("base")
    run(config(folder, device="cpu", lora=0, export=str(folder / "base")))
    return folder


@pytest.fixture(scope="module")
def expected(base: Path) -> tuple[Any, str]:
    """A fine-tuning run in eager torch: its report, and the text that it says."""
    return tuned(base, "cpu", device="cpu")


def config(folder: Path, **knobs: Any) -> TrainConfig:
    return TrainConfig(**{**KNOBS, "cache_dir": str(folder / "cache"), "lora": RANK, **knobs})


def tuned(base: Path, name: str, *, says: bool = True, **knobs: Any) -> tuple[Any, str]:
    folders = {"adapters": str(base / f"{name}-adapters"), "export": str(base / f"{name}-merged")}
    said = {"prompt": "def main(", "new_tokens": 3} if says else {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report = run(config(base, weights=str(base / "base"), **folders, **said, **knobs))
    return report, out.getvalue()[out.getvalue().index("def main(") :] if says else ""


def meshes(num_devices: int) -> list[tuple[str, bool]]:
    """Meshes, each with or without sequence parallelism: TP, TP and SP, FSDP x TP."""
    if num_devices == 8:
        return [("data=2,tensor=4", False), ("fsdp=2,tensor=4", True)]
    return [("", False)] if num_devices == 1 else [(f"tensor={num_devices}", True)]


@pytest.mark.one_device
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
@pytest.mark.parametrize("choice", [0, exhaustive(1)])
def test_fine_tuning_is_that_of_eager_torch(
    choice: int, base: Path, expected: Any, num_devices: int
) -> None:
    if choice >= len(meshes(num_devices)):
        pytest.skip("one mesh of so many devices")
    mesh, split = meshes(num_devices)[choice]
    right_report, right_text = expected
    # On one device and in the tier `all`; on a mesh `test_results.py` continues a prompt.
    says = num_devices == 1 or split
    report, text = tuned(
        base, "ours", says=says, mesh=mesh, sequence_parallel=split, loss_parallel=split
    )
    assert text == (right_text if says else "")
    assert report.losses == pytest.approx(right_report.losses, rel=1e-5)
    # Two ways to the same model, on the CPU: adapters beside the base, and merged weights.
    beside = LlamaForCausalLM.from_pretrained(base / "base")
    beside = PeftModel.from_pretrained(beside, base / "ours-adapters").eval()
    merged = LlamaForCausalLM.from_pretrained(base / "ours-merged").eval()
    right = LlamaForCausalLM.from_pretrained(base / "cpu-merged").eval()
    ids = torch.randint(512, (2, TOKENS))
    with torch.no_grad():
        logits = right(ids).logits
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(beside(ids).logits, logits, rtol=1e-3, atol=1e-3)
        untuned = LlamaForCausalLM.from_pretrained(base / "base").eval()(ids).logits
    assert (untuned - logits).abs().max() > 0.05


def test_the_folder_of_a_runs_checkpoints_is_a_model_with_merged_adapters(
    base: Path, tmp_path: Path, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    # Alpha is not twice the rank, which is the default.
    knobs = {"weights": str(base / "base"), "lora_alpha": 3.0, "checkpoint": str(folder)}
    run(config(base, device="cpu", steps=2, export=str(out), **knobs))
    right = LlamaForCausalLM.from_pretrained(out).state_dict()
    untuned = LlamaForCausalLM.from_pretrained(base / "base").state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    assert (right[name] - untuned[name]).abs().max() > 1e-3
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        found_config = loading.read_config(folder)
        mesh = spmd.parse_mesh(f"tensor={2 if num_devices > 1 else 1}", min(num_devices, 2))
        model = loading.load_model(folder, found_config, dtype=dtype, mesh=mesh)  # of the server
        found = model.state_dict()
        assert found.keys() == right.keys()
        for name, t in right.items():
            torch.testing.assert_close(
                found[name].cpu().float(), t, rtol=tolerance, atol=tolerance / 10
            )
    # A run that starts from there.
    given = {"device": "cpu", "steps": 1, "lora": 0}
    losses = [run(config(base, weights=str(each), **given)).losses for each in (folder, out)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (folder / lora.CONFIG).write_text("{}")
    arguments = ["--smoke", "--device", "cpu", "--weights", str(folder), "--seq", "64"]
    assert main([*arguments, "--cache-dir", str(base / "cache")]) == 2
    assert "adapter_config.json has r and lora_alpha" in capsys.readouterr().err


def adapted() -> Any:
    torch.manual_seed(0)
    model = build_model(PRESETS["debug"], vocab_size=512, positions=TOKENS)
    lora.add(model, rank=RANK, alpha=0.0, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # 0, so that A would get no gradient
                parameter.normal_(std=0.1)
    return model


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_adapters_and_what_they_move(
    sequence_parallel: bool, num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("counts collectives over 2 x 4 devices")
    mesh = spmd.parse_mesh("data=2,tensor=4", 8)
    right = adapted()
    ours = copy.deepcopy(right).to("xla")
    styles = {"sequence_parallel": sequence_parallel, "loss_parallel": True}
    shardings.parallelize(ours, mesh, **styles, has_adapters=True)
    layer = ours.model.layers[0]
    assert layer.self_attn.q_proj.lora_B.default.weight.partition_spec == ("tensor", None)
    assert layer.mlp.down_proj.lora_A.default.weight.partition_spec == (None, "tensor")
    given = [*torch.randint(512, (2, 8, TOKENS))]
    split = [spmd.mark_sharding(t.to("xla"), mesh, ("data",)) for t in given]
    spmd.sync()
    loss = loss_of(ours, *split)
    loss.backward()
    trained = [p for p in ours.parameters() if p.grad is not None]
    moved = spmd.debugging.collectives(loss.detach(), *(p.grad for p in trained))
    # A hidden state has 4 x 64 x 64 float32 on a device; the adapters' has 4 instead of 64.
    # XLA may join reductions, of whose bytes those of hidden states are told.
    hidden, small = 4 * TOKENS * 64 * 4, 4 * TOKENS * RANK * 4
    found = Counter((c.kind, c.result_bytes // hidden) for c in moved if c.axes == ("tensor",))
    if sequence_parallel:
        # No more than without adapters, which are 15 and 10: the embedding needs no gradient.
        assert found["all-gather", 1] == 13
        scattered = Counter(c.result_bytes for c in moved if c.kind == "reduce-scatter")
        assert scattered == {hidden // 4: 9, small // 4: 4}
    else:
        assert found["all-reduce", 1] == 9 and max(n for _, n in found) == 1
    # Only adapters get gradients, equal to those of eager torch.
    right_loss = loss_of(right, *given)
    right_loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), right_loss.detach(), rtol=1e-5, atol=1e-6)
    assert len(trained) == 2 * 7 * 2
    for (name, p), q in zip(right.named_parameters(), ours.parameters()):
        assert (q.grad is None) == (p.grad is None) == ("lora_" not in name), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-6)


def test_a_seed_draws_the_same_adapters_on_every_device() -> None:
    found = []
    for device in ("cpu", "xla"):
        model = build_model(PRESETS["debug"], vocab_size=512, positions=TOKENS).to(device)
        lora.add(model, rank=3, alpha=0.0, seed=5)
        found.append({n: p.detach().cpu() for n, p in model.named_parameters() if "lora_" in n})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 28
    assert all(torch.equal(a, found[1][name]) for name, a in found[0].items())
    assert all(bool(a.any()) == ("lora_A" in name) for name, a in found[0].items())


def test_peft_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(KnobError, match=r"--lora needs the package peft.*pip install peft"):
        lora.add(None, rank=1, alpha=0.0, seed=0)


@pytest.mark.slow
def test_the_sample_of_the_readme_learns(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands in eager torch, whose losses those of the sample's mesh are."""
    root = Path(__file__).parents[3]
    page = (root / "examples/llama_tp/README.md").read_text()
    (sample,) = re.findall(r"```\n(python -m [^`]*--lora 4[^`]*)```", page)
    sample = sample.replace("--devices 8 --mesh fsdp=2,tensor=4", "--device cpu")
    sample = sample.replace("--sequence-parallel --loss-parallel", f"--results {tmp_path}/results")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()  # in place of this project's documents, which change
    lines = (f"{i} times {j} is {i * j}" for i in range(100) for j in range(100))
    (tmp_path / "docs/text.md").write_text("\n".join(lines))
    first, second = sample.replace("\\\n", " ").splitlines()
    for line in (f"{first} --device cpu", second):
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", "examples.llama_tp.train"]
        assert main([*words[3:], "--cache-dir", str(base / "cache"), "--no-progress"]) == 0
    losses = json.loads((tmp_path / "results").read_text())["losses"]
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.1
