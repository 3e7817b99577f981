"""Writes of lists of tensors, and of `out=`, count for autograd as those of eager torch do."""

import re
from typing import Any

import pytest
import torch

import spmd_core as spmd

aten = torch.ops.aten
IN_PLACE_OF_LISTS = [
    getattr(getattr(aten, name), overload)
    for name in sorted(
        {
            full.removeprefix("aten::").split(".")[0]
            for full in torch._C._dispatch_get_all_op_names()
        }
    )
    if name.startswith("_foreach_") and name.endswith("_")
    for overload in getattr(aten, name).overloads()
]


def given(kind: str, name: str, device: str) -> Any:
    """An argument of a foreach operation: two small tensors, or numbers for them."""
    if name == "scalars" and kind == "Tensor":
        return torch.tensor([0.5, 0.25])  # torch wants it on the CPU
    if kind == "List[Tensor]":
        return [torch.full((3,), 0.5, device=device), torch.full((3,), 0.25, device=device)]
    if kind == "Tensor":
        return torch.tensor(0.5, device=device)
    return [0.5, 0.25] if kind == "List[number]" else 1


def counted(func: torch._ops.OpOverload, device: str) -> list[int]:
    """How many writes of each tensor of its first argument the operation counts."""
    args = [
        given(str(a.type), a.name, device)
        for a in func._schema.arguments
        if not (a.kwarg_only or a.has_default_value())
    ]
    before = [t._version for t in args[0]]
    func(*args)
    return [t._version - b for t, b in zip(args[0], before)]


def test_in_place_operations_on_lists_count_their_writes() -> None:
    assert len(IN_PLACE_OF_LISTS) > 60
    different = {
        func.name(): (counted(func, "xla"), expected)
        for func in IN_PLACE_OF_LISTS
        if (expected := counted(func, "cpu")) != counted(func, "xla")
    }
    assert not different
    assert counted(aten._foreach_add_.Scalar, "xla") == [1, 1]


OUTS = {
    "add": lambda x, outs: torch.add(x, 1, out=outs[0]),
    "sort": lambda x, outs: torch.sort(x, out=(outs[0], torch.empty_like(x, dtype=torch.int64))),
    "matmul": lambda x, outs: torch.matmul(x[None], x[:, None], out=outs[0]),
    "kron": lambda x, outs: torch.kron(x, x[:1], out=outs[0]),
    "split_copy": lambda x, outs: torch.split_copy(x, 1, out=outs),
    "unbind_copy": lambda x, outs: torch.unbind_copy(x, out=[t.squeeze() for t in outs]),
    "foreach": lambda x, outs: aten._foreach_add.Scalar_out(list(x.split(1)), 1.0, out=outs),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_forms_count_their_writes(name: str) -> None:
    counts = []
    for device in ("cpu", "xla"):
        x = torch.arange(3.0, device=device)
        shape = {"matmul": (1, 1), "split_copy": (1,), "unbind_copy": (1,), "foreach": (1,)}
        outs = [torch.empty(shape.get(name, (3,)), device=device) for _ in range(3)]
        OUTS[name](x, outs)
        counts.append([t._version for t in outs])
    assert counts[0] == counts[1]
    assert any(counts[0]) or name == "kron"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_backward_after_an_optimizers_step_is_eager_torchs(kind: Any, fused: bool) -> None:
    """With `foreach=True` torch refuses it: the saved weights changed. Fused steps count none."""
    options = {"fused": True} if fused else {"foreach": True}
    refused = []
    for device in ("cpu", "xla"):
        w = torch.ones(3, device=device, requires_grad=True)
        loss = (w * w).sum()
        loss.backward(retain_graph=True)
        kind([w], lr=0.1, **options).step()
        try:
            loss.backward()
            refused.append("")
        except RuntimeError as error:
            refused.append("modified by an inplace operation" in str(error))
    assert refused[0] == refused[1] == ("" if fused else True)


def test_a_backward_with_a_changed_saved_tensor_raises() -> None:
    x = torch.arange(3.0, device="xla", requires_grad=True)
    y = x.exp()  # its backward needs y
    with torch.no_grad():
        torch._foreach_add_([y], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_list_of_inference_tensors_may_be_written() -> None:
    with torch.inference_mode():
        x = torch.ones(3, device="xla")
        torch._foreach_add_([x], 1.0)
    assert x.tolist() == [2.0] * 3


@pytest.mark.one_device
@pytest.mark.filterwarnings("ignore:.*runs on the host")
def test_a_plan_names_what_would_run_on_the_host(num_devices: int) -> None:
    def infer() -> None:
        x = torch.ones(4).to("xla") + 1
        host_only(x)

    with torch.library._scoped_library("spmd_test_plan", "FRAGMENT") as library:
        library.define("host_only(Tensor x) -> Tensor")
        library.impl("host_only", lambda x: x.flip(0), "CPU")
        host_only = torch.ops.spmd_test_plan.host_only
        plan = spmd.plan(infer, topology=f"cpu-{num_devices}")
        assert re.search(
            r"must run no operation on the host; spmd_test_plan::host_only has neither a lowering.*"
            r"reads a tensor's values at .*test_fallback.py:\d+. Rewrite it",
            plan.ended_by,
        )
        # Read from the host's memory: there is nothing to compute.
        assert host_only(torch.arange(3).to("xla")).tolist() == [2, 1, 0]
