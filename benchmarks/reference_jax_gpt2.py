"""How much memory does the recipe's GPT-2 train step take as one hand-written jax program?

The step (`reference_jax_program.py`) is compiled ahead of time, for emulated CPU devices or for a
TPU that is not there (libtpu's compiler, until the buffers are known), and never run. Its peak is
what `examples/gpt2` is compared with (`benchmarks/hbm.py`).

Run: python -m benchmarks.reference_jax_gpt2 --preset 2B --topology v4-8 --mesh fsdp=4
     python -m benchmarks.reference_jax_gpt2 --preset smoke --mesh fsdp=4,tensor=2   (emulated CPUs)
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reference_options import Options, options_from, sizes_of
from examples.training.knobs import begin_command

if __name__ == "__main__":  # before the imports below, which take seconds
    begin_command(lambda: options_from(None, usage=__doc__))

import jax
import jax.numpy as jnp

from benchmarks.reference_jax_program import FSDP, TENSOR, Setup, step_for
from examples.gpt2.presets import PRESETS
from examples.training.command import exit_code
from examples.training.knobs import KnobError
from spmd_core.errors import DeviceMemoryError, PlanError
from spmd_core.planner import buffer_text, topology
from spmd_core.planner.memory_program import write_buffers
from spmd_core.runtime.abstract import without_disk_cache


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's main memory, without the program's code.

    Attributes:
        arguments: parameters, optimizer state and batch.
        results: results that do not take over an argument's memory.
        temporaries: gradients and activations, with the gaps that the layout leaves between them,
            and constants.
    """

    arguments: int
    results: int
    temporaries: int

    @property
    def peak(self) -> int:
        """What a device must have.

        XLA's own `peak_memory_in_bytes` is less: it leaves out gaps between temporaries.
        """
        return self.arguments + self.results + self.temporaries

    @classmethod
    def of(cls, found: buffer_text.Buffers) -> "Memory":
        """The memory of a program whose buffers XLA wrote."""
        arguments, results = found.argument_bytes, found.new_result_bytes
        return cls(arguments, results, found.num_bytes - arguments - results)


def setup_of(options: Options) -> Setup:
    """The options as a setup.

    Raises:
        KnobError: the mesh has other axes, or a size that does not fit the model.
    """
    sizes = sizes_of(options)
    model = PRESETS[options.preset]
    for axis, divided, count in (
        (FSDP, "the width", model.width),
        (FSDP, "the sequence", model.seq),
        (TENSOR, "the number of heads", model.num_heads),
    ):
        if count % sizes[axis]:
            raise KnobError(
                f"the axis {axis} must divide {divided} of {model.name}; got {axis}={sizes[axis]} "
                f"for {count}. Pass another size, or another preset."
            )
    return Setup(
        model,
        **sizes,
        batch=options.batch,
        recomputes=options.remat == "full",
        dtype=jnp.bfloat16 if options.dtype == "bf16" else jnp.float32,
    )


def compiled_memory(options: Options) -> Memory:
    """Compiles the step, and returns what one device holds. Runs nothing.

    Raises:
        DeviceMemoryError: the step does not fit.
        KnobError: the options do not fit together.
        PlanError: no such topology, or its compiler is not installed.
    """
    setup = setup_of(options)
    if options.dump and Path(options.dump).exists():
        raise KnobError(f"--dump makes a folder; got {options.dump}, which is there. Remove it.")
    count = setup.fsdp * setup.tensor
    found = topology.find_topology(options.topology or f"cpu-{count}")
    if len(found.devices) < count:
        raise KnobError(
            f"--mesh must fit the topology; got {count} devices for the {len(found.devices)} of "
            f"{found.name}. Pass a larger topology."
        )
    step = step_for(setup, found.devices)
    lowered = step.jitted.lower(*step.arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.dump or Path(temporary) / "texts")
        if found.request is None:
            with without_disk_cache():  # XLA would write nothing of a program from there
                lowered.compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
        else:
            ids = [device.id for device in found.devices[:count]]
            try:
                write_buffers(lowered, folder, found, ids)
            except jax.errors.JaxRuntimeError as error:
                raise DeviceMemoryError(
                    f"the step must fit the device's memory; got {str(error).splitlines()[0]} "
                    "Pass a larger --mesh."
                ) from error
        return Memory.of(buffer_text.read(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""

    def command() -> bool:
        options = options_from(argv, usage=__doc__)
        start = time.perf_counter()
        memory = compiled_memory(options)
        print(
            f"GPT-2 {options.preset} {options.mesh or 'on one device'}, batch {options.batch}, "
            f"remat {options.remat}, on {options.topology or 'emulated CPUs'}: "
            f"peak {memory.peak / 1e9:.3f} GB a device (arguments {memory.arguments / 1e9:.3f}, "
            f"own results {memory.results / 1e9:.3f}, temporaries {memory.temporaries / 1e9:.3f}), "
            f"compiled in {time.perf_counter() - start:.0f} s"
        )
        if options.json:
            Path(options.json).write_text(json.dumps(asdict(memory)))
        return False

    return exit_code(command, usage=(PlanError,), failed=(DeviceMemoryError,))


if __name__ == "__main__":
    sys.exit(main())
