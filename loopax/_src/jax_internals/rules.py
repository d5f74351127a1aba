"""Rules of primitives."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax._src import checkify as _checkify
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import partial_eval as pe


def new_primitive(name: str) -> Primitive:
    """A primitive of several results. JAX may call its bodies high-level, but never has to lower them by a rule.

    From JAX 0.12 on, `jnp.searchsorted` and the like are equations that hold an object with its own derivatives. JAX
    lowers such equations before it compiles, and calls every primitive high-level that has one in a jaxpr among its
    parameters; it then asks that primitive for a rule, `to_lojax`. Here a body keeps these equations, because
    derivatives and batches want their rules, and `mlir.lower_fun`, by which loops are compiled, lowers all it traces.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.is_high = lambda *_, **__: False  # pyright: ignore[reportAttributeAccessIssue]
    jet.jet_rules[primitive] = _refuse_jet
    _checkify.error_checks[primitive] = partial(_only_user_checks_outside, primitive)
    return primitive


def _refuse_jet(*_: Any, **__: Any) -> None:
    """Instead of a KeyError with the primitive's name. `jet` has no rules for loops of `jax.lax` either."""
    raise NotImplementedError(
        "jax.experimental.jet has no rule for loops, neither of loopax nor of jax.lax. Nest jax.jvp instead: "
        "`jax.jvp(lambda x: jax.jvp(f, (x,), (v,))[1], (x,), (v,))` holds the second derivative along v."
    )


def _only_user_checks_outside(primitive: Primitive, *arguments: Any, **params: Any) -> Any:
    """Refuse what `checkify` would look for in a body. Without this rule JAX would not look, and say nothing."""
    # The arguments are the error so far, what to look for, and operands. JAX 0.12 has a context before them.
    error_at = next(i for i, argument in enumerate(arguments) if isinstance(argument, _checkify.Error))
    error, enabled, *operands = arguments[error_at:]
    bodies = [value for value in params.values() if isinstance(value, ClosedJaxpr)]
    if bodies and not enabled <= _checkify.user_checks:
        raise NotImplementedError(
            "jax.experimental.checkify does not look into loops of loopax, so it would miss what its automatic checks "
            "(float_checks, index_checks, div_checks) are for. Give errors=checkify.user_checks, its default, and find "
            "NaNs in loops with `jax.debug_nans(True)`."
        )
    if any(isinstance(effect, _checkify.ErrorEffect) for body in bodies for effect in body.effects):
        raise NotImplementedError(
            "the body of a loop calls checkify.check, which loops of loopax do not hand on. Call `equinox.error_if` in "
            "the body, or keep a flag in the carry and check it after the loop."
        )
    return error, primitive.bind(*operands, **params)


def used_inputs(eqn: Any, used: list[bool]) -> list[bool] | None:
    """Which inputs an equation needs for these outputs, by the rule for its primitive; None where there is no rule.

    From JAX 0.12 on a rule also takes which inputs are live.
    """
    rule: Callable[..., Any] | None = pe.dce_rules.get(eqn.primitive)
    if rule is None:
        return None
    try:
        return rule(used, eqn)[0]
    except TypeError:
        return rule(used, [True] * len(eqn.invars), eqn)[0]
