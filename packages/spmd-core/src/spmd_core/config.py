"""The settings that users may change, with their defaults; an assignment is checked."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

CompilerOption = str | bool | int | float


def _default_cache_dir() -> str | None:
    """`SPMD_CACHE_DIR` (empty: no cache on disk), or a folder in the user's cache directory."""
    chosen = os.environ.get("SPMD_CACHE_DIR")
    if chosen is not None:
        return chosen or None
    return str(user_cache() / "xla")


def user_cache() -> Path:
    """This package's folder in the user's cache directory, which `XDG_CACHE_HOME` may name."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd-core"


# The least values of whole numbers if not 1. Other numbers are seconds, more than 0 and at most
# these 30 years, for which every clock has room.
_MOST_S = 10**9
_LEAST = {"explain_recompiles_after": 0}


@dataclass
class Config:
    """Assign to the fields of `spmd_core.config`; each field says when it is read.

    Raises:
        AttributeError: there is no setting of the assigned name, or one is deleted.
        TypeError: the value has another type than the field. The setting stays as it was.
        ValueError: a number is out of its range. The setting stays as it was.
    """

    # Folder of JAX's persistent compilation cache; None switches the cache off. Read when the
    # runtime starts.
    cache_dir: str | None = None
    # Bytes in that folder; beyond, the programs used longest ago are removed. Read when a program
    # is written there.
    max_cache_bytes: int = 10 * 2**30
    # Number of compiled programs kept in memory; the least recently used one is dropped first. Read
    # at each compile.
    max_programs: int = 256
    # Number of distinct (operation, shapes, static arguments) whose inferred results are kept. Read
    # when a new one is met.
    max_op_entries: int = 200_000
    # Programs in flight on emulated CPU devices: XLA's collectives abort the process if very many
    # wait for each other. Read when a program starts.
    max_in_flight_cpu: int = 8
    # Programs in flight on GPU and TPU: enough to hide the host's work, and few enough that donated
    # memory is freed soon. Read when a program starts.
    max_in_flight: int = 32
    # Seconds that a process waits for another one that should do the same, such as in the
    # comparison of their data, before it raises `ProcessError`. Read when it waits.
    process_timeout_s: float = 300.0
    # Seconds of such a wait, or of a wait on the devices, after which all processes print which one
    # the others wait for, and its line. Read when a process waits.
    warn_process_after_s: float = 30.0
    # Seconds after which a process compares the programs that it has started with those of another
    # process; new programs are compared before they start. None compares nothing. Read at each
    # comparison; one process has nothing to compare.
    compare_processes_every_s: float | None = 0.5
    # Asynchronous step closures that may wait for their thread; with more, `sync()` waits for one
    # to end. Read when a step ends.
    max_async_closures: int = 4
    # An operation that would run on the host raises instead. Also set by the environment variable
    # SPMD_STRICT=1, and by `strict()` for a region. Read at each operation.
    strict: bool = False
    # Recorded operations keep the user's line and module that they come from, and compiled programs
    # name them. Costs tens of microseconds per operation, and separate compiled programs. Also set
    # by SPMD_SOURCE_LINES=1, and by `debugging.source_lines()` for a region. Read at each
    # operation.
    record_source_lines: bool = False
    # Programs check the indices that the device computes. One outside its dim raises
    # `IndexRangeError` at the next read on the host; without the checks, such a read takes the
    # nearest element and such a write is dropped. Read at each operation and each cut; makes
    # another program.
    check_indices: bool = True
    # Every program over several devices also runs on one device, and differing results raise
    # `VerificationError`. Costs the memory of all tensors on one device, and twice the time. Also
    # set by SPMD_VERIFY=1, and by `verify()` for a region. Read at each cut.
    verify_programs: bool = False
    # Cuts that differ in one size alone, such as a decoder's length or that of a batch's sequences,
    # share a program whose arrays are padded to the next power of two; else each size compiles.
    # Read at each cut.
    bound_growing_sizes: bool = True
    # Gradients that one program adds up, as it does to accumulate them over several backwards, are
    # reduced over the devices once. Until then each device keeps the sum of its own parts, which is
    # a whole gradient. With False each is reduced at once, of which a device keeps its shard: less
    # memory for split parameters, and more to send. Read at each backward.
    reduce_gradients_once: bool = True
    # Operations that a program repeats at least four times in a row, such as those of a model's
    # layers, become a loop, and the layers' parameters, gradients and optimizer's state lie in
    # arrays that have one row for each layer: the program has one layer's operations, and compiles
    # in about that time. Helps where a deep model compiles for long and `scan_model` cannot be
    # called. Costs a search in each new program, and on CPUs some of each step's time, as loops
    # copy weights out of their stacks; the loop's order of sums may change last bits. Layers that
    # differ stay as they are. "auto" is True for programs for which steps of loops were measured to
    # take no more time and memory than layers one by one: on CPUs, those whose devices gather most
    # of the weights, as with FSDP. `debugging.explain_recompile()` says what "auto" chose, and why
    # there is no loop. Read at each cut; makes another program.
    fold_layers: Literal[False, True, "auto"] = "auto"
    # XLA's options by XLA's names, such as {"xla_cpu_scheduler_type":
    # "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}, which takes less memory on emulated devices. Read at
    # each cut; other options make another program. XLA_FLAGS sets options for the whole process.
    compiler_options: dict[str, CompilerOption] = field(default_factory=dict)
    # Warns once of a line of the user's program that compiles a program in almost every step, with
    # what changes from step to step. Read at each compile.
    warn_of_recompiles: bool = True
    # Prints on stderr why a program was compiled, except for this number of expected programs at
    # the beginning of the process; None prints nothing. Also set by SPMD_EXPLAIN_RECOMPILES=3. Read
    # at each compile.
    explain_recompiles_after: int | None = None

    # A folder that gets, for each program that is lowered, its operations as they were recorded and
    # after each pass that changes them. Also set by SPMD_DUMP_PASSES. Read when a program is
    # lowered.
    dump_passes: str | None = None
    # Checks the operations of a program after each pass over them. Also set by SPMD_CHECK_PASSES=1.
    # Read when a program is lowered.
    check_passes: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        kind = _KINDS.get(name)
        if kind is None:
            near = difflib.get_close_matches(name, _KINDS, n=1)
            raise AttributeError(
                f"spmd.config has the settings {', '.join(_KINDS)}; got {name!r}. "
                + (f"Write spmd.config.{near[0]}." if near else "Assign to one of these.")
            )
        default = type(self).__dict__.get(name, {})
        if not _has_type(value, kind):
            raise TypeError(
                f"spmd.config.{name} takes {_described(name, kind)}; got {value!r}, "
                f"of type {type(value).__name__}. Its default is {default!r}."
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_seconds = float in (kind, *get_args(kind))
        least = _LEAST.get(name, 1)
        if is_number and not (0 < value <= _MOST_S if is_seconds else value >= least):
            raise ValueError(
                f"spmd.config.{name} takes {_described(name, kind)}; got {value!r}. "
                f"Its default is {default!r}."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"spmd.config keeps all of its settings; got del spmd.config.{name}. Assign to it "
            "instead, for instance its default."
        )


# The type of each field.
_KINDS: dict[str, Any] = get_type_hints(Config)


def _has_type(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_has_type(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return isinstance(value, dict) and all(
            _has_type(k, key) and _has_type(v, item) for k, v in value.items()
        )
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _described(name: str, kind: Any) -> str:
    """What a field takes, such as "an int of at least 1, or None"."""
    if isinstance(kind, UnionType):
        kind, _ = get_args(kind)
        return f"{_described(name, kind)}, or None"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is int:
        return f"an int of at least {_LEAST.get(name, 1)}"
    if kind is float:
        return f"a number of seconds above 0, at most {_MOST_S}"
    if kind is bool:
        return "True or False"
    return "a str" if kind is str else "a dict of XLA's names to str, bool, int or float"


def _switch(name: str) -> bool:
    """A variable of the environment that is 1 (on), or 0, empty or unset (off)."""
    chosen = os.environ.get(name, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"{name} is 1 (on) or 0 (off); got {chosen!r}. Set it to 1, or unset it.")
    return chosen == "1"


def _number_of_programs() -> int | None:
    """`SPMD_EXPLAIN_RECOMPILES`, a number of programs; None if it is empty or unset."""
    chosen = os.environ.get("SPMD_EXPLAIN_RECOMPILES", "")
    if chosen and not chosen.isdecimal():
        raise ValueError(
            "SPMD_EXPLAIN_RECOMPILES is the number of programs that need no explanation; "
            f"got {chosen!r}. Set it to 1 or more, or unset it."
        )
    return int(chosen) if chosen else None


# The user's settings.
# Guarded by: the GIL. Cleared by: never; each test gets the defaults back.
config = Config(
    cache_dir=_default_cache_dir(),
    strict=_switch("SPMD_STRICT"),
    record_source_lines=_switch("SPMD_SOURCE_LINES"),
    verify_programs=_switch("SPMD_VERIFY"),
    explain_recompiles_after=_number_of_programs(),
    dump_passes=os.environ.get("SPMD_DUMP_PASSES") or None,
    check_passes=_switch("SPMD_CHECK_PASSES"),
)


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside the block, an operation that would run on the host raises `HostFallbackError`.

    With False, it may run on the host, even under `SPMD_STRICT=1`. Reads that need the host by
    nature stay allowed: `item()`, the number of elements that a mask selects.

    Example:
        >>> import torch, spmd_core as spmd
        >>> with spmd.strict():
        ...     total = torch.ones(3, device="xla").sum()
        >>> total.item()
        3.0
    """
    before, config.strict = config.strict, enabled
    try:
        yield
    finally:
        config.strict = before
