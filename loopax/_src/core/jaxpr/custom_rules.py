"""Functions with derivatives of their own, evaluated in another way: so are their rules, which JAX traces later."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from loopax._src.core.jaxpr.util import Mask, bind_again, merge_lists, of_selected, reject, select, split_list
from loopax._src.jax_internals import ClosedJaxpr, called, is_custom_vjp, told_what_is_perturbed, zeros

Function = Callable[..., Any]


class Interpreter(NamedTuple):
    """How a function and its rules are evaluated: each a program -> f(*flags, *inputs)."""

    forward: Callable[[ClosedJaxpr], Function]
    back: Callable[[ClosedJaxpr], Function]  # what a `jax.custom_vjp` does with cotangents
    num_flags: int


def evaluated_by(interpreter: Interpreter, eqn: Any) -> Function:
    """The function that an equation calls as f(*flags, *operands), whose values and rules are those of an interpreter.

    It keeps its derivatives: its rules are traced as programs where JAX asks for them.
    """
    program = called(eqn)
    assert program is not None
    evaluate = interpreter.forward(program)
    return (_with_vjp if is_custom_vjp(eqn) else _with_jvp)(interpreter, eqn, lambda *xs: tuple(evaluate(*xs)))


def rule_of(eqn: Any) -> ClosedJaxpr | None:
    """The rule of the function that an equation calls as a program; None if there is none for these operands."""
    operands, mask = [v.aval for v in eqn.invars], _have_tangents(eqn.invars)
    dots, cts = (select(_have_tangents(group), [v.aval for v in group]) for group in (eqn.invars, eqn.outvars))
    try:
        if is_custom_vjp(eqn):
            return jax.make_jaxpr(lambda xs, cts: _pull_back(eqn, _forward(eqn, mask, xs)[1], cts))(operands, cts)
        return jax.make_jaxpr(partial(_on_pairs, eqn, mask))(operands, dots)
    except Exception:  # noqa: BLE001 - a rule may raise anything, and does so again where JAX asks for it
        return None


def _with_jvp(interpreter: Interpreter, eqn: Any, values: Function) -> Function:
    function = jax.custom_jvp(values)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        (flags, xs), (_, dots) = (split_list(values, [interpreter.num_flags]) for values in (primals, tangents))
        mask = [not isinstance(dot, SymbolicZero) for dot in dots]
        out, found = _traced_by(interpreter.forward, partial(_on_pairs, eqn, mask), flags, xs, select(mask, dots))
        return tuple(out), tuple(_with_float0(eqn, found))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _with_vjp(interpreter: Interpreter, eqn: Any, values: Function) -> Function:
    function, is_told = jax.custom_vjp(values), told_what_is_perturbed(eqn)

    def forward(*operands: Any) -> Any:
        flags, given = split_list(operands, [interpreter.num_flags])
        flags, xs = ([x.value for x in values] if is_told else values for values in (flags, given))
        mask = [x.perturbed for x in given] if is_told else _have_tangents(eqn.invars)
        out, pull = _traced_by(interpreter.forward, partial(_forward, eqn, mask), flags, xs)
        return out, (flags, pull, [() if perturbed else None for perturbed in mask])

    def back(residuals: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
        flags, pull, perturbed = residuals
        given = select(_have_tangents(eqn.outvars), cts)
        given = [zeros(ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in given]
        found = _traced_by(interpreter.back, partial(_pull_back, eqn), flags, pull, given)
        mask = [mark is not None for mark in perturbed]
        return *(None for _ in flags), *merge_lists(mask, [None] * mask.count(False), found)

    function.defvjp(forward, back, symbolic_zeros=is_told)
    return function


def _traced_by(
    interpreter: Callable[[ClosedJaxpr], Function], function: Function, flags: Sequence[Any], *arguments: Any
) -> Any:
    """`function(*arguments)`, which takes and returns pytrees of arrays, as an interpreter evaluates it."""
    leaves, tree = jax.tree.flatten(arguments)
    closed, results = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)), return_shape=True)(*leaves)
    return jax.tree.structure(results).unflatten(interpreter(closed)(*flags, *leaves))


# ---- the rules of an equation: `mask` says which operands are perturbed


def _perturbed(eqn: Any, mask: Sequence[bool], operands: Sequence[Any]) -> tuple[Function, list[Any]]:
    """The function of the operands that are perturbed, and these."""
    function = of_selected(lambda *xs: tuple(bind_again(eqn, xs)), mask, operands)
    return function, select(mask, operands)


def _on_pairs(eqn: Any, mask: Sequence[bool], operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """All results, and the tangents of those that have one."""
    function, xs = _perturbed(eqn, mask, operands)
    out, dots = jax.jvp(function, tuple(xs), tuple(tangents))
    return list(out), select(_have_tangents(eqn.outvars), dots)


def _forward(eqn: Any, mask: Sequence[bool], operands: Sequence[Any]) -> Any:
    """All results, and the function from cotangents of all to those of the perturbed operands."""
    function, xs = _perturbed(eqn, mask, operands)
    return jax.vjp(function, *xs)


def _pull_back(eqn: Any, pull: Function, cts: Sequence[Any]) -> list[Any]:
    """The cotangents of the perturbed operands from those of the results that have one."""
    return list(pull(tuple(_with_float0(eqn, cts))))


def _have_tangents(variables: Sequence[Any]) -> Mask:
    return tuple(v.aval.to_tangent_aval().dtype != jax.dtypes.float0 for v in variables)


def _with_float0(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """Tangents or cotangents of all results, from those of results that have one."""
    mask = _have_tangents(eqn.outvars)
    others = [np.zeros(v.aval.shape, jax.dtypes.float0) for v in reject(mask, eqn.outvars)]
    return merge_lists(mask, others, given)
