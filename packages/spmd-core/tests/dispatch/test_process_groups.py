"""Tests torch.distributed's collectives on xla tensors, with gloo, in one process and in two."""

from collections.abc import Iterator

import launched
import pytest
import torch
import torch.distributed as dist

import spmd_core as spmd
from spmd_core import metrics
from spmd_core.errors import HostFallbackError, UnsupportedOpError

# Two processes run each collective on CPU tensors and on xla tensors. Each process has its own
# devices: a process group exchanges values between processes.
PROGRAM = """
import sys, warnings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import spmd_core as spmd

folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter("ignore")
spmd.simulate(2)
store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
world, other = dist.group.WORLD, 1 - rank
cases = {}


def case(function):
    cases[function.__name__] = function
    return function


def own(device, size=4):
    return (torch.arange(float(size)) + 10 * rank).to(device)


def zeros(device, *shape):
    return torch.zeros(*shape).to(device)


@case
def broadcast(device):
    t = own(device)
    dist.broadcast(t, 1)
    return [t]


@case
def all_reduce(device):
    t = own(device)
    dist.all_reduce(t)
    return [t]


@case
def all_reduce_async_of_a_view(device):
    whole = own(device, 8)
    dist.all_reduce(whole[2:6], op=dist.ReduceOp.MAX, async_op=True).wait()
    return [whole]


@case
def all_reduce_coalesced(device):
    tensors = [own(device), own(device, 2)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def all_reduce_in_a_coalescing_manager(device):
    tensors = [own(device), own(device, 2)]
    with dist._coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    return tensors


@case
def reduce(device):
    t = own(device)
    dist.reduce(t, 0)
    return [t] if rank == 0 else []


@case
def all_gather(device):
    results = [zeros(device, 4) for _ in range(2)]
    dist.all_gather(results, own(device))
    return results


@case
def all_gather_async(device):
    results = [zeros(device, 4) for _ in range(2)]
    dist.all_gather(results, own(device), async_op=True).wait()
    return results


@case
def all_gather_into_tensor(device):
    result = zeros(device, 8)
    dist.all_gather_into_tensor(result, own(device))
    return [result]


@case
def all_gather_coalesced(device):
    results = [[zeros(device, 4), zeros(device, 2)] for _ in range(2)]
    dist.all_gather_coalesced(results, [own(device), own(device, 2)])
    return [t for part in results for t in part]


@case
def all_gather_object(device):
    objects = [None, None]
    dist.all_gather_object(objects, {"tensor": own(device)})
    return [found["tensor"] for found in objects]


@case
def gather(device):
    results = [zeros(device, 4) for _ in range(2)] if rank == 0 else None
    dist.gather(own(device), results, dst=0)
    return results or []


@case
def scatter(device):
    result = zeros(device, 4)
    dist.scatter(result, [own(device) + i for i in range(2)] if rank == 0 else None, src=0)
    return [result]


@case
def reduce_scatter(device):
    result = zeros(device, 2)
    dist.reduce_scatter(result, list(own(device).split(2)))
    return [result]


@case
def reduce_scatter_tensor(device):
    result = zeros(device, 2)
    dist.reduce_scatter_tensor(result, own(device))
    return [result]


@case
def all_to_all(device):
    results = [zeros(device, 2) for _ in range(2)]
    dist.all_to_all(results, list(own(device).split(2)))
    return results


@case
def all_to_all_single(device):
    result = zeros(device, 4)
    dist.all_to_all_single(result, own(device))
    return [result]


@case
def all_to_all_single_uneven(device):
    result = zeros(device, 4)
    sizes = [3, 1] if rank == 0 else [1, 3]
    dist.all_to_all_single(result, own(device), sizes, sizes)
    return [result]


@case
def send_and_recv(device):
    if rank == 0:
        dist.send(own(device), 1)
        return []
    t = zeros(device, 4)
    assert dist.recv(t, 0) == 0
    return [t]


@case
def recv_from_any(device):
    if rank == 0:
        dist.send(own(device), 1)
        return []
    t = zeros(device, 4)
    assert dist.recv(t) == 0
    return [t]


@case
def irecv_before_isend(device):
    t = zeros(device, 4)
    receive = dist.irecv(t, other)
    dist.isend(own(device), other).wait()
    before = receive.is_completed()
    receive.wait()
    return [t, torch.tensor([before, receive.is_completed()])]


@case
def batch_isend_irecv(device):
    t = zeros(device, 4)
    sends = dist.P2POp(dist.isend, own(device), other)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, t, other)]):
        work.wait()
    return [t]


@case
def functional_forms(device):
    return [
        functional.all_reduce(own(device), "sum", world) + 0,
        functional.all_gather_tensor(own(device), 0, world) + 0,
        functional.reduce_scatter_tensor(own(device), "sum", 0, world) + 0,
        functional.all_to_all_single(own(device), None, None, world) + 0,
        functional.broadcast(own(device), 1, world) + 0,
        *functional.all_reduce_coalesced([own(device), own(device, 2)], "sum", world),
        *functional.all_gather_into_tensor_coalesced([own(device)], world),
        *functional.reduce_scatter_tensor_coalesced([own(device)], "sum", [0], world),
    ]


@case
def functional_in_place(device):
    reduced, sent = own(device), own(device)
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(reduced, "sum", world.group_name)
    )
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.broadcast_(sent, 1, world.group_name)
    )
    return [reduced, sent]


@case
def gradient_of_all_reduce(device):
    t = own(device).requires_grad_()
    (differentiable.all_reduce(t) * 2).sum().backward()
    return [t.grad]


@case
def distributed_data_parallel(device):
    torch.manual_seed(rank)
    layer = torch.nn.Linear(4, 2).to(device)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(own(device)[None]).sum().backward()
        optimizer.step()
    return [layer.weight, layer.weight.grad, layer.bias.grad]


@case
def barrier(device):
    dist.barrier()
    return []


out = open(f"{folder}/said{rank}.txt", "w")
for name, function in cases.items():
    torch.manual_seed(0)
    try:
        want = [t.detach().clone() for t in function("cpu")]
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        print(name, "absent", file=out, flush=True)
        continue
    torch.manual_seed(0)
    found = [t.detach().cpu() for t in function("xla")]
    same = len(found) == len(want) and all(map(torch.allclose, found, want))
    print(name, "right" if same else f"{found} instead of {want}", file=out, flush=True)
dist.destroy_process_group()
"""
CASES = [line[4:].split("(")[0] for line in PROGRAM.splitlines() if line.endswith("(device):")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of the two processes found, by case."""
    folder = tmp_path_factory.mktemp("groups")
    launched.succeed(2, lambda rank, port: ["-c", PROGRAM, folder, port, rank])
    return [
        dict(line.split(" ", 1) for line in (folder / f"said{rank}.txt").read_text().splitlines())
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_find_what_cpu_tensors_find(said, name):
    found = [process[name] for process in said]
    if found == ["absent", "absent"]:
        pytest.skip("this release's gloo does not have it")
    assert found == ["right", "right"]


# One process, which is a group of its own.


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_is_counted_and_warned_of_once():
    x, result = torch.arange(3.0).to("xla"), torch.zeros(3).to("xla")
    with pytest.warns(
        UserWarning,
        match=r"c10d::allgather_ exchanges host memory between processes.*runs on the host",
    ):
        dist.all_gather([result], x)
    dist.all_gather([result], x + 1)
    assert result.tolist() == [1.0, 2.0, 3.0]
    first, second = metrics.host_fallbacks()
    assert first.op == second.op == "c10d::allgather_"
    assert first.source.startswith(f"{__file__}:") and first.source != second.source


@pytest.mark.usefixtures("group")
def test_strict_mode_refuses_a_collective():
    x = torch.ones(3).to("xla")
    with (
        spmd.strict(),
        pytest.raises(
            HostFallbackError,
            match=r"c10d::allreduce_ exchanges host memory.*Use spmd\.distributed\.initialize",
        ),
    ):
        dist.all_reduce(x)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:c10d:UserWarning")
def test_the_work_of_a_collective_has_its_results():
    x = torch.ones(3).to("xla")
    work = dist.all_reduce(x, async_op=True)
    assert work.is_completed() and work.get_future().wait()[0] is x


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:_c10d_functional:UserWarning")
def test_functional_sends_are_refused(group):
    x = torch.ones(3).to("xla")
    if not hasattr(torch.ops._c10d_functional, "isend"):
        pytest.skip("this release of torch does not have them")
    for name in ("isend", "irecv"):
        with pytest.raises(UnsupportedOpError, match=r"Use torch\.distributed\.isend and irecv"):
            getattr(torch.ops._c10d_functional, name)(x, 0, 0, group.group_name)
