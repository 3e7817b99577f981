"""What each of several processes does in `system/test_processes.py`, and one process to compare.

`python processes_program.py FOLDER PORT PROCESS PROCESSES DEVICES` joins the others, trains, and
writes what it found to `FOLDER/PROCESS.json`.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spmd_core as spmd
from spmd_core.sharding.sharding import Sharding

STEPS, ROWS, FEATURES = 3, 16, 32


def layouts(num_slices: int) -> dict[str, tuple[spmd.Mesh, Any, Any]]:
    """For each layout its mesh, the spec of a weight's dims, and the axes that split the batch."""
    return {
        "data": (spmd.Mesh(range(8), (8,), ("data",)), (None, None), "data"),
        "fsdp": (spmd.Mesh(range(8), (8,), ("fsdp",)), ("fsdp", None), "fsdp"),
        "fsdp x tensor": (
            spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor")),
            ("fsdp", "tensor"),
            "fsdp",
        ),
        # The batch's axis does not follow the processes, which hold the same parts.
        "tensor x data": (
            spmd.Mesh(range(8), (2, 4), ("tensor", "data")),
            ("tensor", None),
            "data",
        ),
        "hybrid": (
            spmd.HybridMesh((1, 8 // num_slices), (num_slices, 1), ("data", "fsdp")),
            ("fsdp", None),
            ("data", "fsdp"),
        ),
    }


def part(whole: torch.Tensor, spec: spmd.ShardingSpec) -> torch.Tensor:
    """This process's rows, found by the devices that hold them."""
    sharding = Sharding.of(spec.mesh, spec.partition_spec, whole.dim())
    own = [
        i
        for i, row in enumerate(spmd.distributed.device_attributes())
        if row["process_index"] == spmd.distributed.process_index()
    ]
    held = {
        (index[0].start, index[0].stop)
        for device, index in zip(spec.mesh.ids, sharding.indices(tuple(whole.shape)))
        if device in own
    }
    return torch.cat([whole[start:stop] for start, stop in sorted(held)])


def train(mesh: spmd.Mesh, weight_spec: Any, batch_axes: Any) -> list[float]:
    """Losses of some steps with AdamW and dropout, and then of an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64),
        nn.LayerNorm(64),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.Linear(64, FEATURES),
    ).to("xla")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, weight_spec[: p.dim()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spec = spmd.ShardingSpec(mesh, (batch_axes, None), minibatch=True)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = {name: torch.randn(ROWS, FEATURES, generator=data) for name in "xy"}
        batch = spmd.send_to_device({k: part(v, spec) for k, v in batch.items()}, spec)
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(batch["x"]).square().mean().item())
    return losses


def refusals(num_processes: int) -> list[str]:
    """Messages about parts that do not fit."""
    found = []
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    spec = spmd.ShardingSpec(mesh, ("data",), minibatch=True)
    local = 8 // num_processes
    wrong = [
        lambda: spmd.from_process_local(torch.ones(local + 1), spec),
        # Process 1 has twice as many rows, and another tensor.
        lambda: spmd.send_to_device(
            {
                "a": torch.ones(local),
                "b": torch.ones(local * (1 + (spmd.distributed.process_index() == 1))),
            },
            spec,
        ),
        lambda: spmd.mark_sharding(torch.ones(local, device="xla") + 1, spec),
    ]
    if not spmd.distributed.is_master():
        own = spmd.Mesh(range(local), (local,), ("data",))  # all in process 0
        wrong.append(
            lambda: spmd.from_process_local(
                torch.ones(local), spmd.ShardingSpec(own, ("data",), minibatch=True)
            )
        )
    for call in wrong:
        try:
            call()
            found.append("nothing was raised")
        except spmd.errors.SpmdError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def index_outside() -> list[str]:
    """What a read says after the last device alone had an index outside its dim, and the next."""
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    ids = spmd.mark_sharding(torch.arange(8).to("xla"), mesh, ("data",))
    found = torch.ones(7, 2, device="xla").index_select(0, ids * 1)
    said = []
    for _ in range(2):
        try:
            said.append(str(found.sum().item()))
        except IndexError as error:
            said.append(str(error))
    return said


def facts(folder: Path) -> dict[str, Any]:
    """What reads, prints, reports and files are in this process."""
    mesh = spmd.Mesh(range(8), (4, 2), ("x", "y"))
    whole = torch.arange(24.0).reshape(8, 3)
    w = spmd.mark_sharding(whole.to("xla"), mesh, ("x", None))
    doubled = w * 2
    rng = torch.rand(4, device="xla")
    found: dict[str, Any] = {
        "item": doubled.sum().item(),
        "print": str(doubled[:2]),
        "random": rng.tolist(),
        "full": spmd.to_cpu({"w": w})["w"].tolist(),
        "full_tensor": w.full_tensor().tolist(),
        "local": list(w.to_local().shape),
        "shards": [shard.unpadded_data.tolist() for shard in w.local_shards],
        "spec": w.sharding_spec,
    }
    said: list[float] = []
    spmd.add_step_closure(lambda t: said.append(t.sum().item()), args=(doubled,))
    pending = w + 1
    found["stablehlo"] = "stablehlo.add" in spmd.debugging.stablehlo(pending)
    found["hlo"] = "HloModule" in spmd.debugging.hlo(pending)
    spmd.sync()
    found["closure"] = said
    found["collectives"] = [c.kind for c in spmd.debugging.collectives()]
    found["recompile"] = "was compiled in" in str(spmd.debugging.explain_recompile())
    found["graph_hash"] = spmd.debugging.graph_hash(w + 3).hex()
    found["compiles"] = spmd.metrics.counter("compiles")
    found["programs"] = len(spmd.metrics.programs())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        spmd.debugging.visualize_tensor_sharding(w)
    found["picture"] = bool(out.getvalue())
    spmd.save({"w": w}, folder / "w.pt")
    found["saved"] = torch.load(folder / "w.pt", weights_only=True)["w"].tolist()
    return found


def main(folder: Path, port: str, process: int, processes: int, devices: int) -> None:
    spmd.simulate(devices)
    spmd.distributed.initialize(f"127.0.0.1:{port}", processes, process, timeout_s=120)
    spmd.use_spmd()
    found: dict[str, Any] = {"unseeded": torch.rand(2).tolist(), "facts": facts(folder)}
    found["losses"] = {
        name: train(*layout)
        for name, layout in layouts(processes).items()
        # Each process compiles for itself: of four, those in which some hold the same rows.
        if processes == 2 or name in ("fsdp x tensor", "hybrid")
    }
    found["refusals"] = refusals(processes)
    found["index_outside"] = index_outside()
    (folder / f"{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
