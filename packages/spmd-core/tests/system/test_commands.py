"""Commands read their options before they import a framework, which takes seconds."""

import subprocess
import sys

import pytest

COMMANDS = {
    "examples.gpt2.train": ["--steps", "0"],
    "examples.llama_tp.train": ["--adapters", "out"],
    "examples.resnet_spatial.train": ["--label-smoothing", "2"],
    "examples.llama_tp.serve": ["--model", "llama", "--slots", "0"],
    "spmd_core.plan": ["--topology", "v4-17", "--", "-m", "examples.gpt2.train"],
}
HEAVY = {"torch", "jax", "jaxlib", "transformers", "numpy", "torchvision", "tokenizers", "rich"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "code"), [(["--help"], 0), (["--stepz", "3"], 2), (None, 2)], ids=str
)
def test_help_and_wrong_options_import_no_framework(command, options, code):
    words = COMMANDS[command] if options is None else options
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", command, *words],
        env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = [
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    ]
    assert done.returncode == code, done.stderr
    assert "argparse" in imported
    assert not HEAVY & {name.partition(".")[0] for name in imported}
    if options is None:
        assert "error: " in done.stderr and "Traceback" not in done.stderr
    else:
        assert "usage: " in done.stdout + done.stderr
