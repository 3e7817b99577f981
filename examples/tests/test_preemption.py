"""Each recipe ends at SIGTERM with its state saved and the code that asks for a new start."""

import os
import signal
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).parents[2]
# Those that train; test_train.py of GPT-2 has its own test.
RECIPES = {
    "resnet_spatial": ["examples.resnet_spatial.train"],
    "llama_tp": ["examples.llama_tp.train"],
    "lora": ["examples.llama_tp.train", "--lora", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_sigterm_saves_and_a_new_start_goes_on(recipe: str, tmp_path: Path) -> None:
    def command(steps: int) -> list[str]:
        module, *options = RECIPES[recipe]
        options += ["--smoke", "--no-progress", "--device", "cpu", "--eval-every", "0"]
        options += ["--steps", str(steps), "--checkpoint", str(tmp_path / "run")]
        return ["-W", "error", "-m", module, *options]

    paths = [str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = fresh.Process(command(1_000_000), environment, folder=ROOT)
    try:
        process.until(lambda said: "\nstep     2" in said, 120)
        os.kill(process.pid, signal.SIGTERM)
        code = process.wait(60)
    finally:
        said, errors = process.end()
    assert code == 75, said + errors
    (step,) = (int(path.name) for path in (tmp_path / "run").iterdir() if path.name.isdecimal())
    assert f"preempted: ending after step {step} of 1000000" in said
    again = fresh.run(command(step + 1), environment, folder=ROOT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resume after step {step} of {step + 1}" in again.stdout
