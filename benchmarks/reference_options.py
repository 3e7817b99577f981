"""The options of `reference_jax_gpt2.py`, read without a framework."""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.gpt2.presets import PRESETS
from examples.training.knobs import KnobError, check_ranges, knob, parser_of
from examples.training.mesh_sizes import check_axes, mesh_sizes

AXES = ("fsdp", "tensor")


@dataclass(frozen=True)
class Options:
    """The command line."""

    preset: str = knob("2B", "sizes of the model", choices=[*PRESETS])
    mesh: str = knob("", "axes among fsdp and tensor, such as fsdp=4,tensor=2; empty: one device")
    batch: int = knob(1, "sequences on each shard of the batch", least=1)
    remat: str = knob("full", "what backward computes again", choices=["full", "none"])
    dtype: str = knob("bf16", "of the products", choices=["bf16", "fp32"])
    topology: str = knob("", "v4-8, or as libtpu names it v4:2x2x1; empty: emulated CPUs")
    dump: str = knob("", "a new folder for the text of the compiled program; empty: none")
    json: str = knob("", "a file for the figures; empty: none")


def options_from(argv: Sequence[str] | None, *, usage: str | None = None) -> Options:
    """The command line as options.

    Raises:
        KnobError: a number is out of its range, or the mesh has other axes.
    """
    parser = parser_of(Options, module="benchmarks.reference_jax_gpt2", usage=usage)
    options = Options(**vars(parser.parse_args(argv)))
    check_ranges(options)
    sizes_of(options)
    return options


def sizes_of(options: Options) -> dict[str, int]:
    """The sizes of the axes fsdp and tensor; 1 where --mesh does not name one.

    Raises:
        KnobError: the mesh has other axes, or no number for one.
    """
    sizes = mesh_sizes(options.mesh, example="fsdp")
    check_axes(options.mesh, sizes, AXES)
    known = {axis: size for axis, size in sizes.items() if size is not None}
    if known != sizes:
        raise KnobError(
            f"--mesh has a number for each axis; got {options.mesh!r}. Write for instance --mesh "
            "fsdp=4,tensor=2."
        )
    return dict.fromkeys(AXES, 1) | known
