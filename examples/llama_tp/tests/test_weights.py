"""Models from and to folders of Hugging Face's: transformers' values, and what cannot work."""

import json
import os
import re
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import spmd_core as spmd
from examples.llama_serving import loading
from examples.llama_tp import shardings, weights
from examples.llama_tp.config import SMOKE, TrainConfig
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS
from examples.llama_tp.resolve import with_defaults
from examples.llama_tp.train import main, run
from examples.training.knobs import KnobError
from examples.training.resume import SaveError
from examples.training.text import TextData, load_text
from spmd_core.auto import registration

SHORT = {"steps": 3, "eval_every": 0, "eval_batches": 0, "progress": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    folder = tmp_path_factory.mktemp("text")
    source = Path(__file__).read_text() * 8
    (folder / "text.txt").write_text(source)
    return load_text(
        [str(folder / "text.txt")], vocab_size=400, seq=64, cache_dir=str(folder / "cache")
    )


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory, text: TextData) -> Path:
    """As a model of the hub: bfloat16, in parts, with all that a Llama's configuration has."""
    folder = tmp_path_factory.mktemp("model") / "little-llama"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=416,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=128,
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 1],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    text.tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def smoke(downloaded: Path, **knobs: Any) -> TrainConfig:
    values = {**SMOKE, **SHORT, "weights": str(downloaded), "max_mb": 0.2, **knobs}
    return TrainConfig(**{"cache_dir": str(downloaded.parent / "cache"), **values})


def mesh_of(num_devices: int) -> str:
    by = 4 if num_devices == 8 else num_devices
    return "" if num_devices == 1 else f"fsdp={num_devices // by},tensor={by}"


@pytest.mark.one_device
def test_a_folder_is_the_model_that_transformers_reads(downloaded: Path) -> None:
    right = LlamaForCausalLM.from_pretrained(downloaded, dtype=torch.float32).eval()
    with torch.device("xla"):
        ours = LlamaForCausalLM(weights.model_config(str(downloaded))).eval()
    spmd.load_safetensors(ours, downloaded)
    tokens = torch.randint(416, (2, 100))
    with torch.no_grad():
        expected, found = right(tokens).logits, ours(tokens.to("xla")).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive  # test_lora.py trains from a folder
def test_training_goes_on_from_a_folder_on_any_mesh(
    downloaded: Path, num_devices: int, tmp_path: Path
) -> None:
    expected = run(smoke(downloaded, device="cpu"))
    parallel = {"sequence_parallel": num_devices > 1, "loss_parallel": num_devices > 1}
    report = run(
        smoke(downloaded, mesh=mesh_of(num_devices), export=str(tmp_path / "out"), **parallel)
    )
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    assert report.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert report.num_params == expected.num_params
    # What was written begins where training ended.
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.rope_parameters["rope_type"] == "llama3" and again.config.use_cache
    assert again.lm_head.weight is again.model.embed_tokens.weight
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (downloaded / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("finding_a_mesh")
def test_training_goes_on_from_a_folder_on_a_mesh_that_is_found(
    downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"prompt": "def main(", "new_tokens": 5}
    expected = run(smoke(downloaded, device="cpu", **said))
    right = capsys.readouterr().out
    report = run(smoke(downloaded, mesh="auto", **said))
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    assert report.mesh and not registration.is_automatic()  # after the steps
    assert capsys.readouterr().out.endswith(right[right.index("def main(") :])


def test_the_folder_of_a_runs_checkpoints_is_a_model(
    downloaded: Path, tmp_path: Path, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    knobs = {"device": "cpu", "checkpoint": str(folder), "steps": 2}
    run(smoke(downloaded, **knobs, export=str(tmp_path / "out")))
    right = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        config = loading.read_config(folder)
        mesh = spmd.parse_mesh(f"tensor={2 if num_devices > 1 else 1}", min(num_devices, 2))
        model = loading.load_model(folder, config, dtype=dtype, mesh=mesh)  # of the server
        assert len(loading.read_tokenizer(folder, config)) == 400
        found = model.state_dict()
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name].cpu(), right[name].to(dtype)) for name in right)
    # A run that starts from there, with the sizes, the tokenizer and the weights.
    given = {"device": "cpu", "steps": 1, "eval_batches": 0}
    assert run(smoke(folder, **given)).losses == run(smoke(tmp_path / "out", **given)).losses
    # Another model.
    values = json.loads((folder / "config.json").read_text()) | {"hidden_size": 40}
    (folder / "config.json").write_text(json.dumps(values))
    assert main(["--smoke", "--device", "cpu", "--weights", str(folder), "--seq", "64"]) == 2
    message = "another shape: model.model.embed_tokens.weight, [416, 48] for [416, 40]"
    assert message in capsys.readouterr().err


CHILD = """
import json, sys
# A torchvision that is built for another torch fails at import, without this project too.
for package in ("spmd_core", "jax", "examples", "torchvision"):
    sys.modules[package] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out, text = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
with torch.no_grad():
    torch.save({"ids": ids, "logits": model(ids).logits, "text": tokenizer.decode(ids[0]),
                "end": tokenizer.eos_token_id}, out)
"""


def test_transformers_alone_opens_an_export(
    tmp_path: Path, text: TextData, num_devices: int
) -> None:
    torch.manual_seed(0)
    spmd.use_spmd()
    model = build_model(PRESETS["debug"], vocab_size=512, positions=64).to("xla")
    mesh = spmd.parse_mesh(mesh_of(num_devices) or "tensor=1", num_devices)
    shardings.parallelize(model, mesh, sequence_parallel=False, loss_parallel=False)
    weights.export(model, text, str(tmp_path / "out"), source="")
    sample = "def f(x):\n    return  x ,'é' # done"
    words = ["-c", CHILD, tmp_path / "out", tmp_path / "o.pt", sample]
    done = fresh.run(words, os.environ, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "o.pt")
    assert found["text"] == sample and found["end"] == 0
    assert found["ids"][0].tolist() == text.tokenizer.encode(sample).ids
    with torch.no_grad():
        right = model(found["ids"].to("xla")).logits
    torch.testing.assert_close(right.cpu(), found["logits"], rtol=1e-4, atol=1e-5)


def test_a_tokenizer_has_a_cache_of_its_own(downloaded: Path, text: TextData) -> None:
    given = weights.tokenizer(str(downloaded))
    assert given.separator == 0
    source, cache_dir = [str(Path(__file__))], str(downloaded.parent / "cache2")
    settings: dict[str, Any] = {"seq": 16, "cache_dir": cache_dir, "vocab_size": 300}
    found, again = (load_text(source, given=given, **settings) for _ in range(2))
    assert not found.was_cached and again.was_cached
    assert not load_text(source, **settings).was_cached
    # The separator, and then the text without the tokens that a tokenizer may put around it.
    tokens = found.train_NT[0].tolist()
    assert tokens == [0, *given.tokenizer.encode(Path(__file__).read_text()).ids[:16]]


def test_the_token_between_documents(downloaded: Path, tmp_path: Path) -> None:
    values = json.loads((downloaded / "config.json").read_text())
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((downloaded / name).read_bytes())
    for begin, end, expected in ((7, 3, 7), (None, 3, 3), (None, [5, 6], 5)):
        values |= {"bos_token_id": begin, "eos_token_id": end}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert weights.tokenizer(str(tmp_path)).separator == expected
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": None}))
    with pytest.raises(KnobError, match="got neither bos_token_id nor eos_token_id"):
        weights.tokenizer(str(tmp_path))


def changed(folder: Path, target: Path, **values: Any) -> Path:
    """A copy of a folder with other values in its config.json."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "gpt2"},
            "takes a Llama with plain weights; got model_type 'gpt2'",
        ),
        ({"quantization_config": {}}, "got quantized weights"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number of at least 1"),
        ({"vocab_size": 399}, "got a tokenizer of 400 tokens and a table of 399 rows"),
        ({"max_position_embeddings": 32}, "got 64, and 32 in"),
        ({"hidden_size": 40}, "another shape: model.embed_tokens.weight, [416, 48] for [416, 40]"),
    ],
)
def test_folders_that_cannot_be_trained(
    values: dict[str, Any], message: str, downloaded: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = changed(downloaded, tmp_path / "changed", **values)
    arguments = ["--smoke", "--device", "cpu", "--max-mb", "0.2", "--no-progress", "--seq", "64"]
    arguments += ["--cache-dir", str(downloaded.parent / "cache"), "--weights", str(folder)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")


def test_files_that_are_missing(downloaded: Path, tmp_path: Path) -> None:
    with pytest.raises(KnobError, match=r"cannot be read: .* Name the folder of a downloaded"):
        with_defaults(TrainConfig(weights=str(tmp_path)))
    folder = changed(downloaded, tmp_path / "some")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(KnobError, match="needs a tokenizer that the library tokenizers reads"):
        weights.tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(KnobError, match=r"without tokenizer\.json"):
        with_defaults(smoke(folder))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        KnobError, match=r"without model\.safetensors and tokenizer\.json\. Convert"
    ):
        with_defaults(smoke(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "debug"], "--weights brings the sizes of the model; got --preset debug too"),
        (["--preset=tiny"], "got --preset tiny too"),
        (["--vocab", "500"], "--weights brings its own vocabulary; got --vocab 500"),
        (["--adapters", "a"], "got 'a' and no --lora. Add for instance --lora 8"),
        (["--lora", "-1"], "--lora must be at least 0; got -1"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], message: str, downloaded: Path, capsys: Any
) -> None:
    assert main(["--smoke", "--device", "cpu", "--weights", str(downloaded), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_folders_to_write_to(downloaded: Path, tmp_path: Path, text: TextData) -> None:
    with pytest.raises(KnobError, match="--export writes to another folder than --weights reads"):
        with_defaults(smoke(downloaded, export=str(downloaded)))
    (tmp_path / "file").touch()
    with pytest.raises(KnobError, match=r"--adapters names a folder; got .*file', a file"):
        with_defaults(smoke(downloaded, lora=1, adapters=str(tmp_path / "file")))
    model = build_model(PRESETS["debug"], vocab_size=512, positions=64)
    target = str(tmp_path / "file" / "below")
    with pytest.raises(SaveError, match=re.escape("--export must be able to write the model")):
        weights.export(model, text, target, source="")


def test_the_sizes_of_a_folder(downloaded: Path) -> None:
    found = weights.sizes(str(downloaded), defaults=PRESETS["7B"])
    assert (found.name, found.width, found.num_heads, found.seq) == ("little-llama", 48, 8, 128)
    assert isinstance(Tokenizer.from_file(str(downloaded / "tokenizer.json")), Tokenizer)
