"""Effects in the bodies of loops: not caused by finished lanes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.dependence import mixes_lanes
from loopax._src.core.jaxpr.evaluate import evaluated_by, jvp_expanded, rule_of
from loopax._src.core.jaxpr.util import bind_again, evaluate, inner_jaxprs, trace, weakly_cached
from loopax._src.core.masking import fill_inactive
from loopax._src.core.row_buffers import VERSION, operands_where
from loopax._src.jax_internals import ClosedJaxpr, Primitive

# An effect that happens where `active` is True. Operands: active, *operands.
only_if_p = jaxi.new_primitive("only_if")


class OnlyIf(NamedTuple):
    """The parameters of the primitive."""

    happening: Primitive  # what has the effect
    params: tuple[tuple[str, Any], ...]  # those of `happening`
    types: tuple[Any, ...]  # of its results
    causes: frozenset[Any]  # the effects


def _only_if(active: Any, *operands: Any, **params: Any) -> list[Any]:
    """A real conditional: nothing is called where it is False, and results are zeros."""
    primitive, rest, types, _ = OnlyIf(**params)

    def happen(*operands: Any) -> list[Any]:
        results = primitive.bind(*operands, **primitive.get_bind_params(dict(rest)))
        return list(results) if primitive.multiple_results else [results]

    return lax.cond(active, happen, lambda *_: list(map(jaxi.zeros, types)), *operands)


def _only_if_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """That of the conditional, if it has results: JAX says where these have no derivative, as of an `io_callback`."""
    if not OnlyIf(**params).types:
        return only_if_p.bind(*primals, **params), []
    return jvp_expanded(_only_if)(primals, tangents, **params)


def _only_if_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Lane by lane, as JAX batches callbacks: a batched condition could not suppress anything.

    Operands are `active, *operands` of the effect. A lane that is not active gets the results of one that is, as it
    gets the operands of one: no loop goes on for it.
    """
    only_if = OnlyIf(**params)
    own = {i: jnp.moveaxis(x, d, 0) for i, (x, d) in enumerate(zip(operands, dims, strict=True)) if d is not None}
    if not own:  # JAX asks inside batched control flow
        return only_if_p.bind(*operands, **params), [None] * len(only_if.types)
    if only_if.types and jaxi.are_ordered(only_if.causes):
        raise NotImplementedError(
            f"the body of a loop calls an ordered `{only_if.happening}` with results, and its lanes take different "
            "numbers of steps. JAX has no order between lanes. Leave out `ordered=True`, or let one lane run after "
            'another: `lanes="sequential"`.'
        )

    def of_lane(own: dict[int, Any]) -> Any:
        return only_if_p.bind(*(own.get(i, x) for i, x in enumerate(operands)), **params)

    if not only_if.types:
        for lane in range(next(iter(own.values())).shape[0]):
            of_lane({i: x[lane] for i, x in own.items()})
        return [], []
    results = lax.map(of_lane, own)
    if 0 in own:
        results = fill_inactive(own[0], results, [True] * len(results))
    return results, [0] * len(results)


jaxi.register(
    only_if_p,
    meaning=_only_if,
    params=OnlyIf._fields,
    effectful_abstract_eval=lambda *_, **params: (list(OnlyIf(**params).types), OnlyIf(**params).causes),
    jvp=_only_if_jvp,
    batch_without_axis=_only_if_batch,
)


def guarded(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """`f(active, *inputs)`: the jaxpr as a function whose effects happen only where `active` is True.

    Writing to a buffer is such an effect; and a lane that is not active reads what one that is active does.
    """
    return lambda active, *inputs: evaluate(closed, inputs, lambda eqn, xs: _guarded_equation(eqn, active, xs))


# For each primitive of loopax with programs in it: (equation, active, operands) -> results (`core/rules.py`).
guards: dict[Primitive, Callable[[Any, Any, list[Any]], Sequence[Any]]] = {}


def _guarded_equation(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    if eqn.primitive in VERSION:
        return bind_again(eqn, operands_where(active, eqn, operands))
    if not _acts(eqn):
        return bind_again(eqn, operands)
    if eqn.primitive in guards:
        return guards[eqn.primitive](eqn, active, operands)
    if (results := _guarded_control_flow(eqn, active, operands)) is not None:
        return results
    # Only JAX knows how to evaluate the equation: it is evaluated as a whole, or not at all.
    if mixes_lanes(eqn):
        raise NotImplementedError(
            f"the body of a loop calls a `{eqn.primitive}` that prints or calls back, and computes with several lanes "
            "at once; the lanes of the loop take different numbers of steps. Print outside of it, give all lanes the "
            "same number of steps, or mask inside the body."
        )
    types = tuple(variable.aval for variable in eqn.outvars)
    only_if = OnlyIf(eqn.primitive, tuple(eqn.params.items()), types, frozenset(eqn.effects))
    return only_if_p.bind(active, *operands, **only_if._asdict())


@weakly_cached
def acts(program: ClosedJaxpr) -> bool:
    """Whether a program has effects, or writes to a buffer, or its derivative has effects."""
    return any(map(_acts, program.eqns))


def _acts(eqn: Any) -> bool:
    if jaxi.happens(eqn.effects) or eqn.primitive in VERSION or any(map(acts, inner_jaxprs(eqn))):
        return True
    rule = rule_of(eqn) if jaxi.is_custom(eqn) else None
    return rule is not None and jaxi.happens(rule.effects)


def _with_flag(closed: ClosedJaxpr, position: int) -> ClosedJaxpr:
    """The guarded jaxpr with the flag as one more input at this position."""

    # Before: (*first, *rest) -> results. After: (*first, active, *rest) -> results
    def function(*inputs: Any) -> list[Any]:
        return guarded(closed)(inputs[position], *inputs[:position], *inputs[position + 1 :])

    avals = closed.in_avals
    return trace(function, [*avals[:position], jax.ShapeDtypeStruct((), bool), *avals[position:]])


def _guarded_control_flow(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any] | None:
    """The results of control flow of JAX, or of a call; None for another equation."""
    if jaxi.is_cond(eqn):
        index, *rest = operands
        return lax.switch(index, list(map(guarded, jaxi.branches(eqn))), active, *rest)
    if loop := jaxi.lax_loop(eqn):
        cond_consts, consts, init, xs = loop.groups(operands)
        if loop.cond is not None:
            # Before: [*cond consts, *consts, *carry]. After: [active, *cond consts, active, *consts, *carry]
            cond, body = _with_flag(loop.cond, 0), _with_flag(loop.body, 0)
            sizes = {"num_cond_consts": loop.num_cond_consts + 1, "num_consts": loop.num_consts + 1}
            loop = loop._replace(cond=cond, body=body, **sizes)
            return jaxi.bind_while(eqn, loop, [active, *cond_consts, active, *consts, *init])

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = guarded(loop.body)(active, *consts, *carry, *x)
            return out[: loop.num_carry], out[loop.num_carry :]

        carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse, loop.unroll)
        return [*carry, *ys]
    if jaxi.is_custom(eqn):
        return evaluated_by(guarded, guarded, 1, eqn)(active, *operands)
    if jaxi.is_linear_solve(eqn):
        return jaxi.bind_linear_solve(eqn, lambda program: _with_flag(program, 0), [active], operands)
    if (results := jaxi.bind_open_call(eqn, guarded, [active, *operands])) is not None:
        return results
    program = jaxi.inlinable(eqn)
    return program and guarded(program)(active, *operands)


def guard_steps(primitive: Primitive, steps: Any, body: str, num_limits: int) -> Callable[..., Sequence[Any]]:
    """The guard of a loop or a sweep: operands are `*limits, *others`, and `body` is the name of its body.

    The flag is its first constant.
    """

    def guard(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
        loop = steps(**eqn.params)
        bodies = {body: _with_flag(getattr(loop, body), 1), "inverse": loop.inverse and _with_flag(loop.inverse, 1)}
        loop = loop._replace(**bodies, num_consts=loop.num_consts + 1)
        return primitive.bind(*operands[:num_limits], active, *operands[num_limits:], **loop._asdict())

    return guard
