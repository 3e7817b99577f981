"""What a user holds: `XLAShardedTensor`, and the shards of its local devices."""
