"""All tests: emulated devices, how XLA compiles, the tiers, and a clean state around each test."""

import gc
import itertools
import json
import os
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

NUM_DEVICES = int(os.environ.get("SPMD_TEST_DEVICES", "8"))
TIER = os.environ.get(
    "SPMD_TEST_TIER", "default"
)  # fast, default or all; `scripts/test.sh` sets it
if TIER not in ("fast", "default", "all"):
    raise ValueError(f"SPMD_TEST_TIER is one of fast, default and all; got {TIER!r}. Set one.")
if TIER != "all":
    # LLVM's optimizations cost half of the tests' time and decide no value but a last bit. The
    # partitioner and XLA's other passes come before LLVM and stay. The tier `all` compiles as
    # users do.
    cheap = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if metadata.version("jaxlib").startswith("0.10."):
        # The older code generator of fused loops takes half the time. jaxlib 0.12 has only the
        # newer one, and ends the process for an option that it does not know.
        cheap += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cheap}".strip()
# Torch's threads wait for each other in a loop, and each worker has them: they cost four fifths of
# the time of small models on the CPU. Processes that tests start have it from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers, passes and runs compile many of the same programs: the first keeps it for the others.
# Its key is the program after lowering, with jaxlib's version and the flags. The tier `all`
# compiles everything anew.
COMPILED = Path(__file__).parent / ".cache" / "compiled_programs"
if "SPMD_CACHE_DIR" not in os.environ:
    os.environ["SPMD_CACHE_DIR"] = "" if TIER == "all" else str(COMPILED)
    if TIER != "all":  # programs of a folder that others can write are warned of
        COMPILED.mkdir(parents=True, exist_ok=True)
        COMPILED.chmod(0o700)

# Below what they read: the environment is set before the packages are imported. hypothesis
# registers the generators of its plugins, and finds what refers to one only before it is frozen.
import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from state import reset  # noqa: E402

import spmd_core as spmd  # noqa: E402
from spmd_core.program import tensor_names  # noqa: E402

spmd.simulate(NUM_DEVICES)
spmd.use_spmd()

# A test that compiles, or that waits for a busy core, has no time limit of its own.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Tests interrupt themselves. A shell has what it runs in the background ignore that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Functions by file, which the fast tier leaves out; `scripts/slow_tests.py` writes it from a run.
SLOW = json.loads((Path(__file__).parent / "scripts" / "slow_tests.json").read_text())
SLOW_S = 2.0  # the fast tier names what took longer


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to leave a file alone: with `-m one_device` all that do not speak of it.

    To import them takes a tenth of that pass.
    """
    if config.getoption("markexpr") != "one_device" or collection_path.suffix != ".py":
        return None
    return None if "one_device" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the tier leaves out; the closing line counts it as deselected."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if name.partition("[")[0] in SLOW.get(file, ()):
            item.add_marker("slow")
    left_out = {"fast": {"slow", "exhaustive"}, "default": {"exhaustive"}, "all": set()}[TIER]
    dropped = [item for item in items if any(item.get_closest_marker(m) for m in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        kept = set(items) - set(dropped)
        items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what is too slow for the fast tier, so that a new test does not slow it unseen."""
    passed = terminalreporter.stats.get("passed", [])
    slow = [report for report in passed if report.when == "call" and report.duration > SLOW_S]
    if TIER != "fast" or not slow:
        return
    terminalreporter.section(f"over {SLOW_S:.0f} s: mark them slow (pytest.mark.slow)")
    for report in sorted(slow, key=lambda report: -report.duration):
        terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    """As many devices as asked for, whatever started them."""
    assert spmd.global_runtime_device_count() == NUM_DEVICES


@pytest.fixture(scope="session")
def modules_run() -> Iterator[int]:
    """Counts the modules of a worker."""
    return itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def old_objects_frozen(modules_run: Iterator[int]) -> None:
    """Keeps what is alive out of collections, which otherwise take seconds each in a long run.

    Plans and training loops collect, and a worker has millions of objects after a while. What dies
    in a reference cycle after it was frozen is freed at every fortieth module: to look at all takes
    two seconds.
    """
    if not next(modules_run) % 40:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tensors are looked for among what is not frozen: the objects of this module.

    Each search and each program of a plan looks a few times, which takes a quarter of a second each
    with all objects of a long run.
    """
    monkeypatch.setattr(tensor_names, "_objects", gc.get_objects)


@pytest.fixture
def num_devices() -> int:
    """How many devices there are."""
    return NUM_DEVICES


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """The same seed and the same settings for each test, whichever ran before it."""
    torch.manual_seed(0)
    yield
    reset()
