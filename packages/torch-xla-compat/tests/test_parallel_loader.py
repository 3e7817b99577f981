"""Tests the loaders: sharded batches on the device, steps between batches, types of errors."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu

text = torch_xla._XLAC._get_xla_sharding_spec
N = xr.global_runtime_device_count()
BATCH = {"x": torch.randn(16, 128), "y": torch.randn(16, 8, 2)}


def batches(batch, spec=None, **arguments):
    return pl.MpDeviceLoader([batch], torch_xla.device(), input_sharding=spec, **arguments)


@pytest.fixture
def mesh():
    return xs.get_1d_mesh("data")


def test_one_spec_for_a_tensor(mesh):
    (batch,) = batches(BATCH["x"], xs.ShardingSpec(mesh, ("data", None)))
    assert text(batch) == str(mesh.get_op_sharding(("data", None))) and torch.equal(
        batch.cpu(), BATCH["x"]
    )


def test_a_spec_for_each_key(mesh):
    specs = {
        "x": xs.ShardingSpec(mesh, ("data", None)),
        "y": xs.ShardingSpec(mesh, ("data", None, None)),
        "unused": None,
    }
    (batch,) = batches(BATCH, specs)
    assert text(batch["x"]) == str(mesh.get_op_sharding((0, None))) and text(batch["y"]) == str(
        mesh.get_op_sharding((0, None, None))
    )


def test_none_for_a_key_is_replicated(mesh):
    (batch,) = batches(BATCH, {"x": xs.ShardingSpec(mesh, ("data", None)), "y": None})
    assert text(batch["y"]) == "{replicated}" and torch.equal(batch["y"].cpu(), BATCH["y"])


def test_no_sharding_is_replicated():
    (batch,) = batches(BATCH)
    assert text(batch["x"]) == text(batch["y"]) == "{replicated}" and torch.equal(
        batch["y"].cpu(), BATCH["y"]
    )
    xs.mark_sharding(batch["x"], xs.get_1d_mesh("data"), ("data", None))
    assert text(batch["x"]) == str(xs.get_1d_mesh("data").get_op_sharding((0, None)))


def test_labels_beside_images(mesh):
    ((image, label),) = batches(
        (torch.randn(8, 3, 4, 4), torch.arange(8)),
        xs.ShardingSpec(mesh, ("data", None, None, None)),
    )
    assert image.partition_spec == ("data", None, None, None) and label.tolist() == list(range(8))


@pytest.mark.skipif(N == 1, reason="one device divides everything")
def test_a_mini_batch_that_does_not_divide_is_a_runtime_error_from_next(mesh):
    rows, spec = torch.ones(N + 1, 2), xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    for batch, specs in ((rows, spec), ({"x": rows}, {"x": spec})):
        with pytest.raises(
            RuntimeError,
            match=rf"must be divisible by local runtime device count. "
            rf"Per host input data shape is \({N + 1}, 2\)",
        ):
            next(iter(batches(batch, specs)))
    label, row = torch.ones(N + 1), torch.ones(N, 2)
    assert len(next(iter(batches((row, label), spec)))) == 2, "the spec does not apply to the label"


def test_all_arguments_of_torch_xla_are_accepted(mesh):
    spec = xs.ShardingSpec(mesh, ("data", None))
    arguments = {
        "loader_prefetch_size": 16,
        "device_prefetch_size": 4,
        "host_to_device_transfer_threads": 2,
        "batchdim": 0,
        "batches_per_execution": 2,
    }
    rows = [torch.full((16, 2), float(index)) for index in range(6)]
    loaders = (
        pl.MpDeviceLoader(rows, "xla", input_sharding=spec, **arguments),
        pl.ParallelLoader(rows, ["xla"], input_sharding=spec, **arguments).per_device_loader("xla"),
    )
    for loader in loaders:
        assert [batch[0, 0].item() for batch in loader] == list(range(6))


def test_a_key_with_a_sharding_may_be_absent(mesh):
    spec = xs.ShardingSpec(mesh, ("data", None))
    (batch,) = batches({"x": BATCH["x"]}, {"x": spec, "absent": spec})
    assert batch["x"].partition_spec == ("data", None)


def test_a_loader_with_a_state_is_never_read_ahead():
    class Stateful:
        given = 0

        def __iter__(self):
            for index in range(4):
                self.given += 1
                yield torch.tensor([index])

        def state_dict(self):
            return {"given": self.given}

    loader = pl.MpDeviceLoader(Stateful(), "xla", device_prefetch_size=4)
    for index, batch in enumerate(loader):
        assert batch.item() == index and loader.state_dict() == {"given": index + 1}


def test_a_missing_key_is_a_key_error_from_next(mesh):
    iterator = iter(batches(BATCH, {"x": xs.ShardingSpec(mesh, ("data", None))}))
    with pytest.raises(
        KeyError, match=r"Keys: \['y'\] are missing from input_sharding\..*Add them, with None"
    ):
        next(iterator)


def test_a_batch_that_is_no_dict_is_a_value_error_from_next(mesh):
    iterator = iter(batches(BATCH["x"], {"x": xs.ShardingSpec(mesh, ("data", None))}))
    with pytest.raises(
        ValueError,
        match=r"input batch should be a dict when input sharding is a dict\..*"
        r"got a batch of type Tensor",
    ):
        next(iterator)


def test_an_error_of_the_wrapped_loader_comes_from_next():
    def fails():
        yield torch.ones(2)
        raise OSError("no such file")

    iterator = iter(pl.MpDeviceLoader(fails(), "xla"))
    assert next(iterator).tolist() == [1.0, 1.0]
    with pytest.raises(OSError, match="no such file"):
        next(iterator)


def test_length_and_a_fresh_iteration_each_time():
    loader = pl.MpDeviceLoader(
        xu.SampleGenerator(data=(torch.ones(2), torch.zeros(2)), sample_count=3), "xla"
    )
    assert (
        len(loader) == 3 and [len(batch) for batch in loader] == [2] * 3 and len(list(loader)) == 3
    )


@pytest.mark.parametrize(("per_execution", "steps"), [(1, 4), (2, 2)])
def test_a_step_for_each_batch(per_execution, steps):
    loader = pl.MpDeviceLoader(
        xu.SampleGenerator(torch.ones(2), 4),
        "xla",
        batches_per_execution=per_execution,
        loader_prefetch_size=4,
    )
    total = torch.zeros(2, device="xla")
    met.clear_all()
    for x in loader:
        total += x
    assert (
        met.counter_value("ExecuteReplicated") == steps and met.counter_value("MarkStep") == steps
    )
    assert total.tolist() == [4.0, 4.0]


def test_parallel_loader(mesh):
    loader = pl.ParallelLoader(
        [BATCH["x"]], [torch_xla.device()], input_sharding=xs.ShardingSpec(mesh, ("data", None))
    )
    iterator = loader.per_device_loader(torch_xla.device())
    assert isinstance(iterator, pl.PerDeviceLoader) and iter(iterator) is iterator
    assert text(iterator.next()) == str(mesh.get_op_sharding((0, None)))
    with pytest.raises(StopIteration):
        iterator.next()
    loader.close()
    with pytest.raises(RuntimeError, match="a loader serves the devices that it was made for"):
        loader.per_device_loader("cpu")


def test_unknown_arguments_are_refused():
    with pytest.raises(
        TypeError,
        match=r"MpDeviceLoader takes .*input_sharding.*; got prefetch\. "
        r"Remove what is not in the list",
    ):
        pl.MpDeviceLoader([], "xla", prefetch=1)


def test_arguments_may_be_changed_before_an_iteration(mesh):
    loader = batches(BATCH["x"])
    loader._parallel_loader_kwargs["input_sharding"] = xs.ShardingSpec(mesh, ("data", None))
    assert next(iter(loader)).partition_spec == ("data", None)


def test_public_attributes_are_the_wrapped_loaders():
    loader = pl.MpDeviceLoader(DataLoader(torch.arange(4), batch_size=2), torch_xla.device())
    assert (
        loader.batch_size == 2
        and torch.equal(loader.dataset, torch.arange(4))
        and not hasattr(loader, "state_dict")
    )
    assert [batch.tolist() for batch in copy.copy(loader)] == [[0, 1], [2, 3]]
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'rows'"):
        _ = loader.rows
    with pytest.raises(
        AttributeError, match="'MpDeviceLoader' object has no attribute '_index_sampler'"
    ):
        _ = loader._index_sampler  # exists on a DataLoader, but private names are not delegated
