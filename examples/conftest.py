"""What all recipes' tests share: a known peak, and runs on the devices of this process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import spmd_core as spmd
from spmd_core.auto import mode
from spmd_core.metrics import Peak, utilisation
from spmd_core.program import automatic, compile_cache


@pytest.fixture(scope="module", autouse=True)
def known_peak_of_this_machine() -> Iterator[None]:
    """Measuring it takes longer than a smoke run; runs in processes of their own measure it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilisation, "measured_peak", lambda *_: Peak(1e10, "measured before"))
        yield


@pytest.fixture
def on_devices(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`on_devices(run, config)`: the report of a run in which nothing falls back to the host.

    It compiles all its programs, as a new process does.
    """

    def of_run(run: Callable[[Any], Any], config: Any) -> Any:
        compile_cache.clear()
        with spmd.strict():
            report = run(config)
        assert "Involuntary full rematerialization" not in capfd.readouterr().err
        return report

    return of_run


@pytest.fixture
def finding_a_mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For --mesh auto: the model decides alone, and the switch is off again afterwards."""
    monkeypatch.setattr(mode, "_MOST_COMPILED", 0)
    compile_cache.clear()
    yield
    automatic.search = None
