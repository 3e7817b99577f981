"""planner/command.py: the command line of plans."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

import spmd_core as spmd
from spmd_core.planner import command, search
from spmd_core.program import planned_program

SCRIPT = """
import argparse
import torch
from torch import nn
import spmd_core as spmd

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--read", action="store_true")
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()
if options.fail:
    raise SystemExit("error: it fails")
spmd.use_spmd()
model = nn.Linear(16, 16).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    loss = model(torch.randn(options.batch, 16).to("xla")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    spmd.sync()
    if options.read:
        print(loss.item())
print("the end")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def _main(num_devices, *words):
    return command.main(["--topology", f"cpu-{num_devices}", *words])


@pytest.mark.one_device
def test_a_script_is_planned_with_its_options(script, num_devices, tmp_path, capsys):
    out = tmp_path / "new" / "plan.json"
    argv = list(sys.argv)
    assert _main(num_devices, "--json", str(out), "--", "python", script, "--batch", "32") == 0
    assert sys.argv == argv
    printed = capsys.readouterr().out
    assert f"Plan for cpu-{num_devices}" in printed
    assert "the end" not in printed
    made = json.loads(out.read_text())
    assert (made["schema"], made["num_devices"], made["fits"]) == (2, num_devices, None)
    # A linear layer of 16 x 16 features, forward and the gradient of its weight.
    assert made["step"]["costs"]["model_flops"] == 2 * 2 * 32 * 16 * 16
    assert sum(made["step"]["parts"].values()) == made["step"]["peak_bytes"]
    assert made["step"]["buffers"][0]["bytes"] > 0


@pytest.mark.one_device
def test_a_module_is_planned(script, num_devices, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _main(num_devices, "--", "python3.11", "-m", "train", "--batch=4") == 0
    assert "Plan for" in capsys.readouterr().out


@pytest.mark.one_device
def test_a_read_shows_what_there_is_and_the_line(script, num_devices, capsys):
    assert _main(num_devices, "--", script, "--read") == 2
    printed = capsys.readouterr().out
    assert "The plan ended early" in printed
    assert "train.py:" in printed


@pytest.mark.one_device
def test_what_does_not_fit_is_exit_code_1(script, num_devices, capsys, monkeypatch):
    def refuse(graph, name, **options):
        raise spmd.errors.DeviceMemoryError("a program must fit")

    monkeypatch.setattr(planned_program, "build", refuse)
    assert _main(num_devices, "--", script) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "after --; got 'nothing'. Write for instance"),
        (["--", "bash", "x.sh"], "after --; got 'bash x.sh'"),
        (["--", "missing.py"], "'missing.py' is no file in"),
        (["--", "python", "-m", "examples.missing"], "Python finds no 'examples.missing' from"),
        (["--", "-m", "no_package.train"], "finds no 'no_package.train' from"),
    ],
)
def test_what_is_no_script(words, message, num_devices, capsys):
    assert _main(num_devices, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.one_device
def test_a_script_that_fails(script, num_devices, capsys):
    assert _main(num_devices, "--", script, "--fail") == 2
    assert "must not fail; it ended with 'error: it fails'" in capsys.readouterr().err


def test_an_unknown_topology(script, capsys):
    assert command.main(["--topology", "v4-17", "--", script]) == 2
    assert "Similar names: v4-16" in capsys.readouterr().err


@pytest.mark.one_device
def test_a_search(script, num_devices, tmp_path, capsys, monkeypatch):
    def planned(options, request, digest):
        return search.Outcome(
            options, {"fits": True, "peak_bytes": 5, "step": None, "found_mesh": ""}
        )

    monkeypatch.setattr(search, "_planned", planned)
    out = tmp_path / "search.json"
    words = ["--search", "batch", "--values", "batch=2;4", "--json", str(out)]
    words += ["--cache", str(tmp_path), "--", script]
    assert _main(num_devices, *words) == 0
    captured = capsys.readouterr()
    assert "[2/2] batch=4: fits" in captured.err
    assert "rates are modelled" in captured.out
    assert [row["options"] for row in json.loads(out.read_text())] == [
        {"batch": "2"},
        {"batch": "4"},
    ]


@pytest.mark.one_device
def test_an_interrupted_search_goes_on(script, num_devices, tmp_path, capsys, monkeypatch):
    ran = []

    def run(command, **options):
        ran.append(command)
        if len(ran) == 2:
            raise KeyboardInterrupt
        out = command[command.index("--json") + 1]
        Path(out).write_text(
            json.dumps({"fits": True, "peak_bytes": 5, "step": None, "found_mesh": ""})
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(search.subprocess, "run", run)
    words = ["--search", "batch", "--values", "batch=2;4", "--cache", str(tmp_path), "--", script]
    assert _main(num_devices, *words) == 130
    said = f"interrupted; finished plans are in {tmp_path}, and the same command goes on"
    assert said in capsys.readouterr().err
    assert _main(num_devices, *words) == 0
    assert len(ran) == 3

    def interrupted(script, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "plan", interrupted)  # of a script, without a search
    assert _main(num_devices, "--", script) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--search", "batch", "--values", "batch"],
            "got 'batch'. Write for instance --values 'remat=",
        ),
        (["--values", "batch=2;4"], "got 'batch=2;4' and no --search. Add --search batch."),
        (
            ["--search", "batch", "--code"],
            "cannot be combined with --code; got both. Leave out --co",
        ),
        (
            ["--search", "batch", "--steps", "5"],
            "combined with --steps; got both. Leave out --steps, or",
        ),
        (["--json", "/"], "--json names a file to write; got the folder '/'. Write for instance"),
    ],
)
def test_options_that_do_not_fit_together(words, message, script, num_devices, capsys):
    assert _main(num_devices, *words, "--", script) == 2
    assert message in capsys.readouterr().err


@pytest.mark.one_device
@pytest.mark.parametrize("name", ["--slices", "--steps"])
@pytest.mark.parametrize("number", ["0", "-1", "2.5", "nan", "many"])
def test_numbers_out_of_their_range(name, number, script, num_devices, capsys):
    with pytest.raises(SystemExit) as ended:
        _main(num_devices, f"{name}={number}", "--", script)
    assert ended.value.code == 2
    message = f"of at least 1; got {number!r}. Leave it out for the default"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_process(script, tmp_path):
    words = ["-m", "spmd_core.plan", "--topology", "cpu-16", "--", script]
    done = fresh.run(words, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "Plan for cpu-16: 16 devices" in done.stdout


@pytest.mark.slow
def test_plans_of_a_new_process_follow_each_other():
    code = (
        "import torch, spmd_core as spmd\n"
        "def f():\n"
        "    x = torch.ones(8).to('xla') + 1\n"
        "    spmd.sync()\n"
        "for name in ('cpu-8', 'cpu-1'):\n"
        "    print(spmd.plan(f, topology=name).topology.name)\n"
    )
    done = fresh.run(["-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.split() == ["cpu-8", "cpu-1"], done.stderr


def test_an_import_of_the_commands_module_gives_the_function():
    function = spmd.plan
    assert callable(function)
    assert importlib.import_module("spmd_core.plan") is function
    assert spmd.plan is function


@pytest.mark.slow
def test_an_end_by_sigterm_leaves_no_files(tmp_path):
    script = tmp_path / "train.py"
    # Short sleeps: a signal that comes just before one ends none.
    script.write_text("import time; print('ready', flush=True)\nwhile True: time.sleep(0.1)\n")
    words = ["-m", "spmd_core.plan", "--topology", "cpu-2", "--", "python", str(script)]
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = fresh.Process(words, {**os.environ, **environment})
    try:
        assert child.until(lambda said: said.endswith("\n")) == "ready\n"
        assert [*tmp_path.glob("spmd-plan-*")]
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(60) != 0
    finally:
        child.end()
    assert not [*tmp_path.glob("spmd-plan-*")]
