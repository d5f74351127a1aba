"""A program with loopax's operations spelled out in JAX's own, and without calls."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax

from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.batching.compact.primitive import compact_vmap_p
from loopax._src.core.effects.guard import only_if_p
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.ir.reverse_sweep import reverse_sweep_p
from loopax._src.core.jaxpr.util import bind_again, evaluate
from loopax._src.core.masking.all_active import active_p
from loopax._src.core.masking.substitute import fill_inactive_p
from loopax._src.core.row_buffers import primitives as buffers
from loopax._src.frontend.user_lines import of_user
from loopax._src.jax_internals import ClosedJaxpr, called, dce, equation_context, is_of_jax, user_lines

_OURS = {
    loop_p,
    reverse_sweep_p,
    linear_loop_p,
    linear_sweep_p,
    compact_vmap_p,
    active_p,
    only_if_p,
    fill_inactive_p,
    *buffers.VERSION,
}


def unfolded(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write a program as one list of JAX's operations, without dead code. Bodies of loops stay as they are."""
    return _evaluated(closed, _operation)


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline the calls of a program. Operations of loopax stay as they are."""
    return _evaluated(closed, _call)


def _evaluated(closed: ClosedJaxpr, equation: Callable[[Any, list[Any]], Sequence[Any]]) -> ClosedJaxpr:
    """A program that evaluates another, without dead code."""
    flat = jax.make_jaxpr(lambda *inputs: evaluate(closed, inputs, equation))(*closed.in_avals)
    return dce(flat, [True] * len(flat.out_avals), True)[0]


def _operation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    if eqn.primitive in _OURS:
        program = jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*operands)
        return evaluate(program, operands, _operation)
    inner = called(eqn)
    return bind_again(eqn, operands) if inner is None else evaluate(inner, operands, _operation)


def _call(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    inner = called(eqn)
    if inner is None:
        return bind_again(eqn, operands)
    return evaluate(inner, operands, _call, _line_of_call if is_of_jax(inner) else _own_line)


def _line_of_call(_: Any) -> AbstractContextManager[None]:
    """Of an equation in a call of a function of JAX."""
    return nullcontext()


def _own_line(eqn: Any) -> AbstractContextManager[None]:
    """Of an equation that has one, else that of the call: JAX drops lines where it traces custom derivatives."""
    return equation_context(eqn) if any(of_user(user_lines(eqn))) else nullcontext()
