"""GPT-2 on packed documents: equal losses anywhere, exact resumes, every sequence exactly once."""

import hashlib
import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launched
import pytest
from tiers import exhaustive

from examples.gpt2 import data
from examples.gpt2.config import TrainConfig, with_defaults
from examples.gpt2.tests.test_train import SHORT, check_equal, smoke
from examples.gpt2.train import main, run
from examples.training.packed_text import PackedText

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all tests, so that the tokenizer is trained only once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of short documents, which fill some batches."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(300)]
    for number in range(60):
        text = " ".join(draw.choices(words, k=draw.randint(5, 160)))
        (folder / f"{number:02}.txt").write_text(text)
    return str(folder)


def config_of(cache_dir: str, texts: str, **knobs: Any) -> TrainConfig:
    return smoke(
        cache_dir, **{"data": (texts,), "max_mb": 0.0, "pack": True, "eval_batches": 1, **knobs}
    )


def packed(config: TrainConfig) -> PackedText:
    found = data.load(config)
    assert isinstance(found, PackedText)
    return found


def test_parts_of_a_batch_have_the_losses_of_the_whole(cache_dir: str, texts: str) -> None:
    """Though the parts have different numbers of targets, by padding and the documents' ends."""
    whole, parts = (
        run(config_of(cache_dir, texts, steps=3, accumulate=number)).losses for number in (1, 4)
    )
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_run_resumes_exactly_in_any_epoch(cache_dir: str, texts: str, tmp_path: Path) -> None:
    config = with_defaults(config_of(cache_dir, texts))
    per_epoch = len(packed(config).train) // config.batch
    steps = per_epoch + 3
    knobs = {"steps": steps, "eval_every": 0, "checkpoint": str(tmp_path), "keep": 0}
    whole = run(config_of(cache_dir, texts, save_every=1, **knobs))
    for place in (per_epoch + 1, per_epoch, 2):
        rest = run(config_of(cache_dir, texts, resume=str(place), **knobs))
        assert rest.losses == whole.losses[place:]


def test_packing_changes_the_losses(cache_dir: str, texts: str) -> None:
    packed = run(config_of(cache_dir, texts, steps=2)).losses
    plain = run(smoke(cache_dir, data=(texts,), max_mb=0.0, eval_batches=1, steps=2)).losses
    assert packed != plain


@pytest.mark.parametrize(
    ("strategy", "mesh", "taken"),
    [
        ("ddp", "data=2", 2),
        exhaustive("fsdp", "fsdp=2", 2),
        exhaustive("spmd", "data=2,fsdp=2,tensor=2", 8),
    ],
)
def test_meshes_have_the_losses_of_eager_torch(
    strategy: str,
    mesh: str,
    taken: int,
    cache_dir: str,
    texts: str,
    on_devices: Callable[..., Any],
    num_devices: int,
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    expected = run(config_of(cache_dir, texts, **SHORT))
    where = {"mesh_devices": taken % 8, "mesh": mesh, "strategy": strategy, "workers": 1}
    report = on_devices(run, config_of(cache_dir, texts, **SHORT, **where, device="xla"))
    check_equal(report, expected)
    assert report.compiles == 2
    if strategy == "ddp":
        assert {c["kind"] for c in report.collectives} == {"all-reduce"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2"], "--workers read packed documents; got --workers 2 and no --pack"),
        (["--pack", "--workers", "-1"], "--workers must be at least 0; got -1"),
        (["--pack", "--mesh", "pipe=2", "--strategy", "pipeline"], "got --strategy pipeline"),
        (["--scan", "--mesh", "pipe=2", "--strategy", "pipeline"], "--scan runs the blocks"),
        (
            ["--pack", "--device", "cpu", "--max-mb", "0.05", "--batch", "70"],
            "packed documents must fill one training batch of 70 sequences",
        ),
        (
            ["--pack", "--device", "cpu", "--data", __file__],
            "one for training and one for validation; got 1 from",
        ),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    arguments: list[str],
    message: str,
    cache_dir: str,
    texts: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--smoke", "--cache-dir", cache_dir, "--no-progress", "--data", texts, "--max-mb", "0"]
    assert main([*given, "--eval-batches", "1", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


# ---- Killed, and resumed on two processes --------------------------------------------------------

# The recipe; before each step it writes down the sequences that the step is given. It kills itself
# behind a step.
RECORDED = """
import json, os, signal, sys

if __name__ == "__main__":
    from spmd_core.metrics import Peak, utilisation

    # Measuring it takes longer than the run.
    utilisation.measured_peak = lambda *_: Peak(1e10, "measured before")
    from examples.gpt2 import train
    from examples.training.journal import Journal

    path, kill_behind = sys.argv[1], int(sys.argv[2])
    plain = Journal.steps

    def recorded(journal, batches):
        for number, (step, batch) in enumerate(plain(journal, batches), start=1):
            rows = batch[0].cpu().flatten(0, 1).tolist()  # of all processes
            if os.environ.get("RANK", "0") == "0":
                with open(path, "a") as file:
                    file.write(json.dumps(rows) + "\\n")
            yield step, batch
            if number == kill_behind:
                journal._saves.wait()  # the step that is being saved behind the run
                os.kill(os.getpid(), signal.SIGKILL)

    Journal.steps = recorded
    sys.exit(train.main(sys.argv[3:]))
"""


def recorded(
    folder: Path, name: str, arguments: list[str], *, kill_behind: int = 0, processes: int = 1
) -> tuple[list[list[list[int]]], list[launched.Ended]]:
    """The sequences of each step, and how the processes ended."""
    script = folder / "recorded.py"
    script.write_text(RECORDED)
    ended = launched.run(
        processes,
        lambda rank, port: [script, folder / name, kill_behind, *arguments],
        env=lambda rank, port: {
            "SPMD_STRICT": 1,
            **({} if processes == 1 else launched.as_torchrun(processes, rank, port)),
        },
        timeout_s=300,
    )
    lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
    return [json.loads(line) for line in lines], ended


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_run_sees_every_sequence_once_on_two_processes(
    cache_dir: str, texts: str, tmp_path: Path
) -> None:
    knobs = {"eval_every": 0, "eval_batches": 0, "warmup": 1}
    config = with_defaults(config_of(cache_dir, texts, **knobs))
    sequences = packed(config).train
    steps = len(sequences) // config.batch
    assert steps >= 8
    expected = run(config_of(cache_dir, texts, steps=steps, **knobs)).losses

    saved = tmp_path / "run"
    arguments = ["--smoke", "--no-progress", "--cache-dir", cache_dir, "--data", texts, "--pack"]
    arguments += ["--max-mb", "0", "--eval-batches", "0", "--eval-every", "0", "--warmup", "1"]
    arguments += ["--steps", str(steps), "--workers", "1"]
    killed, ended = recorded(
        tmp_path,
        "killed",
        [*arguments, "--device", "cpu", "--checkpoint", str(saved), "--save-every", "2"],
        kill_behind=5,
    )
    assert [one.code for one in ended] == [-signal.SIGKILL], ended[0].errors
    assert len(killed) == 5 and max(map(int, steps_in(saved))) == 4

    results = tmp_path / "results.json"
    where = ["--devices", "4", "--mesh", "fsdp=4"]
    resumed, ended = recorded(
        tmp_path,
        "resumed",
        [*arguments, *where, "--checkpoint", str(saved), "--results", str(results)],
        processes=2,
    )
    assert [one.code for one in ended] == [0, 0], "\n".join(one.errors for one in ended)

    # Step 5 was seen and lost: the saved run had not got to it.
    seen = [*killed[:4], *resumed]
    assert [len(step) for step in seen] == [config.batch] * steps
    counted = Counter(digest(row) for step in seen for row in step)
    whole = Counter(digest(sequences[i]["input_ids"].tolist()) for i in range(len(sequences)))
    assert counted <= whole
    assert (whole - counted).total() == len(sequences) % config.batch  # the tail, which is dropped
    assert sorted(map(digest, killed[4])) == sorted(map(digest, resumed[0]))
    report = json.loads(results.read_text())
    assert report["resumed_at"] == 4
    assert report["losses"] == pytest.approx(expected[4:], rel=2e-4)


def steps_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.isdecimal()]


def digest(row: list[int]) -> str:
    return hashlib.sha256(str(row).encode()).hexdigest()
