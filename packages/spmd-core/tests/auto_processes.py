"""What each of two processes does in `auto/test_searches.py`, and one process to compare.

`python auto_processes.py FOLDER PORT PROCESS` joins the other, trains a model whose shardings are
found, and writes what it saw to `FOLDER/PROCESS.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from auto_steps import losses, training, words

import spmd_core as spmd
from spmd_core.auto import mode, searches
from spmd_core.errors import AutoShardingError, ProcessError

NUM_PROCESSES, DEVICES = 2, 4


def train(batch_size: int = 8) -> dict[str, Any]:
    """Losses, the partition spec of each parameter, and how often this process searched."""
    decide, calls = searches.decide, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return decide(*args, **options)

    searches.decide = counted
    try:
        model, batch = words(batch=batch_size)
        spmd.use_spmd(auto=True)
        own = training(model.to("xla"), fused=True)
        found = losses(own.step, [x.to("xla") for x in batch])
    finally:
        searches.decide = decide
    specs = {name: str(p.partition_spec) for name, p in model.named_parameters()}
    return {"losses": found, "specs": specs, "searches": len(calls)}


def measured() -> dict[str, Any]:
    """The measured seconds of the candidates, the spec of each parameter, and the losses."""
    spmd.use_spmd()
    model, batch = words()
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    mesh = spmd.Mesh(range(NUM_PROCESSES * DEVICES), (NUM_PROCESSES * DEVICES,))
    plan = spmd.auto_shard(own.step, *inputs, mesh=mesh, candidates=2, objective="measured")
    return {
        "seconds": [x.measured_s for x in plan.tried],
        "specs": {x.name: str(x.spec) for x in plan.parameters},
        "losses": losses(own.step, inputs),
    }


def said(batch_size: int) -> str:
    """The error of a training."""
    try:
        train(batch_size)
    except (AutoShardingError, ProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main(folder: Path, port: str, process: int) -> None:
    spmd.config.cache_dir = None
    mode._MOST_COMPILED = 1
    spmd.simulate(DEVICES)
    spmd.distributed.initialize(f"127.0.0.1:{port}", NUM_PROCESSES, process, timeout_s=120)
    found: dict[str, Any] = {"measured": measured(), "trained": train()}
    found["other steps"] = said(8 + process)
    if process == 0:

        def failing(*args: Any, **options: Any) -> Any:
            raise AutoShardingError("nothing fits")

        searches.decide = failing
    found["no shardings"] = said(16)
    (folder / f"{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
