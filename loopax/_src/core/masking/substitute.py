"""What a finished lane of a batch computes with.

Under `jax.vmap` a lane that has finished still executes the body, and its result is thrown away. From operands of its
own it could leave the body's domain, give NaNs, or spin in an inner loop. So its operands are overwritten with those of
a lane that is still active (a batched double-where).

Large constants of each lane (the weights of an ensemble) would be copied in every step. The operation is a primitive,
which stays visible in bodies: `lowering/active_sets.py` finds it there, and fills such constants once for each set of
active lanes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.mapped_axis import Axis, fill_axis
from loopax._src.core.masking.all_active import an_active
from loopax._src.jax_internals import Primitive, ad, is_nonzero, register


def pick(active: Any, a: Any, b: Any) -> Any:
    """Rows of `a` for active lanes, rows of `b` for the others; lanes may have several axes, or none."""
    return jnp.where(active.reshape(*active.shape, *(1,) * (a.ndim - active.ndim)), a, b)


def fill_inactive(active: Any, operands: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """Give lanes that are not active the operands of one that is.

    active: bool[lanes]; operands: [lanes, ...] where `batched`, and shared by all lanes where not.
    """
    if active.size == 0:
        return list(operands)
    first = an_active(active)
    pairs = zip(operands, batched, strict=True)
    return [fill_inactive_p.bind(active, first, x, batch_axes=0) if is_batched else x for x, is_batched in pairs]


# ---- the primitive: active bool[*batch, lanes], first int[*batch], x [*batch, lanes, ...] -> x filled

fill_inactive_p = Primitive("fill_inactive")


def batch_axes_of(eqn: Any) -> int:
    """How many axes of batches stand in front of that of the lanes, in an equation of the primitive."""
    return eqn.params["batch_axes"]


def filled(active: Any, first: Any, x: Any, *, batch_axes: int) -> Any:
    """The meaning of the primitive."""

    def fill(active: Any, first: Any, x: Any) -> Any:
        return pick(active, x, x[first][None])

    for _ in range(batch_axes):
        fill = jax.vmap(fill)
    return fill(active, first, x)


def _abstract(*avals: Any, batch_axes: int) -> Any:
    return jax.make_jaxpr(lambda *xs: filled(*xs, batch_axes=batch_axes))(*avals).out_avals[0]


def _of_active(active: Any, x: Any) -> Any:
    """The tangents, or cotangents, of active lanes, and zeros.

    What a finished lane computes is thrown away, so nothing depends on what it was given: there is no derivative from
    one lane to another, and a NaN in one lane's derivative reaches no other lane.
    """
    return pick(active, x, jnp.zeros((), x.dtype))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, batch_axes: int) -> Any:
    """Tangents of active lanes are their own; those of the others are zero.

    Operands are `active, first, x`, all with an axis of lanes behind `batch_axes` others; only `x` has a tangent.
    """
    out = fill_inactive_p.bind(*primals, batch_axes=batch_axes)
    return out, _tangent(primals[0], out, tangents[2])


def _linearize(nonzero: Sequence[bool], *operands: Any, batch_axes: int) -> Any:
    """The derivative as `_jvp` has it. It is linear in the tangent of `x`, and needs to know who is active."""
    out = fill_inactive_p.bind(*operands, batch_axes=batch_axes)
    return out, nonzero[2], lambda *tangents: _tangent(operands[0], out, tangents[2])


def _tangent(active: Any, out: Any, tangent: Any) -> Any:
    """The tangent of the result, from that of `x`."""
    return _of_active(active, tangent) if is_nonzero(tangent) else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, active: Any, _first: Any, x: Any, *, batch_axes: int) -> list[Any]:
    """The cotangent of `x`: that of the result for active lanes, and zeros.

    Operands are `active, first, x`; `x` is the linear one. It is a tangent where a batch of linear loops fills its
    operands, and a filled tangent is one that nothing reads.
    """
    del batch_axes
    ct = ad.Zero(x.aval) if isinstance(ct, ad.Zero) else _of_active(active, ct)
    return [None, None, ct]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, batch_axes: int) -> Any:
    """Lanes of several batches: each batch fills its lanes with one of its own.

    Operands are `active, first, x`; the new axis of lanes is in front of all of them, and of the result.
    """
    if all(d is None for d in dims):  # JAX asks inside batched control flow
        return fill_inactive_p.bind(*operands, batch_axes=batch_axes), None
    axis = Axis.of(axis_data)
    operands = [fill_axis(axis, x, d) for x, d in zip(operands, dims, strict=True)]
    return fill_inactive_p.bind(*operands, batch_axes=batch_axes + 1), 0


register(
    fill_inactive_p,
    meaning=filled,
    params=["batch_axes"],
    abstract_eval=_abstract,
    jvp=_jvp,
    linearize=_linearize,
    transpose=_transpose,
    batch=_batch,
)
