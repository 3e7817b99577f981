"""The jax functions whose layouts `benchmarks.partitioner.jax_functions` tries, by primitive.

Together they have every primitive of jax that XLA's partitioner splits in a way of its own, and
each of jax's loops, calls and transformations around some of them. Each takes float64 and int64
arrays. What is not determined (signs of eigenvectors, the order of equal keys) does not leave them.
"""

from collections.abc import Mapping

from benchmarks.partitioner.jax_calls.call import JaxCall
from benchmarks.partitioner.jax_calls.control import CONTROL, RANDOM
from benchmarks.partitioner.jax_calls.indexing import GATHERS, SCATTERS, SLICES
from benchmarks.partitioner.jax_calls.products import CONVOLUTIONS, LINALG, PRODUCTS
from benchmarks.partitioner.jax_calls.reductions import REDUCTIONS, RUNNING, SORTS, WINDOWS
from benchmarks.partitioner.jax_calls.shapes import SHAPES

CALLS: Mapping[str, JaxCall] = {
    name: call
    for table in (
        *(SLICES, GATHERS, SCATTERS, RUNNING, SORTS, REDUCTIONS, WINDOWS),
        *(CONVOLUTIONS, PRODUCTS, SHAPES, LINALG, RANDOM, CONTROL),
    )
    for name, call in table.items()
}
