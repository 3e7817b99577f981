"""Reads what one run of a recipe, a plan or a benchmark left behind, as samples of quantities."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Samples

REPORT = "report.json"
PLAN = "plan.json"
UNITS = {"M": 2**20, "G": 2**30}  # in the words of the TPU's compiler


def trained(folder: Path, seconds: float) -> Samples:
    """Of a recipe that was run with `--results {run}/report.json --log-dir {logs}`.

    step_s has a sample for each logged interval, without those in which something was compiled, and
    without the first two of the others: the step's program runs for the first time, and takes its
    memory, which reaches two intervals where losses are read late.
    """
    report = read_object(folder / REPORT)
    logs = Path(report["config"]["log_dir"]) / "metrics.jsonl"
    lines = [json.loads(line) for line in logs.read_text().splitlines()]
    steps = [line["speed/step_time_s"] for line in lines if "speed/step_time_s" in line]
    steps = steps[2:]
    if not steps:
        raise ValueError("a run must time a step after its program's first two; got none")
    unit = report["unit"]
    per_step = report["items_per_s"] * report["step_time_s"]
    found = {
        "step_s": steps,
        f"{unit}_per_s": [per_step / step for step in steps],
        "peak_bytes": [report["peak_bytes"]],
        "argument_bytes": [report["argument_bytes"]],
        "sent_bytes": [sum(c["moved_bytes"] for c in report["collectives"])],
        "peak_flops": [report["peak_flops"]],
        "last_loss": [report["losses"][-1]],
        "num_params": [report["num_params"]],
    }
    # FLOPs of a step by formula; how much of the peak they are is computed for all rows at once.
    for formula, share in report["mfu"].items():
        flops = share * report["peak_flops"] * report["num_devices"] * report["step_time_s"]
        found[f"{formula}_step_flops"] = [flops]
    return {name: values for name, values in found.items() if values != [None]}


def peer(folder: Path, seconds: float) -> Samples:
    """Of a peer that was run with `--results {run}/peer.json`: PyTorch without this package."""
    found = read_object(folder / "peer.json")
    steps = found["step_s"]
    samples = {"step_s": steps, "tokens_per_s": [found["tokens"] / step for step in steps]}
    if found.get("peak_bytes"):
        samples["peak_bytes"] = [found["peak_bytes"]]
    return samples


def planned(folder: Path, seconds: float) -> Samples:
    """Of a plan that was made with `--json {run}/plan.json`.

    A step that does not fit has no peak_bytes, and needed_bytes where the compiler says them.
    """
    plan = read_object(folder / PLAN)
    if plan["refusals"]:
        match = re.search(r"Used ([\d.]+)([MG]) of", " ".join(plan["refusals"]))
        needed = {"needed_bytes": [float(match[1]) * UNITS[match[2]]]} if match else {}
        return {"fits": [0.0], **needed}
    step = plan["step"]
    if not step:
        raise ValueError(f"a plan must have a step; got none: {plan['ended_by']}")
    found: Samples = {
        "fits": [1.0],
        "peak_bytes": [step["peak_bytes"]],
        "state_bytes": [step["state_bytes"]],
    }
    return found | {f"{part.replace(' ', '_')}_bytes": [n] for part, n in step["parts"].items()}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
