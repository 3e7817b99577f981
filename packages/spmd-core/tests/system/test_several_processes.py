"""Two processes on one host, with two emulated devices each, run one program together."""

import launched
import pytest
import torch

PROGRAM = """
import sys
import torch
import spmd_core as spmd
from spmd_core.runtime import processes, startup
from spmd_core.steps import closures, structures

folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
out = open(f"{folder}/said{rank}.txt", "w")


def say(*words):
    # Not to stdout, where the collectives' library writes lines into the middle of these.
    out.write(" ".join(map(str, words)) + "\\n")
    out.flush()


spmd.config.cache_dir = None
spmd.simulate(2)
startup.initialize(f"127.0.0.1:{port}", 2, rank, timeout_s=60)
spmd.use_spmd()
facts = [
    processes.process_index(),
    processes.process_count(),
    processes.local_process_count(),
    processes.host_index(),
    processes.is_master(),
    processes.is_master(local=True),
    processes.addressable_runtime_device_count(),
    spmd.global_runtime_device_count(),
    processes.get_master_ip(),
]
say("facts", *facts, *processes.real_devices())

mesh = spmd.Mesh(range(4), (4,), ("x",))
torch.manual_seed(0)
w = spmd.mark_sharding(torch.arange(12.0).reshape(6, 2).to("xla"), mesh, ("x",))
for number in range(2):
    w.mul_(2)
    closures.add_step_closure(lambda t, n: say("closure", n, t.sum().item()), args=(w, number))
    # Both are sharded, one by a mark, the other by the partitioner's choice.
    closures.add_step_closure(
        lambda t, u, n: say("read", n, t.sum().item(), u.sum().item()),
        args=(w, w + 1, number),
        run_async=True,
    )
    spmd.sync()
closures.wait_for_closures()
say("shards", [shard.unpadded_data.tolist() for shard in w.local_shards])
structures.save({"w": w, "tied": w}, f"{folder}/master.pt")
say("written", torch.load(f"{folder}/master.pt", weights_only=True)["w"].sum().item())
structures.save({"w": w}, f"{folder}/own{rank}.pt", master_only=False)
try:
    structures.save(w, f"{folder}/missing/master.pt")
except (spmd.errors.SpmdError, RuntimeError, OSError) as error:
    say("failed", isinstance(error, spmd.errors.SpmdError), error)
spmd.save_safetensors({"w": w, "v": w + 1}, f"{folder}/weights", max_shard_bytes=64)
v = spmd.mark_sharding(torch.zeros(6, 2, device="xla"), mesh, ("x",))
spmd.load_safetensors({"w": v, "v": torch.zeros(6, 2)}, f"{folder}/weights")
say("loaded", [shard.unpadded_data.tolist() for shard in v.local_shards])
try:
    spmd.save_safetensors({"w": w, "v": w + 1}, f"{folder}/master.pt/below", max_shard_bytes=64)
except (spmd.errors.SpmdError, OSError) as error:
    say("unsaved", isinstance(error, spmd.errors.SpmdError), error)
say("end")
"""


def outputs(folder):
    launched.succeed(
        2,
        lambda rank, port: ["-c", PROGRAM, folder, port, rank],
        env=lambda rank, port: {"PJRT_LOCAL_PROCESS_COUNT": 2},
    )
    return [(folder / f"said{rank}.txt").read_text().splitlines() for rank in range(2)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return folder, outputs(folder)


def starting_with(word, lines):
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def test_each_process_knows_its_place(lines):
    first, second = (starting_with("facts", out)[0] for out in lines[1])
    assert first == "0 2 2 0 True True 2 4 127.0.0.1 CPU:0 CPU:1"
    assert second == "1 2 2 0 False False 2 4 127.0.0.1 CPU:2 CPU:3"


def test_closures_run_in_each_process_with_the_whole_value(lines):
    for out in lines[1]:
        assert starting_with("closure", out) == ["0 132.0", "1 264.0"] and starting_with(
            "read", out
        ) == ["0 132.0 144.0", "1 264.0 276.0"]


def test_each_process_holds_its_own_shards(lines):
    rows = (torch.arange(12.0).reshape(6, 2) * 4).split(2)
    first, second = (starting_with("shards", out)[0] for out in lines[1])
    assert first == str([rows[0].tolist(), rows[1].tolist()]) and second == str(
        [rows[2].tolist(), []]
    )


def test_the_master_writes_the_whole_value_and_the_others_wait(lines):
    folder, both = lines
    for out in both:
        assert starting_with("written", out) == ["264.0"] and out[-1] == "end"
    read = torch.load(folder / "master.pt", weights_only=True)
    assert torch.equal(read["w"], torch.arange(12.0).reshape(6, 2) * 4) and torch.equal(
        read["tied"], read["w"]
    )
    assert all(
        torch.equal(torch.load(folder / f"own{rank}.pt", weights_only=True)["w"], read["w"])
        for rank in range(2)
    )


def test_a_file_that_the_master_cannot_write_fails_in_each_process(lines):
    first, second = (starting_with("failed", out)[0] for out in lines[1])
    assert first.startswith("False") and "missing" in first
    assert second.startswith(
        "True every process that writes must succeed; process [0] could not write its file"
    )


def test_weights_are_written_once_and_each_process_reads_its_shards(lines):
    for out in lines[1]:
        assert starting_with("loaded", out) == starting_with("shards", out)
    first, second = (starting_with("unsaved", out)[0] for out in lines[1])
    assert first.startswith("False weights must fit on the disk") and "master.pt/below" in first
    assert second.startswith("True every process that writes must succeed")
