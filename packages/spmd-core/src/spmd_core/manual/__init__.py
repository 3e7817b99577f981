"""Manual regions, in which code computes on one device's blocks, and their collectives."""

from spmd_core.manual.collectives import all_gather as all_gather
from spmd_core.manual.collectives import all_reduce as all_reduce
from spmd_core.manual.collectives import all_to_all as all_to_all
from spmd_core.manual.collectives import collective_permute as collective_permute
from spmd_core.manual.collectives import reduce_scatter as reduce_scatter
from spmd_core.manual.shard_map import axis_index as axis_index
