"""The check that the inverse of a step is one: the first step is taken and undone, where a derivative is taken."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from loopax._src.core import Loop, LoopCall, LoopOperands, run
from loopax._src.core.ir.inverse import needed_by_inverse, num_recorded
from loopax._src.core.ir.without_effects import without_effects
from loopax._src.core.jaxpr.util import Mask, either, forwarded_from, merge_lists, reject, select, split_list, trace
from loopax._src.core.jaxpr.varying_axes import settled
from loopax._src.core.row_buffers.versions import buffers, keep_rows
from loopax._src.jax_internals import dce, has_tangents, jaxpr_as_fun, replace_jaxpr, vary_like
from loopax._src.kinds.rounding import Difference, largest_difference


def with_round_trip(call: LoopCall) -> LoopCall:
    """The same call; a derivative of it first checks the inverse."""

    @jax.custom_jvp
    def checked(operands: LoopOperands) -> LoopOperands:
        return operands

    def rule(primals: Any, tangents: Any) -> Any:
        _refuse_needed_leaves(call)
        leaves, structure = jax.tree.flatten(tangents[0])
        is_zero = [isinstance(leaf, SymbolicZero) or leaf.dtype == jax.dtypes.float0 for leaf in leaves]
        ratio, amount = _first_step(call.at(lax.stop_gradient(primals[0])))
        message = (
            "the inverse of kind=Reversible() does not undo the first step{amount}: the largest difference between the "
            "carry before the step and what the inverse makes of the carry after it, relative to the largest element "
            "of the leaf, is more than rounding can explain. inverse(body(val)) must be val. Give what a step loses to "
            "the inverse, as Reversible(inverse, record=...) does, or take kind=Checkpointed()."
        )
        dots = call.checked(reject(is_zero, leaves), ~(ratio <= 1), message, amount)
        return primals[0], structure.unflatten(merge_lists(is_zero, dots, select(is_zero, leaves)))

    checked.defjvp(rule, symbolic_zeros=True)
    return call.at(checked(call.operands))


def _first_step(call: LoopCall) -> Difference:
    """How far off the inverse is after one step.

    It is a loop of one step at most: a lane that takes none evaluates nothing.
    """
    loop, (low, high, consts, carry, xs) = call.loop, call.operands
    low, high = (jnp.maximum(low, high - 1), high) if loop.reverse else (low, jnp.minimum(high, low + 1))
    assert loop.inverse is not None
    body, inverse = jaxpr_as_fun(without_effects(loop.body)), jaxpr_as_fun(loop.inverse)
    compared = reject(_returned(loop), range(loop.num_carry))
    num_rows = num_recorded(loop.body, loop.inverse)

    def there_and_back(row: Any, *inputs: Any) -> list[Any]:
        carry, _, consts, x = split_list(inputs, [loop.num_carry, 2, loop.num_consts])
        out = body(row, *consts, *carry, *x)
        after, recorded = loop.outputs(out).carry, out[len(out) - num_rows :]
        before = inverse(row, *consts, *after, *x, *recorded)
        go_on = [jnp.zeros_like(leaf) for leaf in after[: int(loop.predicated)]]
        found = largest_difference(*([leaves[i] for i in compared] for leaves in (carry, before, after)))
        return [*go_on, *after[len(go_on) :], *found]

    numbers, types = Difference(jnp.float32(0), jnp.float32(0)), loop.input_avals
    leaves = [*types.carry, *map(jax.typeof, numbers)]
    in_order = settled(there_and_back, loop.body.in_avals[0], leaves, [*types.consts, *types.xs])
    row, changing, consts_of_it, rows = split_list(in_order.jaxpr.invars, [1, len(leaves), len(types.consts)])
    carry = list(map(vary_like, [*carry, *numbers], in_order.out_avals))
    once = loop._replace(
        body=replace_jaxpr(in_order, [*row, *consts_of_it, *changing, *rows], in_order.jaxpr.outvars),
        num_carry=loop.num_carry + 2,
        inverse=None,
        reporting=None,
        debug_info=None,
        unroll=1,
    )
    return Difference(*run(once, low, high, consts, carry, xs).carry[-2:])


def _returned(loop: Loop) -> Mask:
    """Which leaves of the carry the inverse returns as they came, or reads rows of.

    The condition of a loop is none to be compared.
    """
    assert loop.inverse is not None
    inputs = [loop.inverse.jaxpr.invars[i] for i in loop.carry_range]
    outputs = [forwarded_from(loop.inverse, variable) for variable in loop.inverse.jaxpr.outvars]
    kept = keep_rows(loop.inverse, loop.carry_range)
    same = [a is b or keeps for a, b, keeps in zip(inputs, outputs, kept, strict=True)]
    return tuple(same[i] or (loop.predicated and i == 0) for i in range(loop.num_carry))


def _refuse_needed_leaves(call: LoopCall) -> None:
    """Raise where the inverse returns a leaf as it came that the body changes, and the derivative reads."""
    loop = call.loop
    assert loop.inverse is not None
    inputs = [loop.body.jaxpr.invars[i] for i in loop.carry_range]
    outputs = [forwarded_from(loop.body, variable) for variable in loop.body.jaxpr.outvars[: loop.num_carry]]
    wrong = [same and a is not b for same, a, b in zip(_returned(loop), inputs, outputs, strict=True)]
    appended = buffers(loop.body, loop.carry_range, True)  # rows of the last version are those of any before it
    wrong = [flag and not is_appended for flag, is_appended in zip(wrong, appended, strict=True)]
    wrong[:1] = [flag and not loop.predicated for flag in wrong[:1]]
    if not any(wrong):
        return
    needed = _read_by_derivative(loop)
    leaves = zip(loop.names.carry, wrong, needed, strict=True)
    bad = [name or "a leaf" for name, is_wrong, is_needed in leaves if is_wrong and is_needed]
    if bad:
        raise ValueError(
            f"{call.where}: the inverse of kind=Reversible() returns {', '.join(bad)} as it came, but the derivative "
            "of a step reads it. Return its value before the step."
        )


def _read_by_derivative(loop: Loop) -> Sequence[bool]:
    """Which leaves of the carry the derivative of a step reads, or the inverse for those that it reads."""
    assert loop.inverse is not None
    body, avals = jaxpr_as_fun(without_effects(loop.body)), loop.body.in_avals
    is_real = list(map(has_tangents, avals))

    def dots(*inputs: Any) -> list[Any]:
        primals, tangents = split_list(inputs, [len(avals)])
        of_real = lambda *real: body(*merge_lists(is_real, reject(is_real, primals), real))  # noqa: E731
        out = jax.jvp(of_real, select(is_real, primals), tangents)[1]
        out = out[: len(out) - num_recorded(loop.body, loop.inverse)]
        return [dot for dot in out if dot.dtype != jax.dtypes.float0]

    closed = trace(dots, [*avals, *select(is_real, avals)])
    used = dce(closed, [True] * len(closed.out_avals), False)[1]
    needed = [used[i] for i in loop.carry_range]
    while True:
        also = needed_by_inverse(loop.inverse, needed)
        more = list(either(needed, also[loop.num_consts :][: loop.num_carry]))
        if more == needed:
            return needed
        needed = more
