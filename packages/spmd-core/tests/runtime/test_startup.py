"""Settings that must come before the first use of the devices, mostly in separate processes."""

import os
import socket
import time
from pathlib import Path

import fresh
import pytest
from jax._src import clusters

import spmd_core as spmd
from spmd_core.runtime import startup

SOURCE = str(Path(spmd.__file__).parent.parent)


def run(code, **environment):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_DEVICE", "WORLD_SIZE", "RANK", "MASTER_ADDR", "JAX_PLATFORMS")
    }
    env |= {"PYTHONPATH": SOURCE, **environment}
    result = fresh.run(["-c", code], env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_device_type_is_set_before_the_first_use(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")  # the CPU devices are in use already
    assert startup.device_type() == "CPU"
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"it is CPU and set_device_type\('TPU'\) came later. Call set_device_type at the top",
    ):
        startup.set_device_type("tpu")
    with pytest.raises(ValueError, match=r"one of CPU, TPU, CUDA, ROCM; got 'QUANTUM'. Pass one"):
        startup.set_device_type("QUANTUM")
    startup.set_device_type("CPU")
    assert os.environ["PJRT_DEVICE"] == "CPU"


def test_the_device_type_decides_the_platform():
    code = """
from spmd_core.runtime import devices, startup
startup.set_device_type("TPU")
print(startup.device_type(), devices.is_started())
startup.set_device_type("CPU")
print(startup.device_type(), devices.is_started(), devices.platform(), startup.device_type())
"""
    assert run(code).splitlines() == ["TPU False", "CPU False cpu CPU"]


@pytest.mark.parametrize("platform", ["cuda", "nosuch"])
def test_a_platform_that_jax_cannot_start_is_named_with_the_cure(platform):
    """For "cuda", where no plugin has it, jax raises an AssertionError without a text."""
    code = f"""
import jax, spmd_core as spmd
jax.config.update("jax_platforms", {platform!r})
try:
    spmd.global_runtime_device_count()
except spmd.errors.SpmdError as error:
    print(error)
"""
    (text,) = run(code).splitlines()
    assert text.startswith("JAX_PLATFORMS, or the default of jax, asks for a platform that jax")
    assert text.endswith("Unset it, or install jax for that platform.") and ": ." not in text


def test_processes_join_before_the_first_use():
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"the devices are in use and spmd\.distributed\.initialize\(\) came later",
    ):
        startup.initialize("localhost:1", 1, 0)


def test_who_joins_is_checked_first(monkeypatch):
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    with pytest.raises(
        ValueError, match=r"'host:port'; got 'localhost'. Write for instance '10.0.0.1:12355'"
    ):
        startup.initialize("localhost", 2, 0)
    for address in ("localhost:0", "localhost:65536", ":1", "localhost:1.5", 5):
        with pytest.raises(ValueError, match=r"'host:port'; got .*\. Write for instance"):
            startup.initialize(address, 2, 0)
    for name, text in (("WORLD_SIZE", "many"), ("RANK", "-1")):
        with monkeypatch.context() as context:
            context.setenv("WORLD_SIZE", "2")
            context.setenv("RANK", "0")
            context.setenv(name, text)
            message = rf"{name} is a whole number that the launcher sets, from 0; got '{text}'\. "
            with pytest.raises(spmd.errors.SpmdError, match=message + "Correct it or unset it"):
                startup.initialize()
    with pytest.raises(
        ValueError, match=r"got process 2 of 2. Give each process its own number, from 0"
    ):
        startup.initialize("localhost:1", 2, 2)
    monkeypatch.setattr(
        "jax.distributed.initialize",
        lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("nobody answers")),
    )
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"got coordinator localhost:1, process 1 of 2: nobody answers. Give all three",
    ):
        startup.initialize("localhost:1", 2, 1)


def test_torchrun_says_who_joins(monkeypatch):
    seen = []
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    monkeypatch.setattr(startup, "_coordinator", None)
    monkeypatch.setattr(
        "jax.distributed.initialize", lambda *args, **kwargs: seen.append((args, kwargs))
    )
    for name, value in {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "77",
        "WORLD_SIZE": "4",
        "RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)
    startup.initialize(timeout_s=5)
    assert startup.coordinator_address() == "10.0.0.1:77"
    assert seen == [
        (
            ("10.0.0.1:77", 4, 3, None, "deactivate"),
            {
                "initialization_timeout": 5,
                "heartbeat_timeout_seconds": 30,
                "coordinator_bind_address": None,
            },
        )
    ]


SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07,09-11],other2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
}
# The pods of docs/launch/jobset.yaml.
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "train-host-0-0.train",
    "WORLD_SIZE": "2",
    "RANK": "1",
}
TPU_POD = {"TPU_WORKER_HOSTNAMES": "localhost,other", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        # jax's port is made from the job's number; a task has one of the host's GPUs.
        (SLURM, ("node07:61441", 8, 5, [1])),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_GPUS_ON_NODE": "4"},
            ("node07:61441", 8, 5, [0, 1, 2, 3]),
        ),
        (OPEN_MPI | {"MASTER_ADDR": "host0"}, ("host0:12355", 8, 5, [1])),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, ("127.0.0.1:12355", 8, 5, [1])),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.1.0.1:34911"},
            ("10.96.0.1:62624", 8, 5, [1]),
        ),
        (TORCHRUN, ("host0:29500", 8, 5, [1])),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ("host0:29500", 8, 5, None)),
        (KUBERNETES, ("train-host-0-0.train:12355", 2, 1, None)),
        (TPU_POD, (f"localhost:{clusters.cloud_tpu_cluster.coordinator_port}", 2, 1, None)),
    ],
    ids=[
        *("slurm", "slurm, a task per host", "open mpi 5", "open mpi 5, one host", "open mpi 4"),
        *("torchrun", "torchrun, a process per host", "kubernetes", "tpu pod"),
    ],
)
def test_launchers_say_who_joins(environment, found, monkeypatch):
    joined = []

    def join(
        *given, initialization_timeout, heartbeat_timeout_seconds, coordinator_bind_address=None
    ):
        assert coordinator_bind_address is None  # of process 0 alone
        # What jax does with them, before it connects.
        *given, method = given
        if method != "deactivate":
            given = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                *given, method, initialization_timeout
            )
        joined.append(tuple(given))

    for name in {**SLURM, **OPEN_MPI, **TORCHRUN}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for module in (clusters.cluster, clusters.cloud_tpu_cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", environment is TPU_POD)
    monkeypatch.setattr(
        clusters.cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda _: None
    )
    # Not a virtual machine of its own, of which a server knows.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    monkeypatch.setattr(startup, "_coordinator", None)
    monkeypatch.setattr("jax.distributed.initialize", join)
    startup.initialize(timeout_s=5)
    assert joined == [found]


def test_process_0_listens_where_it_was_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        taken.listen()
        with pytest.raises(
            spmd.errors.SpmdError,
            match=rf"a port that is free; got {address}, which another program has. End it",
        ):
            startup._bind_address(address)
    assert startup._bind_address(address) == address  # as the error says
    assert startup._bind_address(f"localhost:{port}") in (address, f"[::1]:{port}")
    # Addresses of other hosts, and names that nobody knows: jax's choice, all of this host's.
    for other in (f"192.0.2.1:{port}", f"no-such-host.invalid:{port}"):
        assert startup._bind_address(other) is None


def test_a_port_that_is_taken_anywhere_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(spmd.errors.SpmdError, match=r"got no-such-host.invalid:[0-9]+, which"):
            startup._bind_address(f"no-such-host.invalid:{taken.getsockname()[1]}")


def test_jaxs_own_variable_says_where_process_0_listens(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:1")
    assert startup._bind_address("127.0.0.1:12355") is None


def test_who_waits_for_others_to_join_says_so(monkeypatch, capsys):
    monkeypatch.setattr(spmd.config, "warn_process_after_s", 0.01)
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def join(*given, **options):
        time.sleep(0.2)
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr("jax.distributed.initialize", join)
    with pytest.raises(spmd.errors.SpmdError, match=r"must find each other; .* DEADLINE"):
        startup.initialize("127.0.0.1:12355", 2, 1, timeout_s=5)
    assert capsys.readouterr().err == (
        "spmd_core: process 1 of 2 still waits for all to join at 127.0.0.1:12355. Start each of "
        "them, with this address and its own number; it waits for 5 s.\n"
    )


CACHED = """
import sys, torch, spmd_core as spmd
from spmd_core.runtime import startup
spmd.simulate(2)
spmd.global_runtime_device_count()
startup.initialize_cache(sys.argv[1], readonly={readonly})
print(((torch.ones(3, device="xla") * {number}).sin().sum() + 1).item() != 0)
"""


def cached(folder, number, readonly):
    return run(
        "import sys; sys.argv = ['', "
        + repr(str(folder))
        + "]\n"
        + CACHED.format(number=number, readonly=readonly),
        SPMD_CACHE_DIR="",
    )


def test_the_folder_of_compiled_programs(tmp_path):
    assert cached(tmp_path, 2, readonly=False) == "True\n"
    written = {p.name for p in tmp_path.rglob("*-cache")}
    assert written
    # True instead of 2 makes another program; a read-only folder does not get it.
    assert cached(tmp_path, True, readonly=True) == "True\n"
    assert {p.name for p in tmp_path.rglob("*-cache")} == written
    assert cached(tmp_path, True, readonly=False) == "True\n"
    assert {p.name for p in tmp_path.rglob("*-cache")} > written


def test_the_folder_is_chosen_before_the_first_program(tmp_path):
    spmd.sync()
    import torch  # noqa: PLC0415  # only this test runs a program here

    torch.ones(2, device="xla").tolist()
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"a program has run and initialize_cache\(.*\) came later. Call it at the top",
    ):
        startup.initialize_cache(tmp_path)
