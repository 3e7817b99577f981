"""A PJRT plugin that jax loads by the path of its library runs a sharded step.

jaxlib's wheels have none: `GetPjrtApi` is in no library of them. Name one by SPMD_TEST_PJRT_PLUGIN.
"""

import json
import os
from pathlib import Path

import fresh
import pytest

PLUGIN = os.environ.get("SPMD_TEST_PJRT_PLUGIN")
PROGRAM = Path(__file__).parents[1] / "plugin_program.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PLUGIN, reason="needs a plugin: SPMD_TEST_PJRT_PLUGIN=/path/to/pjrt_plugin.so"
    ),
]


def test_a_sharded_step_runs_on_the_plugins_devices(tmp_path):
    # A plugin reads XLA's flags too, and ends the process at one that its XLA does not have.
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"SPMD_CACHE_DIR": str(tmp_path)}
    done = fresh.run([PROGRAM, PLUGIN], variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("PJRT C API")  # jaxlib's own client calls itself "cpu"
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-4)
    assert found["taken_over_bytes"] > 0 and found["peak_bytes"] > 0
    if found["devices"] > 1:
        assert {"all-gather", "all-reduce"} <= set(found["collectives"])
    assert [*tmp_path.iterdir()]  # its executables are kept
