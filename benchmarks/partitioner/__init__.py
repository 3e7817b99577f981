"""Does XLA's partitioner keep the values of random small programs under random layouts?"""
