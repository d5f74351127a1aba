"""Effects in the bodies of loops: not caused by finished lanes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, split_list, trace
from loopax._src.core.row_buffers.primitives import add_p, get_p, lanes_of, nowhere, put_p, take_p, view_p
from loopax._src.core.row_buffers.versions import touches_buffers
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Primitive,
    Scan,
    While,
    bind_while,
    branches,
    inlinable,
    is_cond,
    is_jit,
    is_scan,
    is_while,
    new_primitive,
    register,
)

# An effect without results that happens where `active` is True. Operands: active, *operands.
only_if_p = new_primitive("only_if")


class OnlyIf(NamedTuple):
    """The parameters of the primitive."""

    happening: Primitive  # what has the effect
    params: tuple[tuple[str, Any], ...]  # those of `happening`


def _only_if(active: Any, *operands: Any, happening: Primitive, params: tuple[tuple[str, Any], ...]) -> list[Any]:
    """A real conditional: nothing is called where it is False."""

    def happen(*operands: Any) -> None:
        happening.bind(*operands, **dict(params))

    lax.cond(active, happen, lambda *_: None, *operands)
    return []


def _only_if_abstract(_: Any, *avals: Any, happening: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    closed = jax.make_jaxpr(lambda *xs: happening.bind(*xs, **dict(params)))(*avals)
    return [], closed.effects


def _only_if_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Lane by lane, as JAX batches debug callbacks: a batched condition could not suppress anything.

    Operands are `active, *operands` of the effect; there are no results.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    for lane in range(size):
        of_lane = [
            x if d is None else lax.index_in_dim(x, lane, d, keepdims=False)
            for x, d in zip(operands, dims, strict=True)
        ]
        only_if_p.bind(*of_lane, **params)
    return [], []


register(
    only_if_p,
    meaning=_only_if,
    params=OnlyIf._fields,
    effectful_abstract_eval=_only_if_abstract,
    jvp=lambda primals, _, **params: (only_if_p.bind(*primals, **params), []),
    linearize=lambda _, *operands, **params: (only_if_p.bind(*operands, **params), [], lambda *_: []),
    batch_without_axis=_only_if_batch,
)


def guarded(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """`f(active, *inputs)`: the jaxpr as a function whose effects happen only where `active` is True.

    Writing to a buffer is such an effect; and a lane that is not active reads what one that is active does.
    """

    def function(active: Any, *inputs: Any) -> list[Any]:
        return evaluate(closed, inputs, lambda eqn, operands: _guarded_equation(eqn, active, operands))

    return function


# (equation, active, operands) -> results. For each primitive of loopax with programs in it (`core/rules.py`):
Guard = Callable[[Any, Any, list[Any]], Sequence[Any]]
guards: dict[Primitive, Guard] = {}


def _guarded_equation(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    if eqn.effects and not eqn.outvars:
        return only_if_p.bind(active, *operands, happening=eqn.primitive, params=tuple(eqn.params.items()))
    if eqn.primitive in (get_p, view_p):
        *read, is_active = operands
        return bind_again(eqn, [*read, is_active & active])
    if eqn.primitive in (put_p, add_p, take_p):
        rows, place, *rest = operands
        return bind_again(eqn, [rows, jnp.where(active, place, nowhere(rows, lanes_of(eqn.params))), *rest])
    guard = _guard_of(eqn) if eqn.effects or touches_buffers(eqn) else None
    return bind_again(eqn, operands) if guard is None else guard(eqn, active, operands)


def _guard_of(eqn: Any) -> Guard | None:
    if eqn.primitive in guards:
        return guards[eqn.primitive]
    return next((guard for is_one, guard in _GUARDS_OF_JAX if is_one(eqn)), None)


def _with_flag(closed: ClosedJaxpr, position: int) -> ClosedJaxpr:
    """The guarded jaxpr with the flag as one more input at this position."""

    def function(*inputs: Any) -> list[Any]:
        return guarded(closed)(inputs[position], *inputs[:position], *inputs[position + 1 :])

    avals = list(closed.in_avals)
    return trace(function, [*avals[:position], jax.ShapeDtypeStruct((), bool), *avals[position:]])


def _guard_jit(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    program = inlinable(eqn)
    assert program is not None
    return guarded(program)(active, *operands)


def _guard_cond(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    index, *rest = operands
    return lax.switch(index, list(map(guarded, branches(eqn))), active, *rest)


def _guard_scan(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    loop = Scan.of(eqn)
    consts, init, xs = split_list(operands, loop.sizes)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, y = split_list(guarded(loop.body)(active, *consts, *carry, *x), [loop.num_carry])
        return carry, y

    carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse, loop.unroll)
    return [*carry, *ys]


def _guard_while(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    loop = While.of(eqn)
    cond_consts, rest = split_list(operands, [loop.num_cond_consts])
    loop = loop._replace(body=_with_flag(loop.body, 0), num_consts=loop.num_consts + 1)
    return bind_while(eqn, loop, [*cond_consts, active, *rest])


def guard_loop(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    """The loop with the flag as its first constant."""
    loop = Loop(**eqn.params)
    inverse = loop.inverse and _with_flag(loop.inverse, 1)
    loop = loop._replace(body=_with_flag(loop.body, 1), inverse=inverse, num_consts=loop.num_consts + 1)
    return loop_p.bind(*operands[:2], active, *operands[2:], **loop._asdict())


def guard_sweep(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    """The sweep with the flag as its first constant; effects of its step are guarded."""
    sweep = ReverseSweep(**eqn.params)
    inverse = sweep.inverse and _with_flag(sweep.inverse, 1)
    sweep = sweep._replace(step=_with_flag(sweep.step, 1), inverse=inverse, num_consts=sweep.num_consts + 1)
    return reverse_sweep_p.bind(*operands[:3], active, *operands[3:], **sweep._asdict())


_GUARDS_OF_JAX: list[tuple[Callable[[Any], bool], Guard]] = [
    (is_jit, _guard_jit),
    (is_cond, _guard_cond),
    (is_scan, _guard_scan),
    (is_while, _guard_while),
]
