"""planner/search.py: combinations of options, planned once each and ranked."""

import json
import subprocess
from pathlib import Path

import pytest

import spmd_core as spmd
from spmd_core.planner import search
from spmd_core.planner.search import Outcome, Request, candidates


@pytest.fixture
def request_(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    return Request("cpu-8", 1, (str(script), "--batch", "4"), tmp_path / "cache")


def test_values_by_default(request_):
    found = candidates(["batch", "mesh", "remat"], {}, request_)
    assert found["batch"][:3] == ("4", "8", "16")
    assert found["mesh"] == ("auto",)
    assert found["remat"][0] == "none"
    assert "full" in found["remat"]


def test_given_values_come_first(request_):
    found = candidates(["batch", "lr"], {"batch": ["3"], "lr": ["1", "2"]}, request_)
    assert found == {"batch": ("3",), "lr": ("1", "2")}


@pytest.mark.parametrize(
    ("names", "given", "command", "message"),
    [
        (["lr"], {}, ("t.py",), r"got 'lr'. Add --values 'lr=VALUE;VALUE'"),
        (["batch"], {}, ("t.py",), r"got None. Add for instance --batch 8"),
        (["batch"], {}, ("t.py", "--batch=x"), r"got 'x'. Add for instance --batch 8"),
        (["batch"], {"lr": ["1"]}, ("t.py",), r"got values for lr. Add the name to --search"),
    ],
)
def test_what_cannot_be_searched(names, given, command, message):
    with pytest.raises(spmd.errors.PlanError, match=message):
        candidates(names, given, Request("cpu-8", 1, command, Path("c")))


def test_an_option_of_a_command_line():
    assert search.option(("a", "--batch", "8"), "batch") == "8"
    assert search.option(("a", "--batch=9"), "batch") == "9"
    assert search.option(("a", "--batches", "8"), "batch") is None
    assert search.with_option(("a", "--batch=9", "--x"), "batch", "2") == (
        *("a", "--x", "--batch", "2"),
    )


def _plan(batch, *, peak, capacity=100):
    costs = {"model_flops": batch * 10, "bound_s": 1 + batch / 10, "mfu_bound": batch / 100}
    fits = peak <= capacity
    return {"fits": fits, "peak_bytes": peak, "step": {"costs": costs}, "found_mesh": ""}


@pytest.fixture
def planned(monkeypatch):
    """Stands for the processes that plan; keeps their command lines."""
    commands = []

    def run(words, **_):
        commands.append(words)
        batch = int(search.option(words, "batch"))
        if search.option(words, "remat") == "broken":
            return subprocess.CompletedProcess(words, 2, "", "a line\nerror: no such remat\n")
        divisor = 4 if search.option(words, "remat") == "full" else 1
        path = Path(search.option(words, "json"))
        path.write_text(json.dumps(_plan(batch, peak=batch * 10 // divisor)))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(search.subprocess, "run", run)
    return commands


def test_ranking_and_batches_end_at_the_first_that_does_not_fit(request_, planned):
    values = {"batch": ("4", "8", "16", "32"), "remat": ("none", "full", "broken")}
    seen = []
    outcomes = search.search(values, request_, report=lambda i, n, o: seen.append((i, n)))
    assert seen == [(i, 12) for i in range(1, 13)]
    fitting = [(o.options["remat"], o.options["batch"]) for o in outcomes if o.fits]
    assert fitting == [
        *[("full", "32"), ("full", "16"), ("full", "8"), ("none", "8")],
        *[("full", "4"), ("none", "4")],
    ]
    by_options = {(o.options["remat"], o.options["batch"]): o for o in outcomes}
    assert by_options["none", "16"].plan["fits"] is False
    assert by_options["none", "32"].reason == "not planned: a smaller batch does not fit"
    assert by_options["broken", "4"].reason == "exit code 2: error: no such remat"
    text = search.table(outcomes)
    assert text.splitlines()[0].split()[:2] == ["remat", "batch"]
    assert "does not fit" in text
    assert "no such remat" in text


def test_a_second_search_plans_nothing_again(request_, planned):
    values = {"batch": ("4", "8")}
    first = search.search(values, request_, report=lambda *_: None)
    count = len(planned)
    assert search.search(values, request_, report=lambda *_: None) == first
    assert len(planned) == count
    # Another source of the script is another plan.
    Path(request_.command[0]).write_text("pass  # changed\n")
    search.search(values, request_, report=lambda *_: None)
    assert len(planned) == 2 * count


def test_a_kept_plan_that_is_damaged_is_made_anew(request_, planned, caplog):
    def searched():
        return search.search({"batch": ("4",)}, request_, report=lambda *_: None)

    first = searched()
    (path,) = request_.folder.iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        caplog.clear()
        count = len(planned)
        assert searched() == first
        told = [f"{path} is damaged, so its plan is made again"] if len(planned) > count else []
        assert [record.getMessage() for record in caplog.records] == told
    for content in (b"", b"[]", b'{"plan": {"fits": true}}', b"\xff", whole[:-20]):
        path.write_bytes(content)
        count = len(planned)
        assert searched() == first and len(planned) == count + 1
    assert [*request_.folder.iterdir()] == [path]


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_a_compiler_make_other_plans(name, request_, planned, monkeypatch):
    for flags, count in (("--xla_a=1", 1), ("--xla_a=2", 2), ("--xla_a=1", 2)):
        monkeypatch.setenv(name, flags)
        search.search({"batch": ("4",)}, request_, report=lambda *_: None)
        assert len(planned) == count


def test_an_interrupted_search_goes_on(request_, planned, monkeypatch):
    values = {"batch": ("4", "8")}

    def interrupt(number, *_):
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.search(values, request_, report=interrupt)
    assert len(planned) == 1
    search.search(values, request_, report=lambda *_: None)
    assert len(planned) == 2


def test_outcomes_without_bounds_rank_by_memory():
    cpu = {"costs": {"model_flops": 5, "bound_s": None, "mfu_bound": None}}
    outcome = Outcome(
        {"batch": "1"}, {"fits": None, "peak_bytes": 7, "step": cpu, "found_mesh": ""}
    )
    assert (outcome.fits, outcome.flops_per_s, outcome.mfu_bound) == (True, 0.0, None)
    assert "0.00 GB" in search.table([outcome])


def test_the_table_has_the_mesh_that_was_found():
    plan = {"fits": True, "peak_bytes": 7, "step": None, "found_mesh": "fsdp=4,tensor=2"}
    outcomes = [
        Outcome({"mesh": "auto", "batch": "1"}, plan),
        Outcome({"mesh": "fsdp=8", "batch": "1"}, plan | {"found_mesh": ""}),
        Outcome({"mesh": "auto", "batch": "auto"}, None, "exit code 2"),
    ]
    assert [outcome.shown for outcome in outcomes] == [
        ("auto: fsdp=4,tensor=2", "1"),
        ("fsdp=8", "1"),
        ("auto", "auto"),
    ]
    assert "auto: fsdp=4,tensor=2  1" in search.table(outcomes)
