"""`allow_execution`: finds hidden reads of values, by having every execution raise."""

from spmd_core.arguments import checked
from spmd_core.errors import ProgramError, SpmdError
from spmd_core.program import cut_guard
from spmd_core.program.cut_guard import CutGuard
from spmd_core.source_lines import user_line


@checked()
def allow_execution(allow: bool) -> None:
    """With False, every execution of a program in this thread raises, until a call with True.

    Helps to find hidden reads of values.

    Raises:
        SpmdError: called inside a region of `compile`, which has its own `full_graph`.
        ProgramError: later, at the line that needs a value.
    """
    if cut_guard.this_thread.cut_guard not in (None, _NO_EXECUTION):
        raise SpmdError(
            "a region says itself whether it may execute; got allow_execution inside one. "
            "Use compile(full_graph=True)."
        )
    cut_guard.this_thread.cut_guard = None if allow else _NO_EXECUTION


def _refuse_execution() -> None:
    raise ProgramError(
        "after allow_execution(False) nothing is executed; "
        f"{user_line()} needs a value that is pending. Move it, or call allow_execution(True)."
    )


_NO_EXECUTION = CutGuard("spmd", _refuse_execution, lambda key: None, lambda key: None)
