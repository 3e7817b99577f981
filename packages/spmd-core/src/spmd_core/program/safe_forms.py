"""Rewrites kernels by the rules for XLA's partitioner, in a program over several devices.

The equations of a kernel's jaxpr that have a rule (`partitioner_rules`) are rewritten; all others
stay as they are. So lowerings, jax's own library and a user's jax functions need not take the
partitioner's errors into account.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, primitives

from spmd_core.program.partitioner_rules import has_rule, rule_of
from spmd_core.program.splits import Splits


def in_safe_forms(
    function: Callable[..., Sequence[jax.Array]], arguments: Any, splits: Splits
) -> Sequence[jax.Array] | None:
    """The function's results with all rules applied; None if no rule applies.

    Args:
        function: a pure jax function.
        arguments: its one argument, a tree of arrays.
        splits: how the traced program splits dims.
    """
    closed = jax.make_jaxpr(function)(arguments)
    if not _has_rule(closed.jaxpr, splits):
        return None
    return _evaluate(closed, jax.tree.leaves(arguments), splits)


def _has_rule(jaxpr: Jaxpr, splits: Splits) -> bool:
    return any(_is_ruled(eqn, splits) for eqn in jaxpr.eqns)


# The primitives that only call a function, each with the parameter that holds it. `scan`, `while`
# and `cond` are not among them: their functions are traced again with the rules.
_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation only calls; None for any other equation."""
    name = _CALLS.get(eqn.primitive)
    return None if name is None else eqn.params[name]


def _inner(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The functions in an equation's parameters."""
    if (inner := called(eqn)) is not None:
        return [inner]
    if eqn.primitive is primitives.scan_p:
        return [eqn.params["jaxpr"]]
    if eqn.primitive is primitives.while_p:
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    if eqn.primitive is primitives.remat_p:
        return [ClosedJaxpr(eqn.params["jaxpr"], ())]
    if eqn.primitive is primitives.linear_solve_p:
        return [eqn.params["jaxprs"].solve]
    return list(eqn.params["branches"]) if eqn.primitive is primitives.cond_p else []


def _evaluate(
    closed: ClosedJaxpr, arguments: Sequence[jax.Array], splits: Splits
) -> list[jax.Array]:
    """The function's results. Adjacent equations without rules are evaluated together."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts))
    values.update(zip(jaxpr.invars, arguments))
    outer = source_info_util.current_name_stack()

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for is_ruled, group in groupby(
        jaxpr.eqns, lambda eqn: _is_ruled(eqn, splits) or _is_scalar_conversion(eqn)
    ):
        if not is_ruled:
            _evaluate_as_is(jaxpr, list(group), values)
            continue
        for eqn in group:
            inputs = [read(x) for x in eqn.invars]
            with source_info_util.set_name_stack(outer + eqn.source_info.name_stack):
                values.update(zip(eqn.outvars, _ruled(eqn, inputs, splits)))
    return [read(x) for x in jaxpr.outvars]


def _is_ruled(eqn: JaxprEqn, splits: Splits) -> bool:
    return has_rule(eqn, splits) or any(_has_rule(x.jaxpr, splits) for x in _inner(eqn))


def _is_scalar_conversion(eqn: JaxprEqn) -> bool:
    made: Sequence[Any] = eqn.outvars
    return eqn.primitive is primitives.convert_element_type_p and not made[0].aval.shape


def _evaluate_as_is(jaxpr: Jaxpr, eqns: list[JaxprEqn], values: dict[Any, Any]) -> None:
    """Evaluates equations by jax's own interpreter, and adds their results to `values`."""
    made = [x for eqn in eqns for x in eqn.outvars if not isinstance(x, DropVar)]
    read = {x for eqn in eqns for x in eqn.invars if not isinstance(x, Literal)}
    given = [x for x in values if x in read]
    names = jaxpr.debug_info._replace(arg_names=("",) * len(given), result_paths=("",) * len(made))
    part = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=eqns, debug_info=names)
    values.update(zip(made, jaxpr_as_fun(ClosedJaxpr(part, ()))(*(values[x] for x in given))))


def _ruled(eqn: JaxprEqn, inputs: Sequence[Any], splits: Splits) -> Sequence[jax.Array]:
    rule = rule_of(eqn)
    if rule is None:
        return _with_inner_rules(eqn, inputs, splits)
    found = rule(splits, eqn, inputs)
    return [eqn.primitive.bind(*inputs, **eqn.params)] if found is None else found


def _with_inner_rules(eqn: JaxprEqn, inputs: Sequence[Any], splits: Splits) -> Sequence[jax.Array]:
    """The results of an equation whose functions are rewritten by the rules."""
    if (inner := called(eqn)) is not None:
        return _evaluate(inner, inputs, splits)
    if eqn.primitive is primitives.linear_solve_p:
        counts = eqn.params["const_lengths"]
        first = counts.matvec + counts.vecmat
        constants, right = inputs[first : first + counts.solve], inputs[sum(counts) :]
        return _evaluate(eqn.params["jaxprs"].solve, [*constants, *right], splits)
    params = dict(eqn.params)

    def rebuilt(inner: ClosedJaxpr) -> ClosedJaxpr:
        return jax.make_jaxpr(lambda *xs: _evaluate(inner, xs, splits))(*inner.in_avals)

    if eqn.primitive is primitives.remat_p:  # its function takes constants as operands
        found = rebuilt(ClosedJaxpr(params["jaxpr"], ()))
        params["jaxpr"] = _without_constants(found.jaxpr)
        return eqn.primitive.bind(*found.consts, *inputs, **params)
    for name in ("jaxpr", "cond_jaxpr", "body_jaxpr"):
        if name in params:
            params[name] = rebuilt(params[name])
    if "branches" in params:
        params["branches"] = tuple(rebuilt(branch) for branch in params["branches"])
    results: Sequence[jax.Array] = eqn.primitive.bind(*inputs, **params)
    return results


def _without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The function with its constants as its first operands."""
    operands = [*jaxpr.constvars, *jaxpr.invars]
    names = jaxpr.debug_info._replace(arg_names=("",) * len(operands))
    return jaxpr.replace(constvars=[], invars=operands, debug_info=names)
