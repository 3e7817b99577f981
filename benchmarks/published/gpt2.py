"""Is GPT-2 by SPMD marks as fast as by FSDP, over model sizes?

Run: python -m benchmarks.published.gpt2 --help
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published import command, plots, recipes
from benchmarks.published.figures import Figure
from benchmarks.published.plots import text
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Device, Measured, Quantity, Row, Scale, Settings
from examples.gpt2.presets import PRESETS

NAME = "gpt2"
# The published formula of model FLOPs: `6 * num_params` a token.
FORMULA = "6N"
FSDP2, COMPILED = "PyTorch FSDP2", "torch.compile"
PUBLISHED_MFU, PUBLISHED_PARAMS, PUBLISHED_DEVICES = 0.3975, 4.0e9, 8


@dataclass(frozen=True)
class Sizes:
    """Presets, and the batch and length that all of them train on."""

    presets: tuple[str, ...]
    batch: int
    seq: int
    steps: int
    rounds: int
    num_devices: int


def sizes(settings: Settings) -> Sizes:
    """What is trained."""
    quick = settings.scale is Scale.QUICK
    if settings.device is Device.CUDA:
        presets = ("124M", "350M") if quick else ("124M", "350M", "1B", "1.5B")
        return Sizes(presets, 16 * settings.num_devices, 1024, 20, 2, settings.num_devices)
    if quick:
        return Sizes(("tiny", "small"), 8, 64, 10, 1, 4)
    return Sizes(("tiny", "small", "124M"), 8, 256, 16, 3, 4)


def variants(num_devices: int) -> dict[str, str]:
    """The recipe's options by variant."""
    if num_devices == 1:
        return {"one device": ""}
    found = {
        "fully_shard": f"--strategy fsdp --mesh fsdp={num_devices}",
        "1-D SPMD": f"--strategy spmd --mesh fsdp={num_devices}",
    }
    if num_devices % 2 == 0 and num_devices > 2:
        found["2-D SPMD"] = f"--strategy spmd --mesh fsdp={num_devices // 2},tensor=2"
    return found


def rows(settings: Settings) -> list[Row]:
    """The recipe by each variant over all sizes, and the peers that run here."""
    chosen = sizes(settings)
    found: list[Row] = []
    for preset in chosen.presets:
        shape = f"--preset {preset} --batch {chosen.batch} --seq {chosen.seq}"
        shape += f" --steps {chosen.steps}"
        recipe = f"-m examples.gpt2.train {shape} --eval-batches 0 --log-every 1 --no-progress"
        recipe += " --log-dir {logs} --results {run}/report.json"
        peer = "-m benchmarks.compiled_gpt2 --device cuda"
        if settings.device is Device.EMULATED:
            recipe += f" --warmup 2 --max-mb 1 --devices {chosen.num_devices}"
            peer = "-m benchmarks.peers --recipe gpt2 --side theirs"
            peer += f" --vocab {PRESETS[preset].vocab_size} --devices {chosen.num_devices}"
        else:
            recipe += " --dtype bf16"
        commands = {
            variant: (f"{recipe} {options}", recipes.trained)
            for variant, options in variants(chosen.num_devices).items()
        }
        if settings.device is Device.EMULATED:
            commands[FSDP2] = (f"{peer} {shape} --results {{run}}/peer.json", recipes.peer)
        elif chosen.num_devices == 1:
            commands[COMPILED] = (f"{peer} {shape} --results {{run}}/peer.json", recipes.peer)
        for variant, (words, read) in commands.items():
            point = {"preset": preset, "batch": chosen.batch, "seq": chosen.seq}
            point |= {"variant": variant, "devices": chosen.num_devices}
            name = f"{preset}, {variant}"
            found.append(Row(NAME, name, words.split(), read, point, chosen.rounds))
    return found


# --- What is shown --------------------------------------------------------------------------------


def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
    """Step time, tokens/s and MFU over the sizes."""
    found = list(measured.values())
    peak = _peak(found)
    by_variant: dict[str, list[Measured]] = {}
    for row in found:
        by_variant.setdefault(row.settings["variant"], []).append(row)
    params = {
        row.settings["preset"]: row["num_params"].median
        for row in found
        if row.median("num_params")
    }

    def points(name: str) -> dict[str, list[plots.Point]]:
        return {
            variant: [
                (params[row.settings["preset"]], quantity)
                for row in of
                if row.settings["preset"] in params
                and (quantity := _quantity(row, name, params, peak)) is not None
            ]
            for variant, of in by_variant.items()
        }

    def draw(figure: Any) -> None:
        time, rate, share = figure.subplots(1, 3)
        plots.curves(time, points("step_s"), scale=1e3)
        time.set(ylabel="step, ms", yscale="log")
        plots.curves(rate, points("tokens_per_s"))
        rate.set(ylabel="tokens/s, all devices", yscale="log")
        plots.curves(share, points("mfu"), scale=100)
        label = f"announcement: 4B, 1-D SPMD,\nv4-16: {PUBLISHED_MFU:.2%}"
        plots.published(share, PUBLISHED_PARAMS, PUBLISHED_MFU * 100, label)
        share.set(ylabel=f"MFU ({FORMULA}), %", ylim=(0, None))
        for axes in (time, rate, share):
            axes.set(xlabel="parameters", xscale="log")
            axes.grid(alpha=0.3)
        share.legend(fontsize=8, loc="best")
        figure.suptitle("GPT-2: SPMD against FSDP over model sizes")

    lines = [
        (
            row.settings["preset"],
            row.settings["variant"],
            text(row["step_s"], ",.1f", 1e3),
            text(row.quantities().get("tokens_per_s"), ",.0f"),
            text(_quantity(row, "mfu", params, peak), ".2f", 100),
            _bytes(row, "peak_bytes"),
            _bytes(row, "sent_bytes"),
        )
        for row in found
    ]
    columns = ("preset", "", "step, ms", "tokens/s", f"MFU ({FORMULA}), %", "peak of a device")
    return Section(
        "GPT-2: SPMD against FSDP",
        "One model, one batch, by user-mode FSDP (`fully_shard`), by marks along one mesh axis and "
        "along two, and by PyTorch's own FSDP2.",
        (*columns, "sent by a device"),
        lines,
        _notes(settings, peak),
        _comparisons(settings, by_variant),
        (Picture("gpt2", "GPT-2's step over model sizes", draw),) if found else (),
    )


def _peak(found: Sequence[Measured]) -> float | None:
    """FLOP/s of one device: one denominator for all rows, as they may measure it differently."""
    peaks = [s for row in found for s in row.quantities().get("peak_flops", Quantity(())).samples]
    return statistics.median(peaks) if peaks else None


def _quantity(
    row: Measured, name: str, params: Mapping[str, float], peak: float | None
) -> Quantity | None:
    """A quantity of the row; "mfu" by the common peak."""
    if name != "mfu":
        return row.quantities().get(name)
    num_params = params.get(row.settings["preset"])
    if num_params is None or peak is None:
        return None
    flops = 6 * num_params * row.settings["batch"] * row.settings["seq"]
    most = peak * row.settings["devices"]
    return Quantity([flops / step / most for step in row["step_s"].samples])


def _bytes(row: Measured, name: str) -> str:
    value = row.median(name)
    return "-" if value is None else plots.bytes_text(value)


def _notes(settings: Settings, peak: float | None) -> list[str]:
    found = [
        f"MFU is `6 x parameters x tokens / (step time x devices x peak)`, the announcement's "
        f"formula; {'' if peak is None else f'a device peaks at {peak / 1e12:.3g} TFLOP/s'}"
        + (
            ", measured with a matrix product while all devices work: the median of all rows."
            if settings.device is Device.EMULATED
            else ", by its data sheet."
        )
    ]
    if settings.device is Device.EMULATED:
        found.append(
            "Emulated devices share this machine's cores: equal step times say that the programs "
            "do the same work, not how fast a device is. FSDP2 runs as processes over gloo, and "
            "has no compiler. Its tokens are random, those of the others text."
        )
    return found


def _comparisons(
    settings: Settings, by_variant: Mapping[str, Sequence[Measured]]
) -> list[Comparison]:
    ratios = ratio(by_variant.get("1-D SPMD", ()), by_variant.get("fully_shard", ()))
    where = "emulated CPU devices" if settings.device is Device.EMULATED else "GPUs"
    found = []
    if ratios:
        found.append(
            Comparison(
                "1-D SPMD against user-mode FSDP, step time",
                "about equal over all sizes",
                ", ".join(f"{preset}: {value:.2f}" for preset, value in ratios.items()),
                "The same collectives either way. Ratios of medians; below 1, SPMD is faster.",
            )
        )
    found.append(
        Comparison(
            "MFU of GPT-2 4B, 1-D SPMD",
            f"{PUBLISHED_MFU:.2%} on TPU v4-16 ({PUBLISHED_DEVICES} chips)",
            "in the plot, for these sizes",
            f"Another machine: {where}. An MFU is a share of each machine's own peak, and small "
            "models have too little work for each operation. For TPUs, `python -m spmd_core.plan` "
            "gives a bound, not a measurement.",
        )
    )
    return found


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> dict[str, float]:
    """Step time of the first over that of the second, by preset."""
    other = {row.settings["preset"]: row for row in theirs}
    return {
        row.settings["preset"]: row["step_s"].median
        / other[row.settings["preset"]]["step_s"].median
        for row in ours
        if row.settings["preset"] in other
    }


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
