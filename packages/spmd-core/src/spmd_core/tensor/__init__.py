"""`XLAShardedTensor`, the tensor class of device `xla`, and the shards of its local devices."""
