"""Writes every compiled program to a file: `XLA_SAVE_TENSORS_FILE`."""

from collections.abc import Callable

from spmd_core import debugging
from spmd_core.program import compile_cache
from spmd_core.program.compile_cache import Compiled
from spmd_core.program.program import Program
from spmd_core.runtime import processes

_TEXTS: dict[str, Callable[[Program], str]] = {
    "text": lambda program: debugging.operations(program=program),
    "hlo": lambda program: debugging.hlo(program=program, stage="before"),
    "stablehlo": lambda program: debugging.stablehlo(program=program),
}


def save_to(path: str, form: str) -> Callable[[Compiled], None]:
    """From now on, appends each program, when it is compiled, to `path.N` of process N.

    Args:
        path: the file, without the number of the process.
        form: text (the recorded operations), hlo or stablehlo.

    Returns:
        The observer in `compile_cache.observers`.

    Raises:
        ValueError: another form.
    """
    if form not in _TEXTS:
        raise ValueError(
            f"XLA_SAVE_TENSORS_FMT is one of {', '.join(_TEXTS)}; got {form!r}. Set one of them."
        )

    def save(compiled: Compiled) -> None:
        program = compile_cache.newest()
        assert program is not None and program.record is compiled.record
        with open(f"{path}.{processes.process_index()}", "a") as file:
            file.write(
                f"[{compiled.record.name} for {compiled.record.source}]\n"
                f"## BEGIN_GRAPH\n{_TEXTS[form](program)}\n## END_GRAPH\n\n"
            )

    compile_cache.observers.append(save)
    return save
