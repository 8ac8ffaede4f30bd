"""The local view: `shard_map`, what it does to arguments and results, and the types of values in its body."""
