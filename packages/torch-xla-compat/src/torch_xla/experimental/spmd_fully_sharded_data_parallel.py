"""FSDP by annotation ("FSDPv2")."""

from spmd_core.fsdp import SpmdFullyShardedDataParallel as SpmdFullyShardedDataParallel
