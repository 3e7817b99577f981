"""Has the partitioner give two arrays the same sharding, whichever it chooses.

jax had this as `jax.experimental.shard_alike`, and dropped it. It is Shardy's operation
`sdy.sharding_group`, applied to both arrays.
"""

import functools
import itertools
from typing import Any

import jax

from spmd_core import releases

_core = releases.jax_module("jax.extend.core", "Primitive")
_ad = releases.jax_module("jax.interpreters.ad", "Zero", "deflinear2")
_mlir = releases.jax_module("jax.interpreters.mlir", "register_lowering")
_sdy = releases.jax_module("jaxlib.mlir.dialects.sdy", "ShardingGroupOp")


def shard_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays of equal shape with the same sharding. Differentiable."""
    x, y = _primitive().bind(x, y)
    return x, y


# At the first call, so that a jax without these modules can be imported.
@functools.cache
def _primitive() -> Any:
    numbers = itertools.count()

    def lower(context: Any, x: Any, y: Any) -> tuple[Any, Any]:
        group = next(numbers)
        _sdy.ShardingGroupOp(x, group)
        _sdy.ShardingGroupOp(y, group)
        return x, y

    def transpose(cotangents: Any, *given: Any) -> Any:
        x, y = cotangents
        if isinstance(x, _ad.Zero) or isinstance(y, _ad.Zero):
            return x, y
        return shard_alike(x, y)

    primitive = _core.Primitive("shard_alike")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, y: (x, y))
    _mlir.register_lowering(primitive, lower)
    _ad.deflinear2(primitive, transpose)
    return primitive
