"""Several processes: how they start, which of them this is, and how all stop after one step."""

from spmd_core.runtime.devices import device_attributes as device_attributes
from spmd_core.runtime.processes import (
    addressable_runtime_device_count as addressable_runtime_device_count,
)
from spmd_core.runtime.processes import is_master as is_master
from spmd_core.runtime.processes import local_process_count as local_process_count
from spmd_core.runtime.processes import process_count as process_count
from spmd_core.runtime.processes import process_index as process_index
from spmd_core.runtime.startup import coordinator_address as coordinator_address
from spmd_core.runtime.startup import device_type as device_type
from spmd_core.runtime.startup import initialize as initialize
from spmd_core.runtime.stopping import request_stop as request_stop
from spmd_core.runtime.stopping import should_stop as should_stop
from spmd_core.runtime.stopping import stop_on_signals as stop_on_signals
from spmd_core.runtime.stopping import was_preempted as was_preempted
