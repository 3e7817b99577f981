"""The server's command: what cannot work is said in a line, and a run from start to Ctrl-C."""

import dataclasses
import os
import re
import signal
from pathlib import Path

import fresh
import httpx2
import pytest
from tiers import exhaustive
from transformers import LlamaConfig

from examples.llama_serving.config import KEY_VARIABLE, ServeConfig, checked, config_from
from examples.llama_serving.serve import access_of, check_public, main, parsed_mesh, slot_length
from examples.llama_serving.server import listening_socket
from examples.llama_serving.tests.tiny import save_tiny_model
from examples.training.knobs import KnobError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, kv_heads=2)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model names the folder of the model; got none. Add for instance --model llama/."),
        (["--model", "/missing"], "--model names the folder of the model; '/missing' is no folder"),
        (["--model", "/"], "got /, which lacks config.json and *.safetensors"),
        (["--model", "/", "--slots", "0"], "--slots must be at least 1; got 0"),
        (["--model", "/", "--grace-s", "-1"], "--grace-s must be at least 0; got -1.0"),
        (["--model", "/", "--devices", "8"], "got --devices 8 and no --mesh. Add for instance"),
        (["--host", ""], "--host names an address of this machine; got an empty one. Leave it out"),
        (["--allow-host", "http://a.example"], "a host's name alone, as in llama.example; got 'ht"),
        (["--allow-host", "a.example:80"], "got 'a.example:80'. Leave out a scheme, a port and a"),
        (["--api-key", "a", "--without-key"], "got a key in --api-key too. Leave one of them out."),
        (
            ["--mesh", "data=2", "--devices", "2"],
            "over one axis, tensor; got 'data=2'. Pass for in",
        ),
        (["--mesh", "tensor=3", "--devices", "2"], "which takes 3, and 2 CPU devices. Pass --devi"),
        (["--max-length", "129"], "at most the model's positions; got 129 for 128. Pass at most"),
        (["--max-length", "1"], "--max-length has room for a prompt and its answer; got 1"),
        (["--mesh", "data=1"], "a server splits over one axis, tensor; got 'data=1'"),
        (["--mesh", "tensor=7"], "must multiply to the number of devices"),
        (
            ["--host", "0.0.0.0", "--port", "0"],
            "Set the variable LLAMA_API_KEY, or pass --without",
        ),
        (
            ["--api-key", "a b"],
            "of ASCII's letters, digits and signs, without spaces; got one",
        ),
        (["--allow-origin", "chat.example"], "a scheme and a host, as browsers send them, or *; g"),
        (["--connections", "0"], "--connections must be at least 1; got 0"),
        (["--host", "192.0.2.1"], "--host and --port name a free address of this machine; got 192"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    arguments: list[str],
    message: str,
    folder: str,
    num_devices: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "data=1" in arguments:
        arguments = ["--mesh", f"data={num_devices}"]
        message = message.replace("data=1", arguments[1])
    model = [] if not arguments or "--model" in arguments else ["--model", folder]
    assert main([*model, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ")
    assert captured.out == ""


def test_a_mesh_must_divide_the_heads(num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the numbers are those of 8 devices")
    config = LlamaConfig(hidden_size=96, num_attention_heads=12)
    message = "tensor=8 for the 12 heads of this model. Pass one of tensor=1, 2, 3, 4, 6, 12, or"
    with pytest.raises(KnobError, match=message):
        parsed_mesh("tensor=8", config)


def test_a_slot_has_the_models_positions_and_not_too_many() -> None:
    assert slot_length(0, LlamaConfig(max_position_embeddings=512)) == 512
    assert slot_length(0, LlamaConfig(max_position_embeddings=131072)) == 2048
    assert slot_length(100, LlamaConfig(max_position_embeddings=512)) == 100


def test_a_port_that_is_taken(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--model", folder, "--port", port]) == 2
    assert f"got 127.0.0.1 and {port}: " in capsys.readouterr().err


def test_help_has_a_line_for_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_from(["--help"])
    out = capsys.readouterr().out
    names = [field.name for field in dataclasses.fields(ServeConfig)]
    assert all(f"--{name.replace('_', '-')}" in out for name in names)


def test_a_public_server_has_a_key_or_is_meant_to_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    public = ServeConfig(host="0.0.0.0")
    with pytest.raises(KnobError, match=r"--host 0.0.0.0 lets other machines ask"):
        check_public(public, access_of(public), local=False)
    check_public(public, access_of(public), local=True)
    meant = dataclasses.replace(public, without_key=True)
    check_public(meant, access_of(meant), local=False)
    monkeypatch.setenv(KEY_VARIABLE, "key")
    check_public(public, access_of(public), local=False)
    assert access_of(public).api_key == "key"
    assert access_of(dataclasses.replace(public, api_key="other")).api_key == "other"


def test_an_origin_is_a_scheme_and_a_host() -> None:
    for origin in ("https://chat.example", "http://localhost:3000", "vscode-webview://abc", "*"):
        checked(ServeConfig(model="/", allow_origin=(origin,)))
    for origin in ("chat.example", "https://chat.example/", "", "https://", "https://[", "null"):
        with pytest.raises(KnobError, match="without a path"):
            checked(ServeConfig(model="/", allow_origin=(origin,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "answered"),
        exhaustive(signal.SIGTERM, "serving"),
        exhaustive(signal.SIGTERM, "compiling"),
        exhaustive(signal.SIGINT, "loading"),
    ],
)
def test_a_server_runs_until_it_is_told_to_end(
    number: signal.Signals, moment: str, folder: str
) -> None:
    command = [
        "-m",
        "examples.llama_serving.serve",
        "--model",
        folder,
        "--port",
        "0",
    ]
    command += ["--devices", "2", "--mesh", "tensor=2", "--max-length", "64", "--name", "little"]
    process = fresh.Process(command, os.environ, folder=ROOT)
    try:
        said = process.until(
            lambda said: any(line.startswith(("serving", moment)) for line in said.splitlines())
        )
        if moment == "answered":
            check_answers(said.splitlines(keepends=True))
        os.kill(process.pid, number)
        code = process.wait(60)
    finally:
        out, err = process.end()
    assert out.endswith("ended\n") and "Traceback" not in err
    assert code == (130 if number == signal.SIGINT else 0)


def check_answers(said: list[str]) -> None:
    """Checks what a server prints until it serves, and that it answers."""
    assert [line for line in said if "compiling" in line] == [
        "compiling: 1 prompt of up to 32 tokens\n",
        "compiling: 2 prompts of up to 32 tokens\n",
        "compiling: 1 prompt of up to 64 tokens\n",
        "compiling: a token of 16 slots\n",
    ]
    (url,) = re.findall(r"^serving little at (http://127.0.0.1:\d+); Ctrl-C", said[-1])
    asked = {"prompt": "the", "max_tokens": 4, "model": "little"}
    answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200
