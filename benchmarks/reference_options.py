"""The options of `reference_jax_gpt2.py`, read without a framework."""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.gpt2.presets import PRESETS
from examples.training.knobs import knob, parser_of


@dataclass(frozen=True)
class Options:
    """The command line."""

    preset: str = knob("2B", "sizes of the model", choices=[*PRESETS])
    mesh: str = knob("", "axes among fsdp and tensor, such as fsdp=4,tensor=2; empty: one device")
    batch: int = knob(1, "sequences on each shard of the batch")
    remat: str = knob("full", "what backward computes again", choices=["full", "none"])
    dtype: str = knob("bf16", "of the products", choices=["bf16", "fp32"])
    topology: str = knob("", "v4-8, or as libtpu names it v4:2x2x1; empty: emulated CPUs")
    dump: str = knob("", "a new folder for the text of the compiled program; empty: none")
    json: str = knob("", "a file for the figures; empty: none")


def options_from(argv: Sequence[str] | None, *, usage: str | None = None) -> Options:
    """The command line as options."""
    parser = parser_of(Options, module="benchmarks.reference_jax_gpt2", usage=usage)
    return Options(**vars(parser.parse_args(argv)))
