"""A call becomes a value of the graph: the hot path, views and writes."""
