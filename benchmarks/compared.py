"""Which figures of each benchmark's result file are compared with a baseline's.

Times only as a ratio to the peer that took turns with them in the same run, bytes and counts as
they are: so the two files may come from different machines.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.movements import CheckError, Comparison, Movement, of_ratios


@dataclass(frozen=True)
class Ratio:
    """Times of ours over those of the peer in the same run, by paths into the result file.

    A path has a key for each level. `*` stands for every key, and `rows[name,size]` for every entry
    of a list, which these of its fields name. A path ends at a number, or at a list of samples.

    Attributes:
        ours: the path.
        theirs: that of the peer; it names the same entries, or has none. Its samples were taken in
            turns with ours.
    """

    ours: str
    theirs: str


@dataclass(frozen=True)
class Amount:
    """Bytes or counts, which no machine changes; less is better."""

    path: str


@dataclass(frozen=True)
class Benchmark:
    """What is compared in a result file, and the settings that must be the same in both."""

    settings: tuple[str, ...]
    figures: tuple[Ratio | Amount, ...]


BENCHMARKS = {
    "attention": Benchmark(
        ("sizes",),
        (
            Ratio("lengths.*.blocks.samples_s", "lengths.*.math.samples_s"),
            Amount("lengths.*.blocks.peak_bytes"),
        ),
    ),
    "compile_once": Benchmark(
        ("preset", "devices"),
        (
            Ratio("seconds.an input.cpu_s", "seconds.as recorded.cpu_s"),
            Amount("programs.an input"),
        ),
    ),
    "compiles_cuda_1_devices": Benchmark((), (Amount("not_compiled"),)),
    "compiles_v4-8_1_devices": Benchmark((), (Amount("not_compiled"),)),
    "context_parallel": Benchmark(
        (),
        (
            Amount("found[length,num_devices].peak_bytes"),
            Amount("found[length,num_devices].sent_bytes"),
        ),
    ),
    "first_trace": Benchmark((), (Amount("num_ops"),)),
    "fixed_step": Benchmark(
        ("shape", "num_devices", "activation_marks"),
        (
            *(
                Ratio(f"ours_s.{name}", f"reference_s.{name}")
                for name in ("wall", "cpu", "burst_wall", "burst_cpu")
            ),
            Amount("num_ops"),
            Amount("compiles"),
            Amount("compiles_after_warm_up"),
        ),
    ),
    "fixed_llama_step": Benchmark(
        ("setup",),
        (
            *(
                Ratio(f"ours_s.{name}", f"reference_s.{name}")
                for name in ("wall", "cpu", "burst_wall", "burst_cpu")
            ),
            Amount("num_ops"),
            Amount("compiles"),
            Amount("compiles_after_warm_up"),
        ),
    ),
    "generate": Benchmark((), (Amount("runs[cache,bounded].programs"),)),
    "gpt2_strategies": Benchmark(
        (), (Amount("strategies.*.peak_bytes"), Amount("strategies.*.sent_bytes"))
    ),
    "hbm": Benchmark((), (Amount("rows.*.recipe.peak"), Amount("rows.*.by default.peak"))),
    "initialisation": Benchmark(
        (),
        (
            Amount("plans[model,topology].peak_bytes"),
            Amount("run.uploaded_bytes"),
            Ratio("run.model_cpu_samples_s", "run.jax_cpu_samples_s"),
        ),
    ),
    "interruptions": Benchmark((), (Amount("wrong"), Amount("printed"))),
    "memory": Benchmark(
        ("num_devices",),
        tuple(Amount(f"step.{name}") for name in ("argument_bytes", "temp_bytes", "peak_bytes")),
    ),
    "op_overhead": Benchmark((), (Ratio("us.*.samples", "floor_samples_us"),)),
    "op_speed": Benchmark((), (Ratio("calls[name,variant].ours", "calls[name,variant].eager"),)),
    "opinfo_1_devices": Benchmark((), (Amount("not_passed"),)),
    "opinfo_8_devices": Benchmark((), (Amount("not_passed"),)),
    "partitioner": Benchmark((), (Amount("failures"),)),
    "partitioner_jax": Benchmark((), (Amount("calls[call].wrong"), Amount("calls[call].error"))),
    "partitioner_layouts": Benchmark((), (Amount("calls[call,sizes].wrong"),)),
    "partitioner_pairs": Benchmark((), (Amount("calls[call].wrong"), Amount("calls[call].error"))),
    "partitioner_sizes": Benchmark((), (Amount("calls[call,size].wrong"),)),
    "peers": Benchmark(
        (),
        (
            Ratio(
                "results[recipe].ours.cpu_samples_s",
                "results[recipe].theirs.cpu_samples_s",
            ),
        ),
    ),
    "pipeline": Benchmark(
        ("stages",),
        (
            Amount("rows[name,microbatches].bubble_measured"),
            Amount("rows[name,microbatches].flops"),
            Amount("rows[name,microbatches].peak_bytes"),
        ),
    ),
    "refusals": Benchmark(
        (),
        tuple(
            Amount(f"counts.{kind}")
            for kind in (
                "refused here, accepted by eager torch",
                "another shape or dtype",
                "of values",
                "accepted here, refused by eager torch",
            )
        ),
    ),
    "rule_bytes": Benchmark((), (Amount("cases.*.ours.bytes"),)),
    "serving": Benchmark((), (Amount("runs[clients].compiles"),)),
    "spatial": Benchmark(
        (),
        (
            Ratio("cases.*.after.cpu_ms", "cases.*.before.cpu_ms"),
            Amount("cases.*.after.whole.*"),
        ),
    ),
    "split_programs": Benchmark(
        (),
        (Ratio("layouts[program,layout].split_s", "layouts[program,layout].replicated_s"),),
    ),
}


def compare(name: str, run: Mapping[str, Any], baseline: Mapping[str, Any]) -> Comparison:
    """Compares a result file's content with that of its baseline.

    Raises:
        CheckError: the two have different settings, or lack what they should have.
    """
    benchmark = BENCHMARKS[name]
    for setting in benchmark.settings:
        if run.get(setting) != baseline.get(setting):
            raise CheckError(
                f"a run is compared with a baseline of the same settings; got {setting} "
                f"{run.get(setting)} for {name}, and {baseline.get(setting)} in the baseline. "
                "Run the benchmark with the baseline's."
            )
    movements: list[Movement] = []
    gone: list[str] = []
    new: list[str] = []
    for figure in benchmark.figures:
        now = _samples(name, figure, run)
        try:
            before = _samples(name, figure, baseline)
        except CheckError:  # a result from before the benchmark measured it
            before = {}
        common = [key for key in before if key in now]
        gone += [key for key in before if key not in now]
        new += [key for key in now if key not in before]
        if isinstance(figure, Amount):
            movements += [Movement(key, before[key][0], now[key][0], 0.0) for key in common]
        else:
            movements += of_ratios({key: (before[key], now[key]) for key in common})
    differing = [
        f"{key} {baseline['environment'].get(key)} to {value}"
        for key, value in run["environment"].items()
        if key not in ("date", "commit") and baseline["environment"].get(key, value) != value
    ]
    return Comparison(name, tuple(movements), tuple(gone), tuple(new), ", ".join(differing))


def _samples(name: str, figure: Ratio | Amount, data: Mapping[str, Any]) -> dict[str, list[float]]:
    """The samples of a figure's entries, by their path, without those that take no time."""
    try:
        if isinstance(figure, Amount):
            return {path: [_amount(value)] for path, _, value in _found(figure.path, data)}
        theirs = {entry: value for _, entry, value in _found(figure.theirs, data)}
        return {
            path: _ratios(_as_list(value), _as_list(theirs[entry if entry in theirs else ()]))
            for path, entry, value in _found(figure.ours, data)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        path = figure.path if isinstance(figure, Amount) else f"{figure.ours}, {figure.theirs}"
        raise CheckError(
            f"a result file of {name} has {path}; got one in which that is missing ({error!r}). "
            "Run the benchmark again."
        ) from error


def _amount(value: Any) -> float:
    """An amount as a number; a list of failures, or counts of them by kind, as their number."""
    if isinstance(value, dict):
        return float(sum(value.values()))
    return float(len(value) if isinstance(value, list) else value)


def _as_list(value: Any) -> list[float]:
    return [float(v) for v in (value if isinstance(value, list) else [value])]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of the n-th samples of both: what slows the machine slows both of a pair."""
    if min(*ours, *theirs) <= 0:
        return []
    return [mine / right for mine, right in zip(ours, theirs, strict=True)]


def _found(
    path: str, data: Any, named: tuple[str, ...] = (), entry: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """The values at a path, each with its own path, in which entries have only their names.

    An entry of a list that the benchmark `skipped` has none, nor what `failed`; entries of one name
    are numbered.
    """
    if isinstance(data, dict) and "failed" in data:
        return
    if not path:
        yield ".".join(named), entry, data
        return
    key, _, rest = path.partition(".")
    listed = re.fullmatch(r"(\w+)\[([\w,]+)\]", key)
    if key == "*":
        for name, value in data.items():
            yield from _found(rest, value, (*named, name), (*entry, name))
    elif listed is not None:
        seen: Counter[str] = Counter()
        for row in data[listed[1]]:
            if "skipped" not in row:
                name = ", ".join(str(row[field]) for field in listed[2].split(","))
                seen[name] += 1
                name += f", {seen[name]}" * (seen[name] > 1)
                yield from _found(rest, row, (*named, f"{listed[1]}[{name}]"), (*entry, name))
    else:
        yield from _found(rest, data[key], (*named, key), entry)
