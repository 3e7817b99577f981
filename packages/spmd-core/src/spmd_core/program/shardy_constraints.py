"""Sharding constraints with open dims and priorities.

jax's own constraint closes each dim that has axes, and knows no priorities. Shardy has both (its
user priorities), in the operation `sdy.sharding_constraint`, which these functions write.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd_core import releases

_core = releases.jax_module("jax.extend.core", "Primitive")
_mlir = releases.jax_module("jax.interpreters.mlir", "register_lowering")
_sdy = releases.jax_module(
    "jaxlib.mlir.dialects.sdy",
    "AxisRefAttr",
    "DimensionShardingAttr",
    "MeshAttr",
    "MeshAxisAttr",
    "ShardingConstraintOp",
    "TensorShardingAttr",
)

# The primitive's name in a jaxpr.
SHARDY_CONSTRAINT = "spmd_shardy_constraint"


def constrain(
    x: jax.Array, named: NamedSharding, open_dims: tuple[int, ...], priority: int
) -> jax.Array:
    """A constraint to the sharding; the partitioner may split the open dims further.

    Args:
        x: an array whose dims the sharding splits evenly.
        named: the sharding.
        open_dims: the dims that are not closed.
        priority: of all axes of the sharding; 0 is propagated first.
    """
    constraint: Any = _constraint()
    result: jax.Array = constraint.bind(x, sharding=named, open_dims=open_dims, priority=priority)
    return result


# At the first call, so that a jax without these modules can be imported.
@functools.cache
def _constraint() -> Any:
    def lower(
        context: Any, x: Any, *, sharding: NamedSharding, open_dims: tuple[int, ...], priority: int
    ) -> Any:
        ndim = len(context.avals_in[0].shape)
        entries = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
        dims = []
        for dim, entry in enumerate(entries):
            axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            dims.append(
                _sdy.DimensionShardingAttr.get(
                    [_sdy.AxisRefAttr.get(axis) for axis in axes],
                    is_closed=dim not in open_dims,
                    priority=priority if axes and priority else None,  # 0 is Shardy's default
                )
            )
        mesh = [_sdy.MeshAxisAttr.get(name, size) for name, size in sharding.mesh.shape.items()]
        layout = _sdy.TensorShardingAttr.get(_sdy.MeshAttr.get(mesh), dims)
        return _sdy.ShardingConstraintOp(x, layout).results

    primitive = _core.Primitive(SHARDY_CONSTRAINT)
    primitive.def_abstract_eval(lambda x, **parameters: x)
    primitive.def_impl(lambda x, **parameters: x)
    _mlir.register_lowering(primitive, lower)
    return primitive
