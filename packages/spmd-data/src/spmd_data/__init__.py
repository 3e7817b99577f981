"""Batches for sharded programs: moved to the device in the background, sharded on the way, one program per batch."""

from spmd_core import source as _source
from spmd_data.loader import MpDeviceLoader as MpDeviceLoader
from spmd_data.placement import InputSharding as InputSharding
from spmd_data.placement import MissingShardingError as MissingShardingError
from spmd_data.placement import UnevenBatch as UnevenBatch

_source.hide_package_of(__file__)
