"""The migration guide: its samples run; names in the reference's tables exist."""

import importlib
import os
import re
import sys
from pathlib import Path

import fresh
import pytest

import spmd_core as spmd
import torch_xla.core.xla_model
import torch_xla.runtime
from torch_xla import _environment

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "guides/torch_xla.md").read_text()
PAGE = (DOCS / "reference/torch_xla.md").read_text()
MODULES = {
    "torch_xla.distributed.spmd": "torch_xla.distributed.spmd",
    "torch_xla.runtime": "torch_xla.runtime",
    "torch_xla": "torch_xla",
    "torch_xla.core.xla_model": "torch_xla.core.xla_model",
    "other modules": "torch_xla",
    "private names": "torch_xla",
}


@pytest.mark.slow
def test_samples():
    samples = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(samples) == 6
    # One process for all: its devices are chosen before the first sample.
    count = spmd.global_runtime_device_count()
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CPU_NUM_DEVICES": str(count),
    }
    # torch.compile imports inductor, which decorates methods for torch.jit.
    ignored = (
        "import warnings; warnings.filterwarnings('ignore', '.*torch.jit')\n"
        "warnings.filterwarnings('ignore', 'Guards may run slower on Python 3.13.0')"
    )
    program = "\n".join(
        [ignored, f"import spmd_core; spmd_core.simulate({count})"]
        # In the names of the program, where Dynamo of torch 2.11 looks for a function's globals.
        + [f"exec({code!r})" for code in samples]
    )
    ran = fresh.run(["-W", "error", "-c", program], variables)
    assert ran.returncode == 0, ran.stderr[-2000:]


def rows():
    section = ""
    for line in PAGE.split("## Names")[1].split("## Environment variables")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] in ("torch_xla", "---"):
            continue
        if cells[0].startswith("**"):
            section = MODULES[cells[0].strip("*`")]
        else:
            yield section, cells[0], cells[1]


def exists(section, name):
    parts = (name if name.startswith("torch") else f"{section}.{name}").split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[n:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize(("section", "names", "state"), list(rows()))
def test_names_are_where_the_page_says(section, names, state):
    found, module = [], section
    for name in re.findall(r"`([^`]+)`", names):
        if (
            name.startswith(".")
            or "(" in name
            or '"' in name
            or name in ("openxla", "torch.compile", "_bucketized")
        ):
            continue
        if name.count(".") and not name.startswith("torch") and section == "torch_xla":
            module = f"torch_xla.{name.rpartition('.')[0]}"  # the next names are in this module
            found.append(exists("torch_xla", name))
        else:
            beside = (
                exists(module, name)
                or exists(section, name)
                or exists("torch.ops.xla", name)
                or exists("torch_xla.distributed.spmd.debugging", name)
            )
            found.append(beside)
    assert all(found) if "not here" not in state else not any(found), (names, found)


def test_the_check_of_names_can_fail():
    assert exists("torch_xla.runtime", "use_spmd") and exists(
        "torch_xla", "torch.ops.xla.aot_mark_sharding"
    )
    assert not exists("torch_xla.runtime", "nonsense") and not exists(
        "torch_xla", "experimental.custom_kernel"
    )


def test_variables_that_are_warned_of_are_listed_so():
    warned = [line for line in PAGE.splitlines() if "| a warning" in line]
    assert sorted(
        name for line in warned for name in re.findall(r"`([A-Z_0-9]+)`", line.split("|")[1])
    ) == sorted(_environment._WITHOUT_EFFECT)


def test_whole_modules_are_described():
    for module in (torch_xla.runtime, torch_xla.core.xla_model):
        names = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        missing = {
            "device",
            "set_replication",
            "get_ordinal",
            "get_local_ordinal",
            "xrt_world_size",
            "check_view_sharing",
            "is_xla_tensor",
        }
        missing |= {
            "get_xla_supported_devices",
            "xla_real_devices",
            "xla_device_hw",
            "xla_device_kind",
            "xla_replication_devices",
        }
        assert [name for name in names if f"`{name}`" not in PAGE and name not in missing] == []
