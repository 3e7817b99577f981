"""Data loading for SPMD programs: moves batches to the device in the background and shards them.

By default each batch is one program: see `MpDeviceLoader`.
"""

from spmd_core import source_lines
from spmd_data.dataloaders import sharded_dataloader as sharded_dataloader
from spmd_data.images import TransformedSamples as TransformedSamples
from spmd_data.loader import MpDeviceLoader as MpDeviceLoader
from spmd_data.matching import InputSharding as InputSharding
from spmd_data.matching import MissingShardingError as MissingShardingError
from spmd_data.matching import OptionalKeys as OptionalKeys
from spmd_data.packing import Documents as Documents
from spmd_data.packing import PackedSequences as PackedSequences
from spmd_data.packing import Packing as Packing
from spmd_data.packing import TokenStream as TokenStream
from spmd_data.placement import ROW_MASK as ROW_MASK
from spmd_data.placement import UnevenBatch as UnevenBatch
from spmd_data.sampler import ShardedSampler as ShardedSampler
from spmd_data.sampler import Tail as Tail
from spmd_data.shard_dataset import shard_dataset as shard_dataset
from spmd_data.token_cache import TokenCache as TokenCache
from spmd_data.token_cache import cached_tokens as cached_tokens

source_lines.hide_package_of(__file__)
