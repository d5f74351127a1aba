"""Programs in objects: what JAX's flags `jax_remat3`, `jax_custom_jvp3` and `jax_custom_vjp3` make of equations.

With these flags, `jax.checkpoint` and a function with derivatives of its own are equations of one primitive for all,
which holds an object; and the object holds the program, and the rules. From JAX 0.12 on, so is `lax.custom_root`,
without a flag. Classes and fields are not public.
"""

from copy import copy
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

_CHECKPOINT = "RematTraced"
_CUSTOM_VJP = "CustomVJPTraced"
_CUSTOM_RULES = ("CustomJVPTraced", _CUSTOM_VJP)
_ROOT = "CustomRoot"


def function_object(eqn: Any) -> Any:
    """The object that an equation calls; None if its primitive says what is done.

    From JAX 0.11 on some functions of `jnp` are objects, too. These hold no program.
    """
    return eqn.params.get("_prim")


def held_program(value: Any) -> ClosedJaxpr | None:
    """The program in a parameter of an equation that is such an object; None if it is none."""
    name = type(value).__name__
    if name == _CHECKPOINT:
        return value.jaxpr
    if name == _ROOT:
        return value.solve_jaxpr
    return value.traced.jaxpr if name in _CUSTOM_RULES else None


def with_held_program(value: Any, program: ClosedJaxpr) -> Any:
    """The object with another program. Its rules for derivatives stay as they are."""
    new = copy(value)
    if type(value).__name__ == _CHECKPOINT:
        new.params = {**value.params, "jaxpr": program}
    elif type(value).__name__ == _ROOT:
        solve = partial(_evaluated, program, value.out_tree)
        new.params = {**value.params, "solve": solve, "solve_jaxpr": program}
    else:
        traced = copy(value.traced)
        traced._params = {**traced._params, "jaxpr": program}
        for cached in ("_lojax", "_closure_converted"):  # made from the other program; from JAX 0.12 on
            if hasattr(traced, cached):
                setattr(traced, cached, None)
        new.params = {**value.params, "traced": traced}
    new.__dict__.update(new.params)
    new.effects = frozenset(program.effects)
    return new


def _evaluated(program: ClosedJaxpr, out_tree: Any, *arguments: Any) -> Any:
    """A program of leaves on pytrees."""
    return jax.tree.unflatten(out_tree, jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))


def is_held_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a `jax.checkpoint` that is such an object."""
    return type(function_object(eqn)).__name__ == _CHECKPOINT


def is_held_custom(value: Any) -> bool:
    """Whether this is a function with derivatives of its own as such an object."""
    return type(value).__name__ in (*_CUSTOM_RULES, _ROOT)


def is_held_custom_vjp(value: Any) -> bool:
    """Whether this is a `jax.custom_vjp` as such an object."""
    return type(value).__name__ == _CUSTOM_VJP


def called_program(eqn: Any) -> ClosedJaxpr | None:
    """The program of an equation that holds one, as a program of all its operands."""
    function = function_object(eqn)
    program = held_program(function)
    if program is None or len(program.in_avals) == len(eqn.invars):
        return program

    # JAX may hand such an object operands for its rules alone.
    def evaluate(*operands: Any) -> list[Any]:
        return jax.tree.leaves(function.expand(*jax.tree.unflatten(function.in_tree, operands)))

    return jax.make_jaxpr(evaluate)(*(x.aval for x in eqn.invars))
