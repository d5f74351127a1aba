"""Rules of primitives: one function registers all that a primitive does."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import linear_util as lu
from jax._src.api_util import debug_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import remat as _remat
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, JaxprTypeError, Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from loopax._src.jax_internals import one_function
from loopax._src.jax_internals.recognise import recognised
from loopax._src.jax_internals.tracing import varying_as_needed
from loopax._src.jax_internals.types import fits, has_tangents, is_nonzero, zeros

# What JAX's check of PRNG keys (`jax_debug_key_reuse`) asks of primitives: which keys they consume, which they make.
#
# There is no public way to say it. The check is a module of its own, which JAX imports when the check is first used.

own_primitives: list[Primitive] = []  # of which the check is told


def checks_keys() -> bool:
    """Whether keys are checked."""
    return jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]


# It computes nothing: JAX finds the equation, whose name stands in errors, where it checks a program.
_uses_keys_p = Primitive("loop_using_keys")
_uses_keys_p.multiple_results = True
_uses_keys_p.def_impl(lambda *_: [])
_uses_keys_p.def_abstract_eval(lambda *_: [])
batching.primitive_batchers[_uses_keys_p] = lambda keys, _: (_uses_keys_p.bind(*keys), [])
mlir.register_lowering(_uses_keys_p, lambda *_: [])


def consume_keys(keys: Sequence[Any]) -> None:
    """Tell JAX that these keys are consumed here."""
    for key in keys:
        _uses_keys_p.bind(key)


def keys_of(closed: ClosedJaxpr, is_key: Sequence[bool]) -> tuple[list[bool], list[bool], dict[int, int]]:
    """Which inputs of a program are keys that it consumes, which results are new keys, and which are inputs.

    `is_key` says which inputs are the integers behind a key; results may be. In the answer, constants are the first
    inputs. Raises `KeyReuseError` where the program itself uses a key twice.
    """
    jaxpr: Any = closed.jaxpr
    inputs = {v for v, marked in zip(jaxpr.invars, is_key, strict=True) if marked}
    wraps: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap" and eqn.invars[0] in inputs:
            wraps.setdefault(eqn.invars[0], eqn.outvars[0])
    keys = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "random_unwrap"} | wraps
    # Before: [*integers behind keys, *others] -> ...
    # After: [*keys, *others] -> ...
    jaxpr = jaxpr.replace(
        invars=[wraps.get(v, v) for v in jaxpr.invars],
        outvars=[v if isinstance(v, Literal) else keys.get(v, v) for v in jaxpr.outvars],
        eqns=[eqn for eqn in jaxpr.eqns if eqn.outvars[:1] not in [[key] for key in wraps.values()]],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    signature, num_inputs, num_consts = _check().jaxpr_type_signature(jaxpr), len(jaxpr.invars), len(jaxpr.constvars)
    consumed = {sink.idx for sink in signature.sinks if np.any(sink.mask)}
    made = {source.idx for source in signature.sources}
    places = [*range(num_inputs, num_inputs + num_consts), *range(num_inputs)]  # JAX has constants last
    kept = {forward.out_idx: places.index(forward.in_idx) for forward in signature.forwards}
    return [i in consumed for i in places], [i in made for i in range(len(jaxpr.outvars))], kept


@lru_cache(maxsize=1)
def _check() -> Any:
    """The module of the check, told of loopax's primitives.

    They consume nothing: `consume_keys` says what loops consume, once for all that a derivative evaluates again.
    """
    check = import_module("jax.experimental.key_reuse._core")
    made = check.dynamic_key_reuse_signature(
        lambda eqn: check.KeyReuseSignature(*map(check.Source, range(len(eqn.outvars))))
    )
    check.key_reuse_signatures.update(dict.fromkeys(own_primitives, made))
    check.key_reuse_signatures[_uses_keys_p] = check.KeyReuseSignature(check.Sink(0))
    return check


# Rules of primitives for `jax.experimental.sparse.sparsify`, which takes half a second to import.


# (operands, some of which are sparse, parameters) -> results
SparseRule = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]
_waiting: dict[Primitive, SparseRule] = {}


def know_sparse() -> None:
    """Register the rules with JAX, if whoever wants them has imported its module. The tables have no public name."""
    module = sys.modules.get("jax.experimental.sparse.transform")
    if module is None:
        return

    def called_by_jax(rule: SparseRule, env: Any, *values: Any, **params: Any) -> Any:  # with references for arrays
        return module.arrays_to_spvalues(env, list(rule(module.spvalues_to_arrays(env, list(values)), params)))

    while _waiting:
        primitive, rule = _waiting.popitem()
        for table in (module.sparse_rules_bcoo, module.sparse_rules_bcsr):
            table[primitive] = partial(called_by_jax, rule)


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse matrix."""
    return isinstance(x, sys.modules["jax.experimental.sparse"].JAXSparse)


def on_sparse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays for sparse matrices, too."""
    return sys.modules["jax.experimental.sparse"].sparsify(function)


Positions = Callable[[Sequence[Any]], Sequence[int]]  # of some of these operands
LinearIn = Sequence[int] | Positions


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


Rule = Callable[..., Any] | None


def register(
    primitive: Primitive,
    *,
    # (*operands, **p) -> results: the primitive as a function of JAX, run by `jax.jit` and compiled by tracing it.
    meaning: Rule = None,
    params: Sequence[str] = (),  # the names of the primitive's parameters, for `jax.jit`
    # (**p) -> whether there may be results that nobody uses, but `dce` keeps.
    has_unused: Rule = None,
    # How the primitive is run, and compiled, where it has no `meaning`; with one, `impl` may run it otherwise, and
    # `lowering` gets the rule that compiles the meaning as its first argument.
    impl: Rule = None,
    lowering: Rule = None,
    abstract_eval: Rule = None,  # (*types, **p) -> types of results; if nothing is given, those of its `meaning`
    effectful_abstract_eval: Rule = None,  # (*types, **p) -> (types of results, effects), in its place
    # (*types, **p) -> [(name of a group, types expected, types given), ...], for `check_jaxpr`. If nothing is given,
    # operands fit if `abstract_eval` takes them.
    expected: Rule = None,
    jvp: Rule = None,  # (primals, tangents, **p) -> (results, tangents of results)
    # (nonzero, *operands, **p) -> (results, nonzero, linear). `nonzero` says which operands have a tangent, and in the
    # answer, which results have one. `linear(*tangents)` gives the tangents of all results, from those of all operands;
    # where there is none, a tangent is an `ad.Zero`. If nothing is given, it follows from `jvp`.
    linearize: Rule = None,
    # The operands in which the primitive is linear, all its results in all of them, by position, or a function of the
    # operands that gives their positions. In the place of `jvp`: the primitive is applied to their tangents, and to the
    # other operands as they are.
    linear_in: LinearIn | None = None,
    transpose: Rule = None,  # (cotangents, *operands, **p) -> theirs, None for what is no `UndefinedPrimal`
    # (*operands, **p) -> numbers of the operands to whose cotangents `transpose` adds in place. As `begun=` it is then
    # given, by these numbers, cotangents that there are already, and gives the sums in the place of what is added.
    adds_in_place: Rule = None,
    partial_eval: Rule = None,  # (trace, *tracers, **p) -> results: runs what is known, leaves the rest
    # How `jax.checkpoint` divides it: (saveable, unknown, instantiated, eqn) -> (known equation, later equation,
    # unknown results, instantiated results, operands to store).
    partial_eval_custom: Rule = None,
    # (*operands, **p) -> results: how a reverse pass through `jax.checkpoint` evaluates the primitive again, under
    # JAX's flag `jax_remat3`; as it is, if nothing is given. Nothing is stored, whatever the checkpoint's policy.
    rematerialize: Rule = None,
    dce: Rule = None,  # (used results, [live operands, from JAX 0.12 on,] eqn) -> (used operands, equation)
    batch: Rule = None,  # (axis, operands, dimensions, **p) -> (results, their dimensions)
    batch_without_axis: Rule = None,  # (operands, dimensions, **p) -> (results, their dimensions), in its place
    sparse: SparseRule | None = None,  # what `sparsify` does with sparse matrices among the operands
) -> None:
    """Tell JAX all that a primitive does, whose parameters are `p`. To be called once for a primitive."""
    own_primitives.append(primitive)
    if meaning is not None:
        meaning = varying_as_needed(meaning)
        traced = jax.jit(meaning, static_argnames=params)
        in_python = impl or traced
        # What has types of its own runs as it is compiled within a program.
        run = in_python if impl or not effectful_abstract_eval else jax.jit(primitive.bind, static_argnames=params)

        def unchecked(*arguments: Any, **params: Any) -> Any:  # a program may hold a step twice, to evaluate it again
            config: Any = jax.config
            # Where JAX looks for NaN, it calls what `jax.jit` was given once more: of a primitive that would be this.
            is_python = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
            if not config.jax_disable_jit:
                params = {name: recognised(x) if isinstance(x, ClosedJaxpr) else x for name, x in params.items()}
            with jax.debug_key_reuse(False) if checks_keys() else nullcontext(), _naming_steps(params):
                return (in_python if is_python else run)(*arguments, **params)

        impl = unchecked
        lower = one_function.lowering(primitive, meaning, has_unused)
        lowering = partial(lowering, lower) if lowering else lower
        abstract_eval = abstract_eval or partial(_types_of, primitive, meaning)
    if linear_in is not None:
        positions = linear_in if callable(linear_in) else lambda _: linear_in
        jvp = partial(_jvp_of_linear, primitive, positions)
    for definition, rule in (
        (primitive.def_impl, impl),
        (primitive.def_abstract_eval, None if effectful_abstract_eval else abstract_eval),
        (primitive.def_effectful_abstract_eval, effectful_abstract_eval),
        (partial(mlir.register_lowering, primitive), lowering),
    ):
        if rule is not None:
            definition(rule)
    by_jvp = jvp and partial(_ad.fallback_linearize_rule, primitive)  # as JAX does where there is no rule: not public
    tables: list[tuple[Any, Rule]] = [
        (_core.custom_typechecks, partial(_check_types, expected, primitive)),
        (ad.primitive_jvps, jvp),
        (_ad.primitive_linearizations, partial(_linearize, linearize) if linearize else by_jvp),
        (ad.primitive_transposes, transpose),
        (_ad.fancy_transposes, adds_in_place and partial(_transpose_in_place, transpose, adds_in_place)),
        (pe.custom_partial_eval_rules, partial_eval),
        (pe.partial_eval_jaxpr_custom_rules, partial_eval_custom),
        (_remat.rules, partial(_rematerialize, primitive, rematerialize or primitive.bind)),
        (pe.dce_rules, dce),
        (batching.fancy_primitive_batchers, batch),
        (batching.primitive_batchers, batch_without_axis),
        (_waiting, sparse),
    ]
    for table, rule in tables:
        if rule is not None:
            table[primitive] = varying_as_needed(rule)


@contextmanager
def _naming_steps(params: dict[str, Any]) -> Iterator[None]:
    """Say what finds the step in which a loop has come to a NaN."""
    try:
        yield
    except FloatingPointError as error:
        if "body" in params or "step" in params:
            error.add_note(
                "Note of loopax: give finite=True to the loop. It ends before the step that makes a NaN or an "
                "infinity, and the error names the step, the element, and the number before."
            )
        raise


def _types_of(primitive: Primitive, meaning: Callable[..., Any], *types: Any, **params: Any) -> Any:
    found = jax.make_jaxpr(partial(meaning, **params))(*types).out_avals
    return found if primitive.multiple_results else found[0]


def _check_types(rule: Rule, primitive: Primitive, _: Any, /, *atoms: Any, **params: Any) -> Any:
    """The types of the results and the effects, if the primitive takes operands of these types.

    JAX hands over variables and constants, behind a function that names them in errors.
    """
    avals = [atom.aval for atom in atoms]
    in_words = lambda avals: ", ".join(map(str, avals))  # noqa: E731
    try:
        for group, expected, given in rule(*avals, **params) if rule else []:
            if not fits(expected, given):
                raise TypeError(f"{group}: expected ({in_words(expected)}), got ({in_words(given)})")
        found, effects = primitive.abstract_eval(*avals, **params)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        raise JaxprTypeError(f"{primitive}: no operands of types ({in_words(avals)}): {error}") from error
    return found if primitive.multiple_results else [found], effects


# Large cotangents, to which equations add a little.
#
# JAX collects the cotangents of a value from all equations that read it, and adds them. Each would be an array of zeros
# with a few rows in it. The collections, `GradAccum`, are not public.


def _transpose_in_place(rule: Any, adds: Callable[..., Any], cts: Sequence[Any], *operands: Any, **params: Any) -> None:
    """A transpose as JAX calls it, with collections of cotangents in the place of operands that have no value."""
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return
    is_collected = [isinstance(x, _ad.GradAccum) for x in operands]
    given = [ad.UndefinedPrimal(x.aval) if flag else x for flag, x in zip(is_collected, operands, strict=True)]
    places = [i for i in adds(*given, **params) if not any(operands[i] is x for x in operands[:i])]
    begun = {i: operands[i].val for i in places if _has_begun(operands[i])}
    found = rule(cts, *given, begun=begun, **params)
    for i in begun:
        operands[i].val = found[i]
    for i, (x, ct) in enumerate(zip(operands, found, strict=True)):
        if is_collected[i] and i not in begun:
            x.accum(ct)


def _has_begun(x: Any) -> bool:
    return isinstance(x, _ad.ValAccum) and not isinstance(x.val, ad.Zero) and jax.typeof(x.val) == x.aval


def _linearize(rule: Callable[..., Any], _: bool, nonzero: Sequence[bool], *operands: Any, **p: Any) -> Any:
    """The rule as JAX calls it, which also wants residuals. `linear` holds them, for JAX calls it at once."""
    nonzero = [flag and has_tangents(x) for flag, x in zip(nonzero, operands, strict=True)]
    results, nonzero_results, linear = rule(nonzero, *operands, **p)
    linear = varying_as_needed(linear)
    if jax.__version_info__ >= (0, 11, 1):
        return results, nonzero_results, (), None, lambda _residuals, _structured, *tangents: linear(*tangents)
    return results, nonzero_results, (), lambda _residuals, *tangents: linear(*tangents)


def linearized(jvp: Callable[..., Any], nonzero: Sequence[bool], *operands: Any, **params: Any) -> Any:
    """The linearisation that follows from a jvp, both as `register` takes them: what JAX does without a rule."""
    called = lu.wrap_init(partial(jvp, **params), debug_info=debug_info("linearized", jvp, operands, {}))
    found: Any = _ad.linearize_from_jvp(called, True, nonzero, False, False, operands, {})
    results, nonzero_results, residuals, *others, linear = found  # from JAX 0.11.1 on, there are others
    return results, nonzero_results, lambda *tangents: linear(residuals, *others, *tangents)


def _rematerialize(primitive: Primitive, again: Callable[..., Any], _: Any, /, *operands: Any, **params: Any) -> Any:
    """The rule as JAX calls it: results, nothing stored, and how they are evaluated again."""
    results = primitive.bind(*operands, **params)
    if jax.__version_info__ >= (0, 12):
        return results, (), lambda _stored, *operands: again(*operands, **params)
    return results, lambda *operands: again(*operands, **params)


def _jvp_of_linear(primitive: Primitive, positions: Positions, primals: Any, tangents: Any, **params: Any) -> Any:
    """The jvp of a primitive that is linear in its operands at these positions."""
    results, linear = primitive.bind(*primals, **params), positions(primals)
    if not any(is_nonzero(tangents[i]) for i in linear):
        return results, jax.tree.map(lambda x: ad.Zero(jax.typeof(x).to_tangent_aval()), results)
    # Before: the linear operands and the others. After: tangents of the linear operands, and the others as they are
    operands = list(primals)
    for i in linear:
        operands[i] = tangents[i] if is_nonzero(tangents[i]) else zeros(jax.typeof(primals[i]))
    return results, primitive.bind(*operands, **params)


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
