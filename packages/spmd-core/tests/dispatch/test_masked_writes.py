"""`x[mask] = values` on the device, without a read of the mask; as eager torch, or an error."""

import pytest
import torch

import spmd_core as spmd


def reads():
    return spmd.metrics.counter("data_dependent_reads")


@pytest.fixture(autouse=True)
def checked_indices(monkeypatch):
    monkeypatch.setattr(spmd.config, "check_indices", True)


def written(x, key, values):
    x = x.clone()
    x[key] = values
    return x


def added(x, mask, values):
    return x.index_put((mask,), values, accumulate=True)


MASK = torch.tensor([True, False, True, True, False, False])
WHOLE = torch.arange(24).reshape(6, 4) % 3 == 0
ROWS = torch.arange(12.0).reshape(3, 4)
FORMS = {
    "number": lambda x, to: written(x, to(MASK), 2.0),
    "row": lambda x, to: written(x, to(MASK), to(ROWS[0])),
    "rows": lambda x, to: written(x, to(MASK), to(ROWS)),
    "elements of rows": lambda x, to: written(x, to(MASK), to(ROWS[:, :1])),
    "columns": lambda x, to: written(x.T, (slice(None), to(MASK)), to(ROWS.T)),
    "columns of one row": lambda x, to: written(x.T, (slice(None), to(MASK)), to(ROWS[:, 0])),
    "elements": lambda x, to: written(x, to(WHOLE), to(torch.arange(8.0))),
    "added rows": lambda x, to: added(x, to(MASK), to(ROWS)),
    "added row": lambda x, to: added(x, to(MASK), to(ROWS[:1])),
    "a view's rows": lambda x, to: written(x.view(2, 3, 4), (0, to(MASK[:3])), to(ROWS[:2])),
    "integers": lambda x, to: written(x.long(), to(MASK), to(ROWS.long())),
    "masked_scatter": lambda x, to: x.masked_scatter(to(WHOLE), to(torch.arange(8.0))),
    "masked_fill": lambda x, to: x.masked_fill(to(WHOLE), 3.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_eager_torch(name, mesh_1d):
    x = torch.arange(24.0).reshape(6, 4) - 100
    for axes in (None, ("x", None), (None, "x")):
        on_device = x.to("xla")
        if axes is not None:
            spmd.mark_sharding(on_device, mesh_1d, axes)
        before = reads(), spmd.metrics.counter("cuts")
        found = FORMS[name](on_device, lambda t: t.to("xla"))
        assert (reads(), spmd.metrics.counter("cuts")) == before
        torch.testing.assert_close(found.cpu(), FORMS[name](x, lambda t: t))


def test_gradients_are_those_of_eager_torch():
    def gradients(device):
        x = torch.arange(24.0).reshape(6, 4).to(device).requires_grad_()
        rows = ROWS.to(device).requires_grad_()
        (written(x * 2, MASK.to(device), rows * 3).square()).sum().backward()
        return x.grad.cpu(), rows.grad.cpu()

    with pytest.warns(UserWarning, match="depends on the data"):  # the rows' gradient
        ours = gradients("xla")
    for a, b in zip(ours, gradients("cpu")):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_values_is_told_at_the_next_read(count):
    x = torch.zeros(6, 4).to("xla")
    x[MASK.to("xla") | False] = torch.ones(count, 4).to("xla")
    with pytest.raises(spmd.errors.IndexRangeError):
        x.cpu()


@pytest.mark.filterwarnings("ignore:the shape of the result")
def test_another_number_of_values_is_told_at_once_where_the_host_has_the_mask():
    x = torch.zeros(6, 4).to("xla")
    with pytest.raises(RuntimeError, match="cannot be broadcast to indexing result of shape"):
        x[MASK.to("xla")] = torch.ones(2, 4).to("xla")
    x[MASK.to("xla")] = torch.ones(3, 4).to("xla")
    assert x.sum().item() == 12


def test_masks_that_change_share_a_program():
    table = torch.zeros(16, 4).to("xla")
    expected = torch.zeros(16, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        mask = torch.randint(0, 3, (16,), generator=generator) == 0
        table[mask.to("xla")] = 1.5
        expected[mask] = 1.5
        table = torch.where(mask.to("xla")[:, None], table * 2 + 1, table)
        expected[mask] = expected[mask] * 2 + 1
        spmd.sync()
    torch.testing.assert_close(table.cpu(), expected)
    assert spmd.metrics.counter("compiles") <= 2
