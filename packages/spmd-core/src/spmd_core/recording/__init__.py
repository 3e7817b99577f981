"""Records calls of torch operations as values of the graph: the hot path, views and writes."""
