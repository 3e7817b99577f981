"""Several processes on one host do what one process with as many devices does."""

import json
from functools import cache

import launched
import processes_program
import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() != 8, reason="compares with one process of 8 devices"
)
NAMES = ["data", "fsdp", "fsdp x tensor", "tensor x data", "hybrid"]  # of `layouts`


@pytest.fixture(scope="module", params=[2, exhaustive(4)])
def found(request, tmp_path_factory):
    """What each process found, by `processes_program`: one launch for all tests."""
    num_processes = request.param
    folder = tmp_path_factory.mktemp("processes")
    launched.succeed(
        num_processes,
        lambda rank, port: [
            *(processes_program.__file__, folder, port),
            *(rank, num_processes, 8 // num_processes),
        ],
    )
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(num_processes)]


@cache
def alone(name, num_slices):
    return processes_program.train(*processes_program.layouts(num_slices)[name])


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_process(found, name):
    if name not in found[0]["losses"]:
        pytest.skip("compared with two processes")
    for process in found:
        torch.testing.assert_close(
            process["losses"][name], alone(name, len(found)), rtol=1e-6, atol=1e-6
        )


def test_reads_reports_and_files_are_alike_in_each_process(found):
    each = [process["facts"] for process in found]
    whole = torch.arange(24.0).reshape(8, 3)
    for facts in each:
        assert facts["local"] == [2, 3] and facts["item"] == 552.0 and facts["closure"] == [552.0]
        assert facts["full"] == facts["full_tensor"] == facts["saved"] == whole.tolist()
        assert facts["print"] == str((whole * 2)[:2]).replace(")", ", device='xla:0')")
        assert facts["stablehlo"] and facts["hlo"] and facts["recompile"] and facts["picture"]
    alike = [{k: v for k, v in facts.items() if k != "shards"} for facts in each]
    assert all(facts == alike[0] for facts in alike)
    # Each of the devices' blocks is in its process.
    blocks = [block for facts in each for block in facts["shards"]]
    assert blocks == [whole[i : i + 2].tolist() for i in (0, 0, 2, 2, 4, 4, 6, 6)]


def test_random_numbers_are_those_of_process_0(found):
    assert all(process["unseeded"] == found[0]["unseeded"] for process in found)


def test_an_index_outside_is_told_by_each_process(found):
    for process in found:
        error, value = process["index_outside"]
        assert "aten::index_select -> float32[8, 2]" in error and "takes 0 to 6 " in error
        assert value == "16.0"


def test_parts_that_do_not_fit_are_refused_in_each_process(found):
    local = 8 // len(found)
    for i, process in enumerate(found):
        rows, apart, device, *elsewhere = process["refusals"]
        assert f"got size {local + 1} in dim 0" in rows and f"for {local} of 8 blocks" in rows
        others = ", ".join(str(p) for p in range(len(found)) if p != 1)
        assert (
            f"got from process {others}: tensor 1 float32[8] as ('data',); "
            "from process 1: tensor 1 float32[16] as ('data',)" in apart
        )
        assert "DeviceMismatchError" in device
        assert i == 0 or f"process {i} has none in Mesh" in elsewhere[0]
