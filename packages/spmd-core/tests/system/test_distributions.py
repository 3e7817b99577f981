"""What `pip install` of the packages gives: metadata, console scripts, extras, files of wheels."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import spmd_core as spmd
from spmd_core import command_line

ROOT = Path(__file__).parents[4]
PACKAGES = ("spmd-core", "spmd-data", "torch-xla-compat")


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata(package):
    folder, found = ROOT / "packages" / package, project(package)
    assert found["authors"] == [{"name": "The PyTorch SPMD authors"}]
    assert found["license"] == "Apache-2.0" and found["license-files"] == ["LICENSE"]
    # The build reads no file outside of its folder.
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / found["readme"]).is_file() and found["requires-python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13)} <= {
        *found["classifiers"]
    }
    assert [*folder.glob("src/*/py.typed")]
    if package != "spmd-core":
        assert found["version"] == spmd.__version__


def test_the_version_has_one_place():
    assert "version" not in project("spmd-core")
    places = [
        path
        for path in (ROOT / "packages/spmd-core/src").rglob("*.py")
        if f'"{spmd.__version__}"' in path.read_text()
    ]
    assert [path.name for path in places] == ["version.py"]


def test_extras_are_named_by_task():
    assert {"tpu", "cuda", "checkpoint", "serve", "docs"} <= {
        *project("spmd-core")["optional-dependencies"]
    }


@pytest.mark.parametrize("name", project("spmd-core")["scripts"])
def test_console_scripts_help_at_once(name):
    """As pip's wrapper runs them; `--help` imports no framework."""
    module, _, function = project("spmd-core")["scripts"][name].partition(":")
    program = (
        f"import sys\nsys.argv = ['/venv/bin/{name}', '--help']\n"
        f"from {module} import {function}\nsys.exit({function}())"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name} ")
    assert "torch" not in {line.split()[-1] for line in done.stderr.splitlines()}
    assert name == "spmd-launch" or name in command_line.SCRIPTS


def test_the_release_script_says_what_it_does_and_refuses_other_options():
    script = ROOT / "scripts" / "release.sh"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "It uploads nothing." in done.stdout and "--no-tag" in done.stdout
    assert "set -euo" not in done.stdout
    done = subprocess.run([script, "--upload"], capture_output=True, text=True)
    assert (
        done.returncode == 2 and "no option --upload; see scripts/release.sh --help" in done.stderr
    )


@pytest.mark.exhaustive
@pytest.mark.one_device
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_has_the_package_and_no_tests(package, tmp_path):
    # Of a copy, as setuptools leaves a folder beside the sources.
    sources = shutil.copytree(
        ROOT / "packages" / package,
        tmp_path / "source",
        ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"),
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "-w", tmp_path, sources),
        ],
        check=True,
        timeout=300,
        env={**os.environ, "PIP_NO_INPUT": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "test" in name.split("/")[0] or "/tests/" in name]
    assert [name for name in names if name.endswith("/py.typed")]
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    expected = {p.relative_to(sources / "src").as_posix() for p in (sources / "src").rglob("*.py")}
    assert expected <= {*names}
