"""Rules of primitives: one function registers all that a primitive does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
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


def register(
    primitive: Primitive,
    *,
    meaning: Callable[..., Any] | None = None,
    params: Sequence[str] = (),
    impl: Callable[..., Any] | None = None,
    lowering: Callable[..., Any] | None = None,
    abstract_eval: Callable[..., Any] | None = None,
    effectful_abstract_eval: Callable[..., Any] | None = None,
    typecheck: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    linear_transpose: Callable[..., Any] | None = None,
    partial_eval: Callable[..., Any] | None = None,
    partial_eval_custom: Callable[..., Any] | None = None,
    dce: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    batch_without_axis: Callable[..., Any] | None = None,
) -> None:
    """Tell JAX all that a primitive does. To be called once for a primitive.

    Parameters
    ----------
    primitive
        The primitive. `p` are its parameters, below.
    meaning
        `(*operands, **p) -> results`: the primitive as a function of JAX, which is run by `jax.jit` and compiled by
        tracing it.
    params
        The names of the primitive's parameters, for `jax.jit`.
    impl, lowering
        How the primitive is run, and compiled, where it has no `meaning`.
    abstract_eval
        `(*types, **p) -> types of results`.
    effectful_abstract_eval
        `(*types, **p) -> (types of results, effects)`, in its place.
    typecheck
        `(*types, **p) -> (types of results, effects)`: raises `JaxprTypeError` where operands do not fit. Only
        `check_jaxpr` calls it.
    jvp
        `(primals, tangents, **p) -> (results, tangents of results)`.
    transpose
        `(cotangents, *operands, **p) -> cotangents of operands`, None for those that are no `UndefinedPrimal`.
    linear_transpose
        `(cotangent, operand, **p) -> [cotangent of the operand]`, in the place of `jvp` and `transpose`: of a primitive
        that is linear in its only operand.
    partial_eval
        `(trace, *tracers, **p) -> results`: runs what is known, stages the rest.
    partial_eval_custom
        The same under `jax.checkpoint`: `(saveable, unknown, instantiated, eqn) -> (known equation, staged equation,
        unknown results, instantiated results, operands to store)`.
    dce
        `(used results, [live operands,] eqn) -> (used operands, equation)`; live ones are given from JAX 0.12 on.
    batch
        `(axis, operands, dimensions, **p) -> (results, their dimensions)`.
    batch_without_axis
        `(operands, dimensions, **p) -> (results, their dimensions)`, in its place.

    """
    if meaning is not None:
        impl = jax.jit(meaning, static_argnames=params)
        lowering = mlir.lower_fun(meaning, multiple_results=primitive.multiple_results)
    for definition, rule in (
        (primitive.def_impl, impl),
        (primitive.def_abstract_eval, abstract_eval),
        (primitive.def_effectful_abstract_eval, effectful_abstract_eval),
        (partial(mlir.register_lowering, primitive), lowering),
        (partial(ad.deflinear2, primitive), linear_transpose),
    ):
        if rule is not None:
            definition(rule)
    tables: list[tuple[Any, Callable[..., Any] | None]] = [
        (_core.custom_typechecks, typecheck and partial(_check_types, typecheck)),
        (ad.primitive_jvps, jvp),
        (ad.primitive_transposes, transpose),
        (pe.custom_partial_eval_rules, partial_eval),
        (pe.partial_eval_jaxpr_custom_rules, partial_eval_custom),
        (pe.dce_rules, dce),
        (batching.fancy_primitive_batchers, batch),
        (batching.primitive_batchers, batch_without_axis),
    ]
    for table, rule in tables:
        if rule is not None:
            table[primitive] = rule


def _check_types(rule: Callable[..., Any], _: Any, /, *atoms: Any, **params: Any) -> Any:
    """JAX hands over variables and constants, behind a function that names them in errors."""
    return rule(*(atom.aval for atom in atoms), **params)


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
