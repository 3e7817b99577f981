"""Runs every snippet of PyTorch/XLA's documents on SPMD, under torch_xla and under spmd_core.

Under torch_xla snippets are unchanged except for placeholders; under spmd_core imports are replaced
as well. A snippet is one string. For a placeholder in a document (a model's class, a loader) the
test defines a small substitute.
"""

import re

import pytest
import torch

import spmd_core as spmd

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() != 8, reason="the documents have eight devices"
)

# Replacement of each import line of the documents. The imported names stay the same.
_IMPORTS = {
    "import torch_xla.runtime as xr": "import spmd_core as xr",
    "import torch_xla.core.xla_model as xm": (
        "import spmd_core as xm\nxm.xla_device, xm.mark_step = xm.device, xm.sync"
    ),
    "import torch_xla.experimental.xla_sharding as xs": "import spmd_core as xs",
    "import torch_xla.distributed.spmd as xs": "import spmd_core as xs",
    "import torch_xla.distributed.parallel_loader as pl": "import spmd_data as pl",
    "from torch_xla.experimental.xla_sharding import Mesh": "from spmd_core import Mesh",
    "from torch_xla.experimental.xla_sharded_tensor import XLAShardedTensor": (
        "from spmd_core import XLAShardedTensor"
    ),
    "from torch_xla.distributed.spmd import HybridMesh": "from spmd_core import HybridMesh",
    "from torch_xla.distributed.spmd.debugging import visualize_tensor_sharding": (
        "from spmd_core.debugging import visualize_tensor_sharding"
    ),
    "from torch_xla.distributed.spmd.debugging import visualize_sharding": (
        "from spmd_core.debugging import visualize_sharding"
    ),
    "from torch.distributed.tensor import distribute_tensor": (
        "from spmd_core.dtensor import distribute_tensor"
    ),
    "import torch_xla.debug.profiler as xp": "from spmd_core.debugging import profiler as xp",
}


@pytest.fixture(params=["torch_xla", "spmd_core"])
def run(request, monkeypatch):
    """A function that runs a snippet with `given` names defined, and returns all names."""

    def execute(snippet: str, **given: object) -> dict[str, object]:
        if request.param == "spmd_core":
            for line in re.findall(
                r"^(?:import|from) .*torch_xla.*$|"
                r"^from torch\.distributed\.tensor import distribute_tensor$",
                snippet,
                re.M,
            ):
                snippet = snippet.replace(line, _IMPORTS[line])
            assert "torch_xla" not in snippet
        names = {"torch": torch, "nn": torch.nn, **given}
        exec(compile(snippet, "<document>", "exec"), names)
        return names

    # The documents call these functions on xm; in spmd_core they are named device and sync.
    for name in ("xla_device", "mark_step"):
        monkeypatch.setattr(spmd, name, None, raising=False)
    return execute


_MESH = """
import numpy as np
import torch_xla.runtime as xr
import torch_xla.experimental.xla_sharding as xs
import torch_xla.core.xla_model as xm
from torch_xla.experimental.xla_sharding import Mesh

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh_shape = (num_devices // 2, 2)
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, mesh_shape, ('x', 'y'))
"""


class SimpleLinear(torch.nn.Module):
    """Substitute for the documents' placeholder of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = (
            torch.nn.Linear(4, 8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def test_switching_spmd_on(run):
    run(
        "import torch_xla.runtime as xr\n"
        "# Enable PyTorch/XLA SPMD execution mode.\n"
        "xr.use_spmd()\n"
        "assert xr.is_spmd() == True\n"
    )


def test_a_mesh_and_what_it_says(run):
    names = run(_MESH + "logical = mesh.get_logical_mesh()\nshape = mesh.shape()\n")
    assert names["logical"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(names["shape"].items()) == [("x", 4), ("y", 2)]


@pytest.mark.parametrize(
    ("spec", "text"),
    [("('data', None)", "[4,1,2]"), ("(None, 'model')", "[1,2,4]"), ("('data', 'model')", "[4,2]")],
)
def test_partition_specs_of_the_introduction(run, spec, text):
    names = run(
        _MESH
        + f"""
mesh_shape = (4, 2)
mesh = Mesh(device_ids, mesh_shape, ('data', 'model'))
t = torch.randn(8, 4).to(xm.xla_device())
partition_spec = {spec}
xs.mark_sharding(t, mesh, partition_spec)
"""
    )
    assert text in names["t"].sharding_spec


def test_partial_replication(run):
    names = run(
        _MESH
        + """
mesh = Mesh(device_ids, (2, 2, 2), ('x', 'y', 'z'))
t = torch.randn(8, 4, 8).to(xm.xla_device())
partition_spec = ('x', None, 'z')
xs.mark_sharding(t, mesh, partition_spec)
input_tensor = torch.randn(8, 4).to(xm.xla_device())
# evenly shard across x and z and replicate among y
partition_spec = ('x', 'z')
xs.mark_sharding(input_tensor, mesh, partition_spec)
"""
    )
    assert names["t"].sharding_spec == "{devices=[2,1,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"
    assert (
        names["input_tensor"].sharding_spec
        == "{devices=[2,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"
    )


def test_names_of_axes_in_a_spec(run):
    names = run(
        _MESH
        + """
input_tensor = torch.randn(8, 4).to(xm.xla_device())
# Provide optional mesh axis names and use them in the partition spec
mesh = Mesh(device_ids, (4, 2), ('data', 'model'))
partition_spec = ('model', 'data')
xs.mark_sharding(input_tensor, mesh, partition_spec)
"""
    )
    assert names["input_tensor"].sharding_spec == "{devices=[2,4]0,2,4,6,1,3,5,7}"


def test_the_simple_example(run):
    run(
        """
import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import torch_xla.experimental.xla_sharding as xs
from torch_xla.experimental.xla_sharded_tensor import XLAShardedTensor
from torch_xla.experimental.xla_sharding import Mesh

# Enable XLA SPMD execution mode.
xr.use_spmd()

# Device mesh, this and partition spec as well as the input tensor shape define the individual
# shard shape.
num_devices = xr.global_runtime_device_count()
mesh_shape = (2, num_devices // 2)  # 2x4 on v3-8, 2x2 on v4-8
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, mesh_shape, ('x', 'y'))

t = torch.randn(8, 4).to(xm.xla_device())

# Mesh partitioning, each device holds 1/8-th of the input
partition_spec = (0, 1)
m1_sharded = xs.mark_sharding(t, mesh, partition_spec)
assert isinstance(m1_sharded, XLAShardedTensor) == True
# Note that the sharding annotation is also in-placed updated to t
assert t.sharding_spec == m1_sharded.sharding_spec != ''
"""
    )


def test_the_training_loop(run):
    loader = [
        (torch.randn(8, 4, device="xla"), torch.randint(2, (8,), device="xla")) for _ in range(3)
    ]
    names = run(
        _MESH
        + """
partition_spec = (0, 1)
loss_fn = nn.CrossEntropyLoss()
# Sharding annotate the linear layer weights.
model = SimpleLinear().to(xm.xla_device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
xs.mark_sharding(model.fc1.weight, mesh, partition_spec)

# Training loop
model.train()
for step, (data, target) in enumerate(loader):
  # Assumes `loader` returns data, target on XLA device
  optimizer.zero_grad()
  xs.mark_sharding(data, mesh, partition_spec)
  ouput = model(data)
  loss = loss_fn(ouput, target)
  optimizer.step()
  xm.mark_step()
""",
        SimpleLinear=SimpleLinear,
        loader=loader,
    )
    assert names["loss"].isfinite() and names["model"].fc1.weight.partition_spec == ("x", "y")


def test_data_and_model_parallel_of_the_notes(run):
    names = run(
        _MESH
        + """
mesh_shape = (4, 2)
mesh = Mesh(device_ids, mesh_shape, ('x', 'y'))

# 4-way data parallel
input = torch.randn(8, 32).to(xm.xla_device())
xs.mark_sharding(input, mesh, (0, None))

# 2-way model parallel
linear = nn.Linear(32, 10).to(xm.xla_device())
xs.mark_sharding(linear.weight, mesh, (None, 1))
output = linear(input)
"""
    )
    assert torch.allclose(
        names["output"].cpu(), names["linear"].cpu()(names["input"].cpu()), atol=1e-5
    )


def test_a_loader_that_shards(run):
    names = run(
        _MESH
        + """
import torch_xla.distributed.parallel_loader as pl
device = xm.xla_device()
input_mesh = Mesh(device_ids, (8, 1), ('data', 'model'))
# MpDeviceLoader returns ParallelLoader.per_device_loader as iterator
train_loader = pl.MpDeviceLoader(
    train_loader,  # wraps PyTorch DataLoader
    device,
    # assume 4d input and we want to shard at the batch dimension.
    input_sharding=xs.ShardingSpec(input_mesh, ('data', None, None, None)))
batches = list(train_loader)
""",
        train_loader=torch.utils.data.DataLoader(torch.randn(16, 3, 4, 4), batch_size=8),
    )
    assert [b.sharding_spec for b in names["batches"]] == ["{devices=[8,1,1,1]0,1,2,3,4,5,6,7}"] * 2


def test_a_sharding_for_each_key(run):
    names = run(
        _MESH
        + """
import torch_xla.distributed.parallel_loader as pl
device = xm.xla_device()
input_mesh = Mesh(device_ids, (8, 1), ('data', 'model'))
train_loader = pl.MpDeviceLoader(
    train_loader,
    device,
    # specify different sharding for each input of the batch.
    input_sharding={
      'x': xs.ShardingSpec(input_mesh, ('data', None, None, None)),
      'y': xs.ShardingSpec(input_mesh, ('data', None))
    }
)
batch = next(iter(train_loader))
""",
        train_loader=torch.utils.data.DataLoader(
            [{"x": torch.ones(3, 4, 4), "y": torch.ones(2)}] * 8, batch_size=8
        ),
    )
    assert names["batch"]["x"].partition_spec == ("data", None, None, None) and names["batch"][
        "y"
    ].partition_spec == ("data", None)


def test_a_hybrid_mesh(run):
    names = run(
        """
from torch_xla.distributed.spmd import HybridMesh

# This example is assuming 2 slices of v4-8.
ici_mesh_shape = (1, 4, 1) # (data, fsdp, tensor)
dcn_mesh_shape = (2, 1, 1)

mesh = HybridMesh(ici_mesh_shape, dcn_mesh_shape, ('data','fsdp','tensor'))
"""
    )
    assert list(names["mesh"].shape().items()) == [("data", 2), ("fsdp", 4), ("tensor", 1)]


def test_dtensor(run):
    names = run(
        """
import torch
from torch.distributed.tensor import DeviceMesh, Shard
from torch.distributed.tensor import distribute_tensor

# distribute_tensor works with the xla backend
mesh = DeviceMesh("xla", list(range(world_size)))
big_tensor = torch.randn(1000, 88)
my_dtensor = distribute_tensor(big_tensor, mesh, [Shard(0)])
""",
        world_size=8,
    )
    assert names["my_dtensor"].sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert torch.equal(names["my_dtensor"].cpu(), names["big_tensor"])


def test_activation_sharding_by_operator(run):
    names = run(
        _MESH
        + """
output = torch.randn(8, 4).to(xm.xla_device()) * 2
# Activation output sharding
device_ids = [i for i in range(num_devices)] # List[int]
mesh_shape = [num_devices//2, 2] # List[int]
axis_names = "('data', 'model')" # string version of axis_names
partition_spec = "('data', 'model')" # string version of partition spec
output = torch.ops.xla.dynamo_mark_sharding(
    output, device_ids, mesh_shape, axis_names, partition_spec)
"""
    )
    assert names["output"].sharding_spec == "{devices=[4,2]0,1,2,3,4,5,6,7}"


def test_drawing_a_tensors_sharding(run, capsys):
    names = run(
        _MESH
        + """
import rich

# Here, mesh is a 2x2 mesh with axes 'x' and 'y'
t = torch.randn(8, 4, device='xla')
xs.mark_sharding(t, mesh, ('x', 'y'))

# A tensor's sharding can be visualized using the `visualize_tensor_sharding` method
from torch_xla.distributed.spmd.debugging import visualize_tensor_sharding
generated_table = visualize_tensor_sharding(t, use_color=False)
"""
    )
    assert "CPU 5" in capsys.readouterr().out and type(names["generated_table"]).__name__ == "Table"


def test_drawing_a_text(run, capsys):
    run(
        """
from torch_xla.distributed.spmd.debugging import visualize_sharding
sharding = '{devices=[2,2]0,1,2,3}'
generated_table = visualize_sharding(sharding, use_color=False)
"""
    )
    assert "CPU 3" in capsys.readouterr().out
