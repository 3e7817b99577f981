"""Views share storage: a write through one chain shows in all others, exactly as on the CPU."""

import pytest
import torch
from tiers import crossed

import spmd_core as spmd

pytestmark = pytest.mark.one_device

WRITES = {
    "view(-1).add_": lambda x: x.view(-1).add_(1),
    "t()[0] =": lambda x: x.t().__setitem__(0, 5),
    "detach().fill_": lambda x: x.detach().fill_(0),
    "data.mul_": lambda x: x.data.mul_(3),
    "select.copy_": lambda x: x[1].copy_(torch.tensor([7.0, 8, 9, 10]).to(x.device)),
    "slice step": lambda x: x[:, ::2].zero_(),
    "transpose.slice": lambda x: x.transpose(0, 1)[1:3].mul_(2),
    "unsqueeze.squeeze": lambda x: x.unsqueeze(0).squeeze(0)[2].add_(4),
    "diagonal": lambda x: x.diagonal().fill_(-1),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 1).add_(10),
    "permute.view": lambda x: x.permute(1, 0).contiguous().view(-1).add_(1),
    "chunk": lambda x: x.chunk(2, dim=1)[1].add_(2),
    "split": lambda x: x.split([1, 2], dim=0)[1].add_(2),
    "unbind": lambda x: x.unbind(0)[2].sub_(1),
    "narrow": lambda x: x.narrow(1, 1, 2).exp_(),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].add_(1),
    "masked": lambda x: x.masked_fill_(x > 5, 0.5),
    "boolean": lambda x: x.__setitem__(x > 5, 0.25),
    "index": lambda x: x.__setitem__(
        (torch.tensor([0, 2]).to(x.device), torch.tensor([1, 1]).to(x.device)), 9.0
    ),
    "index_add_": lambda x: x.index_add_(
        0, torch.tensor([0, 0]).to(x.device), torch.ones(2, 4).to(x.device)
    ),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "out of a view": lambda x: torch.mul(x[0], 2, out=x[1]),
    "flatten of a slice": lambda x: x[1:].view(-1)[3:6].neg_(),
}


@pytest.mark.parametrize(("pending", "name"), crossed([True, False], [*WRITES]))
def test_write_through_a_view(name, pending):
    cpu = torch.arange(12.0).view(3, 4)
    xla = cpu.to("xla") + (0 if pending else torch.zeros((), device="xla"))
    if not pending:
        spmd.sync()
    others = [(x.view(-1)[3:], x.t(), x[1]) for x in (cpu, xla)]
    WRITES[name](cpu)
    WRITES[name](xla)
    torch.testing.assert_close(xla.cpu(), cpu)
    for mine, right in zip(others[1], others[0]):
        torch.testing.assert_close(mine.cpu(), right)
    torch.testing.assert_close((others[1][1] * 2).cpu(), others[0][1] * 2)


def test_writing_through_an_expanded_view_is_refused():
    x = torch.ones(3, 1, device="xla").expand(3, 4)
    with pytest.raises(RuntimeError, match=r"single memory location\. Please clone\(\)"):
        x.add_(1)
    assert x.clone().add_(1).tolist() == [[2.0] * 4] * 3
    with pytest.raises(RuntimeError, match=r"strides \(1, 1\) several elements share"):
        torch.zeros(6, device="xla").unfold(0, 3, 1).add_(1)


def test_as_strided_stays_inside_the_storage():
    with pytest.raises(RuntimeError, match=r"inside the storage.*element 6 of 6"):
        torch.zeros(6, device="xla").as_strided((2, 2), (3, 3), 0)


def test_views_survive_a_cut():
    base = torch.zeros(4, device="xla")
    view = base[1:3]
    spmd.sync()
    base.add_(1)
    spmd.sync()
    view.add_(1)
    assert base.tolist() == [1, 2, 2, 1] and view.tolist() == [2, 2]


def test_gradients_through_in_place_writes_of_views():
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.view(-1)[4:].pow_(2)
        y.sum().backward()
        results.append(x.grad.cpu())
    torch.testing.assert_close(results[1], results[0])


def test_a_view_of_one_row_of_an_expanded_tensor_can_be_written():
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(4.0).to(device)
        x.expand(3, 4)[1].add_(1)
        x.unfold(0, 2, 1)[2].mul_(5)
        results.append(x.cpu())
    assert torch.equal(*results)


def test_interleaved_strides_are_written_element_by_element():
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(24.0).view(4, 6).to(device).t().contiguous().t()
        x.as_strided((2, 3), (3, 2), 1).add_(10)  # elements 1, 3, 5 and 4, 6, 8 of the storage
        results.append(x.cpu())
    assert torch.equal(*results)


OVERLAPS = {
    "shifted copy": lambda x: x[1:].copy_(x[:-1]),
    "shifted add": lambda x: x[:-1].add_(x[1:]),
    "its own transpose": lambda x: x[:9].view(3, 3).add_(x[:9].view(3, 3).t()),
    "out of the same place": lambda x: x[2:4].mul_(x[2:4]),
    "apart": lambda x: x[:3].add_(x[3:6]),
    "the whole by a part": lambda x: x[:12].addcmul_(x[:12], x[4:16]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_inputs_that_overlap_the_written_tensor_in_part_are_refused_as_on_the_cpu(name):
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(24.0).to(device)
        try:
            OVERLAPS[name](x)
        except RuntimeError as error:
            results.append("refer to a single memory location" in str(error))
        else:
            results.append(x.tolist())
    assert results[1] == results[0]


def test_large_tensors_that_overlap_in_part_are_refused():
    """Also where they are too large to ask the CPU kernel, and no smaller form shows it."""
    for n in (4, 6_000_000):
        x = torch.zeros(n, device="xla")
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            x[1:].copy_(x[:-1])
    with pytest.raises(
        RuntimeError,
        match=r"written tensor of shape \(5999999,\).*at element 1 of the s.*clone\(\) the input",
    ):
        x[1:].add_(x[:-1])
    assert x[1:5].copy_(x[:4].clone()).tolist() == [0] * 4


def test_a_long_chain_of_views():
    x = torch.arange(4.0, device="xla")
    y = x
    for _ in range(1100):  # more than Python's recursion limit
        y = y.detach().view(-1)
    (x + y).add_(y).tolist()
    assert y.storage_offset() == 0 and y.tolist() == [0, 1, 2, 3]


def test_conjugates():
    c = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2).view(2, 3)
    results = []
    for device in ("cpu", "xla"):
        x = c.clone().to(device)
        y = x.conj()
        x.mul_(2j)
        y[0].add_(1 + 1j)
        y.imag.mul_(3)
        y.as_strided((2,), (2,), 1).sub_(1j)
        y.resolve_conj().zero_()  # a copy
        y.t().resolve_conj()[0].zero_()
        x.conj().conj().real[1, 1] = 7
        results.append(
            [t.cpu().resolve_conj() for t in (x, y, y.conj(), y.imag, y.mH, x.resolve_conj())]
        )
    for got, right in zip(results[1], results[0]):
        torch.testing.assert_close(got, right)
    assert "1.-3.j" in repr(torch.tensor([1 + 3j], device="xla").conj()).replace(
        "-3.j", "-3.j"
    ).replace(" ", "")
    # The device has no lazy conjugates, so view_as_real works on one; eager torch refuses that.
    x = c.to("xla")
    torch.view_as_real(x.conj())[..., 1].add_(1)
    torch.testing.assert_close(x.cpu(), c - 1j)


def errors(function):
    found = []
    for device in ("cpu", "xla"):
        x = torch.arange(4.0).to(device).requires_grad_()
        with pytest.raises(RuntimeError) as error:
            function(x)
        found.append(str(error.value).split("[")[0])
    assert found[0] == found[1]
    return found[0]


def test_autograds_rules_for_writes_in_place():
    assert "leaf Variable" in errors(lambda x: x.add_(1))
    assert "leaf Variable" in errors(lambda x: x[1:].add_(1))

    def write_to_what_backward_needs(x, through):
        y = x * 2
        z = y * y
        through(y).add_(1)
        z.sum().backward()

    for through in (lambda y: y, lambda y: y[:2], lambda y: y.detach(), lambda y: y.view(2, 2).t()):
        assert "modified by an inplace operation" in errors(
            lambda x, through=through: write_to_what_backward_needs(x, through)
        )
    # Writes through `.data` do not count in the version counter, as in eager torch.
    grads = []
    for device in ("cpu", "xla"):
        x = torch.arange(4.0).to(device).requires_grad_()
        y = x * 2
        z = y * y
        y.data.add_(1)
        z.sum().backward()
        grads.append(x.grad.cpu())
    assert torch.equal(*grads)


def decode(device, *, steps, cut):
    cache, seen = torch.zeros(2, 16, 3, device=device), []
    for step in range(steps):
        cache[:, step] = torch.full((2, 3), float(step), device=device)
        cache[:, step : step + 1] += 1
        seen.append(cache.select(1, step).sum() + cache[:, step].storage_offset())
        cut()
    return torch.stack([s.cpu() for s in seen]), cache.cpu()


def test_a_position_that_moves_from_program_to_program_does_not_recompile():
    for right, got in zip(
        decode("cpu", steps=5, cut=lambda: None), decode("xla", steps=5, cut=spmd.sync)
    ):
        assert torch.equal(right, got)
    decode("xla", steps=8, cut=spmd.sync)
    before = spmd.metrics.counter("compiles")
    for right, got in zip(
        decode("cpu", steps=16, cut=lambda: None), decode("xla", steps=16, cut=spmd.sync)
    ):
        assert torch.equal(right, got)
    # One program for the stack of 16, and none for the positions that are new.
    assert spmd.metrics.counter("compiles") <= before + 1


def test_positions_within_one_program_stay_static():
    x = torch.arange(12.0, device="xla").view(6, 2)
    for _ in range(5):
        total = sum(x[i] * i for i in range(6))
        spmd.sync()
    assert total.tolist() == [110.0, 125.0]
    assert "dynamic" not in spmd.metrics.programs()[-1].name
    assert all(v.link.numbers == () for v in [x[i]._handle for i in range(6)])


VIEWS = {
    "view": lambda x: x.view(-1),
    "select": lambda x: x[1],
    "t": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "view_as": lambda x: x.view_as(x),
    "as_strided": lambda x: x.as_strided((2,), (1,), 1),
    "split": lambda x: x.split(2)[0],
    "unbind": lambda x: x.unbind()[1],
    "data": lambda x: x.data,
    "two views": lambda x: x.view(-1)[2:].view(5, 2),
    "unfold": lambda x: x.unfold(0, 2, 2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("made_in", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("viewed_in", [False, True], ids=["outside", "inside"])
def test_a_view_is_an_inference_tensor_if_its_base_is(view, made_in, viewed_in):
    def probe(device):
        with torch.inference_mode(made_in):
            x = torch.arange(12.0, device=device).view(4, 3)
        with torch.inference_mode(viewed_in):
            seen = view(x)
        with torch.inference_mode(made_in or viewed_in):
            seen.add_(1)
        return seen.is_inference(), seen.tolist(), x.tolist()

    assert probe("xla") == probe("cpu")


def test_an_inference_tensor_stays_one():
    def probe(device):
        p = torch.nn.Parameter(torch.ones(4, 3, device=device))
        with torch.inference_mode():
            z = torch.ones(4, 3, device=device)
            made = torch.nn.functional.linear(z, p)
            p.data[0] = 2
            turned = torch.ones(4, 3, device=device)
        with torch.inference_mode():
            turned.t_()
            turned.resize_(13)
        errors = []
        for wrong in (lambda: z.view(-1).add_(1), lambda: (p * z.view(4, 3)).sum()):
            with pytest.raises(RuntimeError, match=r"[Ii]nference") as caught:
                wrong()
            errors.append(str(caught.value).splitlines()[0])
        normal = torch.ones(2, 3, device=device)
        with torch.inference_mode():
            normal.t_()
            normal.resize_(7)
            normal.fill_(3)
        normal.add_(1)
        flags = [t.is_inference() for t in (z, made, turned, normal, z.clone())]
        return flags, errors, normal.tolist(), p.sum().item()

    assert probe("xla") == probe("cpu")


def test_data_is_replaced_in_inference_mode():
    p = torch.nn.Parameter(torch.ones(2, device="xla"))
    with torch.inference_mode():
        p.data = torch.full((3,), 2.0, device="xla")
    p.sum().backward()
    assert p.tolist() == [2.0, 2.0, 2.0] and p.grad.tolist() == [1.0, 1.0, 1.0]
