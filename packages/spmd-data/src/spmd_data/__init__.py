"""Data loading for SPMD programs: moves batches to the device in the background and shards them.

By default each batch is one program: see `MpDeviceLoader`.
"""

from spmd_core import source_lines
from spmd_data.loader import MpDeviceLoader as MpDeviceLoader
from spmd_data.matching import InputSharding as InputSharding
from spmd_data.matching import MissingShardingError as MissingShardingError
from spmd_data.matching import OptionalKeys as OptionalKeys
from spmd_data.placement import ROW_MASK as ROW_MASK
from spmd_data.placement import UnevenBatch as UnevenBatch

source_lines.hide_package_of(__file__)
