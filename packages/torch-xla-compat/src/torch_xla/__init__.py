"""PyTorch/XLA's import name over `spmd_core`, for programs written for torch_xla's SPMD mode.

They run unchanged on stock torch and jaxlib.
"""

from importlib import metadata as _metadata

from spmd_core import source_lines
from torch_xla import _absent, _losses
from torch_xla._environment import apply as _apply_environment

# The PyTorch/XLA version whose names this package provides: programs read it to find out which
# functions they may call.
__version__ = "2.9.0"

if any(_metadata.distributions(name="torch_xla")):
    raise ImportError(
        "one distribution must own the import name torch_xla; both PyTorch/XLA (torch_xla) and "
        "torch-xla-compat are installed. "
        "Remove the first and install the second again: pip uninstall torch_xla, then "
        "pip install --force-reinstall --no-deps torch-xla-compat."
    )
_apply_environment()
source_lines.hide_package_of(__file__)
_absent.install()
_losses.accept_float_targets()

from torch_xla import _XLAC as _XLAC  # noqa: E402
from torch_xla import _internal as _internal  # noqa: E402
from torch_xla import _traced  # noqa: E402
from torch_xla import amp as amp  # noqa: E402
from torch_xla import core as core  # noqa: E402
from torch_xla import debug as debug  # noqa: E402
from torch_xla import distributed as distributed  # noqa: E402
from torch_xla import experimental as experimental  # noqa: E402
from torch_xla import runtime as runtime  # noqa: E402
from torch_xla import utils as utils  # noqa: E402
from torch_xla.core import dynamo_bridge as _dynamo_bridge  # noqa: E402, F401
from torch_xla.core import xla_model as xm  # noqa: E402, F401
from torch_xla.debug import metrics as _metrics  # noqa: E402, F401
from torch_xla.debug import profiler as _profiler  # noqa: E402, F401
from torch_xla.distributed import parallel_loader as _parallel_loader  # noqa: E402, F401
from torch_xla.distributed import spmd as _spmd_names  # noqa: E402, F401
from torch_xla.distributed import xla_backend as _xla_backend  # noqa: E402, F401
from torch_xla.distributed import xla_multiprocessing as xmp  # noqa: E402, F401
from torch_xla.torch_xla import compile as compile  # noqa: E402
from torch_xla.torch_xla import device as device  # noqa: E402
from torch_xla.torch_xla import device_count as device_count  # noqa: E402
from torch_xla.torch_xla import devices as devices  # noqa: E402
from torch_xla.torch_xla import launch as launch  # noqa: E402
from torch_xla.torch_xla import manual_seed as manual_seed  # noqa: E402
from torch_xla.torch_xla import real_devices as real_devices  # noqa: E402
from torch_xla.torch_xla import save_as_stablehlo as save_as_stablehlo  # noqa: E402
from torch_xla.torch_xla import (  # noqa: E402
    save_torch_model_as_stablehlo as save_torch_model_as_stablehlo,
)
from torch_xla.torch_xla import set_custom_compile_options as set_custom_compile_options  # noqa: E402
from torch_xla.torch_xla import step as step  # noqa: E402
from torch_xla.torch_xla import sync as sync  # noqa: E402
from torch_xla.utils import utils as xu  # noqa: E402, F401

xr = runtime
_traced.install()
