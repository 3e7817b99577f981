"""Operations whose result shapes depend on the data.

The host reads the shape once and one warning says so. The values are gathered on the device, with
gradients. Static alternatives read nothing.
"""

import pytest
import torch
from data_dependent import both, quiet, reads, t

import spmd_core as spmd
from spmd_core.dispatch import shape_reads

pytestmark = pytest.mark.one_device
SAYS = "the shape of the result of {} depends on the data"


MASK = (True, False, True)


def put(device, where, values):
    x = torch.eye(3, device=device)
    x[where] = values
    return x


READS = {
    "nonzero": lambda d: torch.eye(3, device=d).nonzero(),
    "nonzero of a number": lambda d: torch.tensor(3.0, device=d).nonzero(),
    "nonzero of nothing": lambda d: torch.zeros(0, 2, device=d).nonzero(),
    "nonzero as a tuple": lambda d: torch.eye(3, device=d).nonzero(as_tuple=True),
    "argwhere": lambda d: torch.eye(3, device=d).argwhere(),
    "where of a condition": lambda d: torch.where(torch.eye(3, device=d) > 0),
    "masked_select": lambda d: torch.eye(3, device=d).masked_select(t(d, *MASK)),
    "masked_select, wider mask": lambda d: t(d, 1.0, 2, 3).masked_select(
        torch.eye(3, device=d) > 0
    ),
    "masked_select, out": lambda d: torch.masked_select(
        t(d, 1.0, 2, 3), t(d, *MASK), out=torch.empty(0, device=d)
    ),
    "x[mask]": lambda d: torch.eye(3, device=d)[t(d, *MASK)],
    "x[:, mask]": lambda d: torch.eye(3, device=d)[:, t(d, *MASK)],
    "x[mask, indices]": lambda d: torch.eye(3, device=d)[t(d, *MASK), t(d, 0, 1)],
    "x[whole mask]": lambda d: torch.arange(9, device=d).view(3, 3)[torch.eye(3, device=d) > 0],
    "x[bytes]": lambda d: torch.arange(3, device=d)[t(d, 1, 0, 1, dtype=torch.uint8)],
    "x[mask] = no rows": lambda d: put(d, t(d, False, False, False), torch.zeros(0, 3, device=d)),
    "bincount": lambda d: t(d, 1, 4, 1).bincount(),
    "bincount, minlength": lambda d: t(d, 1, 4, 1).bincount(minlength=8),
    "bincount, weights": lambda d: t(d, 1, 4, 1).bincount(t(d, 0.5, 1.5, 2)),
    "repeat_interleave": lambda d: t(d, 5.0, 6, 7).repeat_interleave(t(d, 2, 0, 3)),
    "repeat_interleave of counts": lambda d: torch.repeat_interleave(t(d, 2, 0, 3)),
}
REFUSED = {
    "mask of another shape": lambda d: torch.eye(3, device=d)[t(d, True, False)],
    "values of another shape": lambda d: put(d, t(d, *MASK), torch.arange(5.0, device=d)),
    "rows of another number": lambda d: put(d, t(d, *MASK), torch.zeros(3, 3, device=d)),
    "values that do not fit": lambda d: put(d, t(d, 0, 1), torch.zeros(2, device=d)),
    "mask of numbers": lambda d: torch.eye(3, device=d).masked_select(torch.eye(3, device=d)),
    "bincount of negatives": lambda d: t(d, 1, -4).bincount(),
    "bincount of floats": lambda d: t(d, 1.0).bincount(),
    "bincount of a matrix": lambda d: t(d, [1], [2]).bincount(),
    "bincount, negative length": lambda d: t(d, 1).bincount(minlength=-1),
    "bincount, other weights": lambda d: t(d, 1).bincount(t(d, 1.0, 2)),
    "negative repeats": lambda d: torch.repeat_interleave(t(d, 1, -1)),
    "repeats in a matrix": lambda d: torch.repeat_interleave(t(d, [1], [1])),
}
OUTSIDE = {
    "x[i]": lambda d: torch.arange(4, device=d)[4],
    "x[-i]": lambda d: torch.arange(4, device=d)[-5],
    "x[list]": lambda d: torch.arange(4, device=d)[[0, -5]],
    "x[tensor]": lambda d: torch.zeros(2, 4, device=d)[:, t(d, 4)],
    "x[cpu tensor]": lambda d: torch.zeros(2, 4, device=d)[torch.tensor([2])],
    "x[tensor] =": lambda d: put(d, t(d, 0, 3), 1.0),
    "gather": lambda d: torch.arange(4, device=d).gather(0, t(d, -1)),
    "scatter": lambda d: torch.arange(4, device=d).scatter(0, t(d, 4), 1),
    "scatter_": lambda d: torch.arange(4, device=d).scatter_(0, t(d, -1), 1),
    "scatter_add_": lambda d: torch.zeros(4, device=d).scatter_add_(
        0, t(d, 4), torch.ones(1, device=d)
    ),
    "index_select": lambda d: torch.arange(4, device=d).index_select(0, t(d, -1)),
    "index_fill": lambda d: torch.zeros(4, device=d).index_fill(0, t(d, -5), 1.0),
    "index_fill_, a tensor": lambda d: torch.zeros(4, device=d).index_fill_(
        0, t(d, 4), torch.ones((), device=d)
    ),
    "index_add": lambda d: torch.zeros(4, device=d).index_add(0, t(d, 4), torch.ones(1, device=d)),
    "take": lambda d: torch.arange(4, device=d).take(t(d, -5)),
    "embedding": lambda d: torch.nn.functional.embedding(t(d, 3), torch.eye(3, device=d)),
}
WRAPS = {
    "x[tensor]": lambda d: torch.arange(4, device=d)[t(d, -1, 3)],
    "x[tensor] =": lambda d: put(d, t(d, -1), 7.0),
    "take": lambda d: torch.arange(4, device=d).take(t(d, -1)),
    "index_fill": lambda d: torch.zeros(4, device=d).index_fill(0, t(d, -1), 1.0),
    "select": lambda d: torch.arange(4, device=d)[-2],
    "narrow": lambda d: torch.arange(4, device=d).narrow(0, -2, 2),
}
STATIC = {
    "where": lambda x, m: torch.where(m, x, 0),
    "masked_fill": lambda x, m: x.masked_fill(m, 2.0),
    "x[mask] = number": lambda x, m: x.clone().__setitem__(m, 2.0) or x,
    "x[mask] = 0-dim tensor": lambda x, m: x.clone().__setitem__(m, x.new_full((), 2.0)) or x,
    "x[mask] = one element": lambda x, m: x.clone().__setitem__(m, x.new_full((1,), 2.0)) or x,
    "x[row mask] = row": lambda x, m: x.clone().__setitem__(m[:, 0], x[0].clone()) or x,
    "masked_scatter": lambda x, m: x.masked_scatter(m, x.flip(0)),
    "nonzero_static": lambda x, m: torch.nonzero_static(m, size=3),
    "repeat_interleave": lambda x, m: x.repeat_interleave(m[0].long(), dim=1, output_size=1),
}


@quiet
@pytest.mark.parametrize("name", READS)
def test_read_once_and_right(name):
    before = reads()
    both(READS[name])
    assert reads() > before or "nothing" in name or "no rows" in name


@quiet
def test_combinations():
    """Read in some releases of torch, of static shape in others."""
    both(lambda d: torch.combinations(torch.arange(4, device=d)))


@quiet
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_on_the_cpu(name):
    assert isinstance(both(REFUSED[name]), Exception)


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_outside_that_the_host_knows_is_refused(name):
    assert "out of bounds" in str(both(OUTSIDE[name]))


@pytest.mark.parametrize("name", WRAPS)
def test_negative_indices_wrap_where_torchs_do(name):
    both(WRAPS[name])


def test_an_index_on_the_device_is_kept_inside(monkeypatch):
    monkeypatch.setattr(spmd.config, "check_indices", False)
    index = torch.tensor([7], device="xla") + 0
    assert torch.arange(3, device="xla")[index].tolist() == [2]
    assert torch.zeros(3, device="xla").scatter(0, index, 1.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", STATIC)
def test_static_alternatives_read_nothing(name):
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(9.0).view(3, 3).to(device)
        m = torch.eye(3).bool().to(device)
        before = reads(), spmd.metrics.counter("cuts")
        results.append(STATIC[name](x, m))
        assert (reads(), spmd.metrics.counter("cuts")) == before
    torch.testing.assert_close(results[1].cpu(), results[0])


def test_it_is_said_once_with_the_alternative_and_allowed_in_strict_mode(monkeypatch):
    monkeypatch.setattr(shape_reads, "_warned", set())
    x = torch.eye(3, device="xla")
    with spmd.strict():
        with pytest.warns(
            UserWarning, match=SAYS.format("nonzero") + r".*torch\.nonzero_static"
        ) as found:
            x.nonzero()
        assert found[0].filename == __file__
        x.nonzero()  # no second warning: pytest makes warnings errors
        with pytest.warns(UserWarning, match=SAYS.format(r"x\[mask\]") + r".*torch\.where"):
            x[x > 0].cpu()
    before = reads()
    x.nonzero()
    assert reads() == before + 1
    # Reads of a single value that the caller asks for are not counted.
    assert bool(x.sum() > 0) and x[0, 0].item() == 1 and torch.equal(x, x) and torch.allclose(x, x)
    assert not torch.equal(x, x[0]) and reads() == before + 1


@quiet
@pytest.mark.parametrize(
    "select",
    [
        lambda x, m: x[m],
        lambda x, m: x.masked_select(m),
        lambda x, m: x[m[:, 0]],
        lambda x, m: x.clone().index_put_((m,), x[m] * 3) * x,
        lambda x, m: x[m.nonzero(as_tuple=True)],
        lambda x, m: x.repeat_interleave(m[0].long() + 1, dim=1),
    ],
)
def test_gradients_flow(select):
    grads = []
    for device in ("cpu", "xla"):
        x = torch.arange(9.0).view(3, 3).to(device).requires_grad_()
        y = select(x, torch.eye(3).bool().to(device))
        (y * y).sum().backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])
