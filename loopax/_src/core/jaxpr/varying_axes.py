"""Loops that take different numbers of steps on the devices of a `shard_map`.

Nothing in their bodies may communicate: a device that has finished would keep the others waiting for ever. But where a
shared value meets a varying one, JAX marks the shared value as varying (`pvary`). The transpose of this mark is a sum
over the devices, in every step of the backward loop. So

- the inputs of such a loop are marked before the loop, and their cotangents are summed once, after the backward loop;
- marks in the body become local marks, which keep the types. The transpose of a local mark changes the type back, to
  that of a shared value, and sums nothing. Each device works on its own part of a cotangent until the loop has ended.

So types in such a body may say "shared" of values that differ. All results of the loop are typed as varying.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopax._src.core.jaxpr.own_primitives import computed
from loopax._src.core.jaxpr.util import collective_in, inner_jaxprs, map_programs, trace, weakly_cached
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    ad,
    jaxpr_as_fun,
    marked_varying,
    register,
    vary,
    varying_axes,
    with_varying_axes,
)
from loopax._src.messages import devices_message

Axes = frozenset[Any]

# The identity, of a type that varies over other axes; nothing is communicated. Its transpose is one as well, but for
# the axes in `summed`, over which it takes the place of a real mark.
retyped_p = Primitive("retyped")


def retyped(x: Any, varying: Axes, summed: Axes = frozenset()) -> Any:
    """An array as it is, typed as varying over these axes and no others."""
    return x if varying_axes(x) == varying else retyped_p.bind(x, varying=varying, summed=summed)


def _transpose(ct: Any, x: Any, *, varying: Axes, summed: Axes) -> list[Any]:
    """The cotangent of `x`, typed as `x` is: summed over the axes in `summed`, and as it is over all others.

    The one operand is `x`, in which the identity is linear. A sum over an axis is the transpose of `pvary`.
    """
    del varying
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval)]
    own = varying_axes(x.aval)
    ct = retyped(ct, own | summed)
    return [jax.linear_transpose(lambda x: vary(x, summed), x.aval)(ct)[0] if summed else ct]


register(
    retyped_p,
    impl=lambda x, **_: x,
    lowering=lambda _, x, **__: [x],
    abstract_eval=lambda x, *, varying, summed: with_varying_axes(x, varying),  # noqa: ARG005
    linear_in=[0],
    transpose=_transpose,
    batch_without_axis=lambda operands, dims, **params: (retyped_p.bind(*operands, **params), dims[0]),
)
computed[retyped_p] = lambda _: []


def unvarying(numbers: Any) -> Any:
    """Numbers of rows, typed as if all devices had the same; only where a loop is compiled.

    The body of a loop is traced for a row whose type does not vary.
    """
    return retyped(numbers, frozenset())


def differing(deciding: Sequence[Any]) -> Axes:
    """The mesh axes over which what decides on a number of steps varies; arrays or types."""
    return frozenset().union(*map(varying_axes, deciding))


def varying(values: Sequence[Any], axes: Axes) -> list[Any]:
    """The arrays, marked as varying over these axes, too. Undefined primals stay as they are."""
    if not axes:
        return list(values)
    return [x if ad.is_undefined_primal(x) else vary(x, axes - varying_axes(x)) for x in values]


def settled(step: Callable[..., list[Any]], row: Any, carry: Sequence[Any], rest: Sequence[Any]) -> ClosedJaxpr:
    """Trace `step(row, *carry, *rest) -> (*carry, *y)`, all given as types.

    The carry varies from the start over the axes over which it comes to vary.
    """

    def as_given(row: Any, *operands: Any) -> list[Any]:
        out = step(row, *operands)
        pairs = zip(out, operands[: len(carry)], strict=False)
        return [*(vary(x, varying_axes(old) - varying_axes(x)) for x, old in pairs), *out[len(carry) :]]

    while True:
        closed = trace(as_given, [row, *carry, *rest])
        found = [varying_axes(aval) for aval in closed.out_avals[: len(carry)]]
        if found == list(map(varying_axes, carry)):
            return closed
        carry = list(map(with_varying_axes, carry, found))


@weakly_cached
def apart(body: ClosedJaxpr, axes: Axes) -> ClosedJaxpr | None:
    """A body (row, *operands) for devices that take different numbers of steps; None: this one is.

    All that it takes and returns varies over these axes, and nothing in it communicates over them.
    """
    if collective := collective_in(body.jaxpr, axes):
        raise NotImplementedError(devices_message(*collective))
    row, *avals = body.in_avals
    if all(axes <= varying_axes(aval) for aval in (*avals, *body.out_avals)) and not _marks(body.jaxpr, axes):
        return None
    function = jaxpr_as_fun(_marked_locally(body, axes))

    def step(row: Any, *operands: Any) -> list[Any]:
        given = [retyped(x, varying_axes(aval)) for x, aval in zip(operands, avals, strict=True)]
        return [retyped(x, varying_axes(x) | axes) for x in function(row, *given)]

    return trace(step, [row, *(with_varying_axes(aval, varying_axes(aval) | axes) for aval in avals)])


def _marks(jaxpr: Jaxpr, axes: Axes) -> bool:
    """Whether a value is marked as varying over one of the axes anywhere in it."""
    return any(
        axes & marked_varying(eqn) or any(_marks(inner, axes) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _marked_locally(closed: ClosedJaxpr, axes: Axes) -> ClosedJaxpr:
    """A jaxpr whose marks over these axes are replaced by local ones."""
    eqns = [_equation(eqn, axes) for eqn in closed.jaxpr.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)  # type: ignore[attr-defined]


def _equation(eqn: Any, axes: Axes) -> Any:
    marked = marked_varying(eqn)
    if not marked & axes:
        return map_programs(eqn, lambda inner: _marked_locally(inner, axes) if _marks(inner.jaxpr, axes) else inner)
    params = {"varying": varying_axes(eqn.outvars[0].aval), "summed": marked - axes}
    return eqn.replace(primitive=retyped_p, params=params)
