"""Is GPT-2 by SPMD marks as fast as by FSDP, over model sizes?

Run: python -m benchmarks.published.gpt2 --help
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published import command, plots, ratios, recipes
from benchmarks.published.figures import Figure
from benchmarks.published.plots import text
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Device, Measured, Quantity, Row, Scale, Settings
from examples.gpt2.presets import PRESETS

NAME = "gpt2"
# The published formula of model FLOPs: `6 * num_params` a token.
FORMULA = "6N"
BASE, ONE_AXIS = "fully_shard", "1-D SPMD"
FSDP2, COMPILED = "PyTorch FSDP2", "torch.compile"
PUBLISHED_MFU, PUBLISHED_DEVICES = 0.3975, 8


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
        return Sizes(("tiny", "small"), 8, 64, 8, 2, 4)
    return Sizes(("tiny", "small", "124M"), 8, 256, 16, 3, 4)


def variants(num_devices: int) -> dict[str, str]:
    """The recipe's options by variant."""
    if num_devices == 1:
        return {"one device": ""}
    found = {
        BASE: f"--strategy fsdp --mesh fsdp={num_devices}",
        ONE_AXIS: f"--strategy spmd --mesh fsdp={num_devices}",
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
    beside = _beside(found)
    params = {
        row.settings["preset"]: row["num_params"].median
        for row in found
        if row.median("num_params")
    }

    def draw(figure: Any) -> None:
        time, ratio, share = figure.subplots(1, 3)

        def shown(name: str) -> dict[str, dict[str, Quantity]]:
            return _by_preset(by_variant, lambda row: _quantity(row, name, params, peak))

        plots.over_sizes(time, shown("step_s"), params, scale=1e3)
        time.set(ylabel="step, ms", yscale="log")
        plots.over_sizes(ratio, _by_preset(by_variant, lambda row: beside.get(row.name)), params)
        ratio.axhline(1, color="black", linewidth=1)
        ratio.set(ylabel=f"step time, of that by {BASE}", ylim=(0, None))
        plots.over_sizes(share, shown("mfu"), params, scale=100)
        share.set(ylabel=f"MFU ({FORMULA}), %", ylim=(0, None))
        share.legend(fontsize=8, loc="best")
        figure.suptitle("GPT-2: SPMD against FSDP over model sizes")

    lines = [
        (
            row.settings["preset"],
            row.settings["variant"],
            text(row["step_s"], ",.1f", 1e3),
            text(beside.get(row.name), ".2f"),
            text(row.quantities().get("tokens_per_s"), ",.0f"),
            text(_quantity(row, "mfu", params, peak), ".2f", 100),
            _bytes(row, "peak_bytes"),
            _bytes(row, "sent_bytes"),
        )
        for row in found
    ]
    columns = ("preset", "", "step, ms", f"of {BASE}'s", "tokens/s", f"MFU ({FORMULA}), %")
    return Section(
        "GPT-2: SPMD against FSDP",
        "One model, one batch, by user-mode FSDP (`fully_shard`), by marks along one mesh axis and "
        "along two, and by PyTorch's own FSDP2.",
        (*columns, "peak of a device", "sent by a device"),
        lines,
        _notes(settings, peak),
        _comparisons(settings, beside),
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
    return Quantity([flops / step / most for step in row["step_s"].samples], row.noise)


def _by_preset(
    by_variant: Mapping[str, Sequence[Measured]], quantity: Callable[[Measured], Quantity | None]
) -> dict[str, dict[str, Quantity]]:
    """A quantity by variant and preset, where it is known."""
    return {
        variant: {row.settings["preset"]: q for row in of if (q := quantity(row)) is not None}
        for variant, of in by_variant.items()
    }


def _beside(found: Sequence[Measured]) -> dict[str, Quantity]:
    """By row, its step time over that of `fully_shard` with the same preset, round by round."""
    base = {row.settings["preset"]: row for row in found if row.settings["variant"] == BASE}
    pairs = {
        row.name: (row, base[row.settings["preset"]])
        for row in found
        if row.settings["variant"] != BASE and row.settings["preset"] in base
    }
    return ratios.against(pairs)


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


def _comparisons(settings: Settings, beside: Mapping[str, Quantity]) -> list[Comparison]:
    shown = {
        name.removesuffix(f", {ONE_AXIS}"): text(quantity, ".2f")
        for name, quantity in beside.items()
        if name.endswith(ONE_AXIS)
    }
    where = "emulated CPU devices" if settings.device is Device.EMULATED else "GPUs"
    found = []
    if shown:
        found.append(
            Comparison(
                "1-D SPMD against user-mode FSDP, step time",
                "about equal over all sizes",
                ", ".join(f"{preset}: {value}" for preset, value in shown.items()),
                "The same collectives either way. Below 1, SPMD is faster.",
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


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
