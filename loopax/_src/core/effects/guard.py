"""Effects in the bodies of loops: not repeated by replays, not caused by finished lanes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.effects.strip_progress import strip_progress
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, split_list, trace
from loopax._src.core.row_buffers.primitives import add_p, get_p, nowhere, put_p, take_p, view_p
from loopax._src.core.row_buffers.versions import touches_buffers
from loopax._src.jax_internals import ClosedJaxpr, Jaxpr, Primitive, ad, batching, mlir, new_primitive, scan_sizes


def without_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop effectful equations without results (debug prints) and progress, so that a replay does not repeat them."""
    closed = strip_progress(closed)
    if not closed.effects:
        return closed
    jaxpr, eqns = closed.jaxpr, []
    for eqn in jaxpr.eqns:
        if not eqn.effects:
            eqns.append(eqn)
        elif eqn.outvars:
            eqns.append(_equation_without_effects(eqn))
    effects = set().union(*(eqn.effects for eqn in eqns))
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, effects=effects), closed.consts)  # type: ignore[attr-defined]


def _equation_without_effects(eqn: Any) -> Any:
    """The same for the jaxprs inside an equation."""
    if eqn.primitive.name == "cond":
        branches = tuple(without_effects(branch) for branch in eqn.params["branches"])
        inner, params = branches, {**eqn.params, "branches": branches}
    else:
        pruned = {name: _pruned(value) for name, value in eqn.params.items() if isinstance(value, ClosedJaxpr | Jaxpr)}
        inner, params = tuple(pruned.values()), {**eqn.params, **pruned}
    if not inner:
        return eqn
    effects = set().union(*(closed.effects for closed in inner))
    return eqn.replace(params=params, effects=effects)


def _pruned(inner: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
    """The jaxpr of `jax.checkpoint` is an open one."""
    return without_effects(inner) if isinstance(inner, ClosedJaxpr) else without_effects(ClosedJaxpr(inner, ())).jaxpr


# An effect without results that happens where `active` is True. Operands: active, *operands.
only_if_p = new_primitive("only_if")


def _only_if(active: Any, *operands: Any, happening: Primitive, params: tuple[tuple[str, Any], ...]) -> list[Any]:
    """A real conditional: nothing is called where it is False."""

    def happen(*operands: Any) -> None:
        happening.bind(*operands, **dict(params))

    lax.cond(active, happen, lambda *_: None, *operands)
    return []


@only_if_p.def_effectful_abstract_eval
def _only_if_abstract(_: Any, *avals: Any, happening: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    closed = jax.make_jaxpr(lambda *xs: happening.bind(*xs, **dict(params)))(*avals)
    return [], closed.effects


def _only_if_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Lane by lane, as JAX batches debug callbacks: a batched condition could not suppress anything."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    for lane in range(size):
        of_lane = [
            x if d is None else lax.index_in_dim(x, lane, d, keepdims=False)
            for x, d in zip(operands, dims, strict=True)
        ]
        only_if_p.bind(*of_lane, **params)
    return [], []


only_if_p.def_impl(jax.jit(_only_if, static_argnames=("happening", "params")))
mlir.register_lowering(only_if_p, mlir.lower_fun(_only_if, multiple_results=True))
batching.primitive_batchers[only_if_p] = _only_if_batch
ad.primitive_jvps[only_if_p] = lambda primals, _, **params: (only_if_p.bind(*primals, **params), [])


def guarded(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """`f(active, *inputs)`: the jaxpr as a function whose effects happen only where `active` is True.

    Writing to a buffer is such an effect; and a lane that is not active reads what one that is active does.
    """

    def function(active: Any, *inputs: Any) -> list[Any]:
        return evaluate(closed, inputs, lambda eqn, operands: _guarded_equation(eqn, active, operands))

    return function


def _guarded_equation(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    if eqn.effects and not eqn.outvars:
        return only_if_p.bind(active, *operands, happening=eqn.primitive, params=tuple(eqn.params.items()))
    if eqn.primitive in (get_p, view_p):
        *read, is_active = operands
        return bind_again(eqn, [*read, is_active & active])
    if eqn.primitive in (put_p, add_p, take_p):
        rows, place, *rest = operands
        return bind_again(eqn, [rows, jnp.where(active, place, nowhere(rows, eqn.params["lanes"])), *rest])
    if eqn.primitive.name in guards and (eqn.effects or touches_buffers(eqn)):
        return guards[eqn.primitive.name](eqn, active, operands)
    return bind_again(eqn, operands)


def _with_flag(closed: ClosedJaxpr, position: int) -> ClosedJaxpr:
    """The guarded jaxpr with the flag as one more input at this position."""

    def function(*inputs: Any) -> list[Any]:
        return guarded(closed)(inputs[position], *inputs[:position], *inputs[position + 1 :])

    avals = list(closed.in_avals)
    return trace(function, [*avals[:position], jax.ShapeDtypeStruct((), bool), *avals[position:]])


def _guard_jit(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    return guarded(eqn.params["jaxpr"])(active, *operands)


def _guard_cond(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    index, *rest = operands
    branches = [guarded(branch) for branch in eqn.params["branches"]]
    return lax.switch(index, branches, active, *rest)


def _guard_scan(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    params, (num_consts, num_carry) = eqn.params, scan_sizes(eqn)
    consts, init, xs = split_list(operands, [num_consts, num_carry])

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, y = split_list(guarded(params["jaxpr"])(active, *consts, *carry, *x), [num_carry])
        return carry, y

    carry, ys = lax.scan(step, init, xs, params["length"], params["reverse"], params["unroll"])
    return [*carry, *ys]


def _guard_while(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    at = eqn.params["cond_nconsts"]
    body = _with_flag(eqn.params["body_jaxpr"], 0)
    params = {**eqn.params, "body_jaxpr": body, "body_nconsts": eqn.params["body_nconsts"] + 1}
    return eqn.primitive.bind(*operands[:at], active, *operands[at:], **params)


def _guard_loop(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    loop = Loop(**eqn.params)
    loop = loop._replace(body=_with_flag(loop.body, 1), num_consts=loop.num_consts + 1)
    return loop_p.bind(*operands[:2], active, *operands[2:], **loop._asdict())


def _guard_sweep(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    static = ReverseSweep(**eqn.params)
    forward, backward = _with_flag(static.forward, 1), _with_flag(static.backward, 1)
    static = static._replace(forward=forward, backward=backward, num_consts=static.num_consts + 1)
    return reverse_sweep_p.bind(*operands[:3], active, *operands[3:], **static._asdict())


# By the name of a primitive: (equation, active, operands) -> results.
guards: dict[str, Callable[[Any, Any, list[Any]], Sequence[Any]]] = {
    "jit": _guard_jit,
    "cond": _guard_cond,
    "scan": _guard_scan,
    "while": _guard_while,
    loop_p.name: _guard_loop,
    reverse_sweep_p.name: _guard_sweep,
}
