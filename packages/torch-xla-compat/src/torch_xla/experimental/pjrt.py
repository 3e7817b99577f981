"""Older path of names of `torch_xla.runtime`.

Lightning takes it if no distribution named torch_xla is installed.
"""

from torch_xla.core.xla_model import broadcast_master_param as broadcast_master_param
from torch_xla.runtime import addressable_device_count as addressable_device_count
from torch_xla.runtime import device_type as device_type
from torch_xla.runtime import global_device_count as global_device_count
from torch_xla.runtime import global_ordinal as global_ordinal
from torch_xla.runtime import local_ordinal as local_ordinal
from torch_xla.runtime import local_process_count as local_process_count
from torch_xla.runtime import process_count as process_count
from torch_xla.runtime import process_index as process_index
from torch_xla.runtime import set_device_type as set_device_type
from torch_xla.runtime import world_size as world_size


def using_pjrt() -> bool:
    """Whether PJRT runs the programs: always."""
    return True
