"""Commands read their options before they import a framework, which takes seconds."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

COMMANDS = {
    "examples.gpt2.train": ["--steps", "0"],
    "examples.llama_tp.train": ["--adapters", "out"],
    "examples.resnet_spatial.train": ["--label-smoothing", "2"],
    "examples.minimal": ["--steps", "many"],
    "examples.llama_serving.serve": ["--model", "/", "--slots", "0"],
    "examples.llama_tp.serve": ["--model", "/", "--slots", "0"],
    "spmd_core.checkpoint": ["show", "folder", "--step", "last"],
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


def test_an_import_takes_torch_and_jax_and_not_what_programs_may_never_use():
    """`import spmd_core` adds 0.3 s to them; each of these adds as much. It starts no device."""
    slow = (
        *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
        *("torch._dynamo", "torch._inductor", "jax.experimental.pallas", "orbax", "tensorstore"),
        *("transformers", "safetensors", "tqdm", "rich", "importlib.metadata"),
    )
    program = "import torch, jax, sys; before = {*sys.modules}; import spmd_core"
    program += f"\nprint(sorted({{*{slow!r}}} & {{*sys.modules}} - before))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        # Were a device started, also at the end of the process, there would be an error.
        env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry), "PJRT_DEVICE": "none"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


# What another file starts, and no user.
CHILDREN = {
    "benchmarks/published/speed.py",
    "packages/spmd-core/src/spmd_core/planner/compiler.py",
}
# They look at the words that started Python: see above.
LOOK_AT_PYTHON = {
    "packages/spmd-core/src/spmd_core/checkpoint/__main__.py",
    "packages/spmd-core/src/spmd_core/plan.py",
}
# Runs each command in this process, up to the end of its argument parser.
RUN_ALL = """
import contextlib, io, json, runpy, sys
HEAVY = {"torch", "jax", "jaxlib", "spmd_core", "transformers", "torchvision"}
found, path = {}, list(sys.path)
for file, module in json.loads(sys.argv[1]):
    for option in ("--help", "--no-such-option"):
        sys.argv, code, out = [file, option], None, io.StringIO()
        sys.path[:] = [file.rpartition("/")[0], *path]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                if module:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(file, run_name="__main__")
            except SystemExit as end:
                code = end.code
            except BaseException as error:
                code = repr(error)
        heavy = sorted(HEAVY & {name.partition(".")[0] for name in sys.modules})
        found[f"{file} {option}"] = [code, "usage: " in out.getvalue(), heavy]
        if heavy:
            break
    if heavy:
        break
print(json.dumps(found))
"""


def commands():
    """The files with an `if __name__ == "__main__"`, and the names of those that are modules."""
    for folder in ("benchmarks", "examples", "scripts", "packages"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "/tests/" in name or name in CHILDREN | LOOK_AT_PYTHON:
                continue
            if any(
                isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
                for node in ast.parse(path.read_text()).body
            ):
                is_module = (path.parent / "__init__.py").exists() or name == "scripts/ops_page.py"
                module = name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
                yield str(path), module if is_module else None


def in_child(code, given):
    """What a program prints as JSON, in a process that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        env={"PYTHONPATH": ":".join([str(ROOT), *(entry for entry in sys.path if entry)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_command_imports_a_framework_before_its_options_are_read():
    given = list(commands())
    assert len(given) > 50
    found = in_child(RUN_ALL, given)
    wrong = {
        command: result
        for command, result in found.items()
        if result != [0 if command.endswith("--help") else 2, True, []]
    }
    assert not wrong
    assert len(found) == 2 * len(given)


# Runs each command in this process with wrong numbers, with the frameworks' imports refused.
RUN_NUMBERS = """
import argparse, contextlib, io, json, runpy, sys
HEAVY = {"torch", "jax", "jaxlib", "spmd_core", "transformers", "torchvision"}

class Ended(BaseException): pass

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise Ended(f"imports {name}")

def run(file, module, words):
    sys.argv, out = [file, *words], io.StringIO()
    sys.path[:] = [file.rpartition("/")[0], *path]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            return end.code, out.getvalue()
        except Ended as end:
            return end.args[0], out.getvalue()
        except BaseException as error:
            return repr(error), out.getvalue()
    return None, out.getvalue()

def is_number(action):
    try:
        return isinstance(action.type("1"), (int, float)) and action.choices is None
    except Exception:
        return False

def noted(parser, *args, **kwargs):
    raise Ended([a.option_strings[-1] for a in parser._actions if a.type and is_number(a)])

sys.meta_path.insert(0, Refusing())
found, path, parse_args = {}, list(sys.path), argparse.ArgumentParser.parse_args
for file, module, given in json.loads(sys.argv[1]):
    argparse.ArgumentParser.parse_args = noted
    options, _ = run(file, module, given)
    argparse.ArgumentParser.parse_args = parse_args
    for option in options:
        for number in ("-1", "nan", "many"):
            code, said = run(file, module, [*given, f"{option}={number}"])
            if code != 2 or number not in said.splitlines()[-1]:
                found[f"{file} {option}={number}"] = [code, said[-200:]]
    found[file] = len(options)
print(json.dumps(found))
"""
# Of the learning rate at the end, where a negative one stands for a tenth of the peak.
TAKEN = tuple(f"{recipe}.py --min-lr=-1" for recipe in ("train", "comparison"))


def test_every_command_refuses_wrong_numbers_before_it_imports_a_framework():
    model = {"examples.llama_serving.serve", "examples.llama_tp.serve"}
    given = [(f, m, ["--model", "/"] if m in model else []) for f, m in commands()]
    found = in_child(RUN_NUMBERS, given)
    numbers = [found.pop(file) for file, _, _ in given]
    assert not {command: how for command, how in found.items() if not command.endswith(TAKEN)}
    assert sum(numbers) > 150
