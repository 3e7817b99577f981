"""Older path of `torch_xla._internal.tpu`.

Lightning takes it if no distribution named torch_xla is installed.
"""

from torch_xla._internal.tpu import num_available_chips as num_available_chips
from torch_xla._internal.tpu import num_available_devices as num_available_devices
from torch_xla._internal.tpu import version as version
