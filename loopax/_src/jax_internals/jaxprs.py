"""Jaxprs: with other inputs, outputs or equations, with constants as inputs, without dead code."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import select_n_p, stop_gradient_p
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from loopax._src.jax_internals.primitives import equations_in, inner_jaxprs, stops_gradient
from loopax._src.jax_internals.rules import new_primitive, register
from loopax._src.jax_internals.types import has_tangents, zeros

# Mutable arrays (`jax.new_ref`): what uses them, and programs that carry their values in place of them.

_EFFECTS = ("ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect")


def is_reference(x: Any) -> bool:
    """Whether this is a mutable array, or a type of one; the class is not public."""
    aval = x if isinstance(x, core.AbstractValue) else getattr(x, "aval", None)
    return "Ref" in type(aval).__name__


def uses_references(closed: ClosedJaxpr) -> bool:
    """Whether a program takes mutable arrays, or makes some."""
    takes = any(map(is_reference, closed.in_avals))
    return takes or any(type(effect).__name__ in _EFFECTS for effect in closed.effects)


def with_values(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with values in place of mutable arrays: it takes them, and their last values are its last results.

    JAX calls it "discharging state", which has no public name. A program must have no constants.
    """
    if jax.__version_info__ < (0, 10, 1):
        jaxpr, consts = _discharge.discharge_state(closed.jaxpr, closed.consts)  # pyright: ignore
        return ClosedJaxpr(jaxpr, consts)
    # Functions of `jnp` that are objects stay what they are: they have derivatives of their own.
    return _discharge.discharge_state(closed, lower=False)


# Effects of equations.


def happens(effects: Iterable[Any]) -> bool:
    """Whether there are effects but those that only say over which axis something communicates."""
    return any(not isinstance(e, _core.NamedAxisEffect) for e in effects)


def are_ordered(effects: Iterable[Any]) -> bool:
    """Whether one of these effects has an order."""
    return any(map(_effects.ordered_effects.contains, effects))


def undifferentiable_effects(closed: ClosedJaxpr) -> list[Any]:
    """Effects that a derivative may neither drop nor repeat: ordered ones, and `io_callback`'s."""
    return [
        e
        for e in closed.effects
        if _effects.ordered_effects.contains(e) or type(e).__name__ in ("IOEffect", "OrderedIOEffect")
    ]


# Partial evaluation: which values are known, and what is left for later.


def is_known(tracer: Any) -> bool:
    """Whether partial evaluation knows this value now; the tracer is not part of JAX's public API."""
    return tracer.is_known()


def known_value(x: Any) -> Any:
    """The value behind a known tracer of partial evaluation, or what is given.

    In a function that `linear_transpose` traces, what needs no linear operand is no tracer; but the results of an
    equation of which some are linear are tracers, which hold the known ones.
    """
    return x.pval.get_known() if isinstance(x, _pe.JaxprTracer) and x.is_known() else x


def known_now(x: Any) -> Any:
    """What partial evaluation knows of a value; None: nothing."""
    value = known_value(x)
    return None if isinstance(value, _pe.JaxprTracer) else value


def leave_for_later(trace: Any, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Write `primitive` into the program that partial evaluation leaves for later, as JAX does where it has no rule."""
    return trace.default_process_primitive(primitive, tracers, params)


def evaluate_partially(trace: Any, closed: ClosedJaxpr, operands: Sequence[Any], unknown: Sequence[bool]) -> list[Any]:
    """Evaluate a jaxpr on values of which partial evaluation knows some, equation by equation.

    `unknown` says which results are made unknown, also those that turn out to depend on known values alone (an array
    without elements): in `jax.checkpoint`, JAX has asked before, with flags instead of values, and takes the first
    answer as given. A rule for a primitive runs outside of its `trace`; what sets the current one is not public.
    """
    with _core.set_current_trace(trace):
        results = map(trace.to_jaxpr_tracer, jaxpr_as_fun(closed)(*operands))
        return [trace.instantiate_const(x) if later else x for x, later in zip(results, unknown, strict=True)]


def partial_eval_jaxpr(
    closed: ClosedJaxpr, unknown: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool]]:
    """Split a jaxpr in what can be computed now, which also returns residuals, and what cannot.

    Public in `jax.interpreters.partial_eval` from JAX 0.12 on, private before.
    """
    known, later, out_unknown, _ = _pe.partial_eval_jaxpr_nounits(closed, list(unknown), list(instantiate))
    return known, later, list(out_unknown)


def linear_transpose(function: Callable[..., Any], *types: Any) -> Callable[[Any], Any]:
    """`jax.linear_transpose`, also for extended dtypes, which that refuses.

    Cotangents that are zero are those of their types, in memory and dtype; JAX's are numbers on the device. From JAX
    0.12 on a backward rule may also log (`jax.custom_vjp.defvjp_with_logs`), which is refused.
    """
    avals, structure = jax.tree.flatten(types)
    debug_info = _api_util.debug_info("linear_transpose", function, types, {}).with_unknown_names()
    flat = _lu.wrap_init(lambda *xs: jax.tree.leaves(function(*structure.unflatten(xs))), debug_info=debug_info)
    jaxpr, _, consts = _pe.trace_to_jaxpr_nounits(flat, list(map(_pe.PartialVal.unknown, avals)), instantiate=True)
    jaxpr, _ = _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    linear = [ad.UndefinedPrimal(aval.to_ct_aval()) for aval in avals]

    def transposed(cts: Any) -> Any:
        backward_pass: Any = _ad.backward_pass
        with _stopped_cotangents() if _stops_in_choices(jaxpr) else nullcontext():
            if jax.__version_info__ < (0, 12):
                found, logs = backward_pass(jaxpr, True, consts, linear, jax.tree.leaves(cts)), {}
            else:
                found, logs = backward_pass(jaxpr, True, consts, linear, jax.tree.leaves(cts), return_logs=True)
        if logs:
            raise NotImplementedError(
                f"the backward rule of a function in the body of a loop logs {', '.join(map(repr, logs))}, and loops "
                "of loopax do not hand logs on. Use `jax.lax.scan` there, log with `jax.debug.callback`, or define the "
                "rule with `defvjp`, without logs."
            )
        return structure.unflatten([zeros(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in found])

    return transposed


# JAX refuses to transpose `stop_gradient`, and writes it into programs that are to be transposed: where lanes of a
# `lax.cond` take different branches, the operands of the others pass through it, tangents as well.
_num_transposing, _transposing = 0, Lock()


def _stops_in_choices(jaxpr: Any) -> bool:
    """Whether there are any, and each is a choice: the other is its operand."""
    stopping = [eqn for eqn in jaxpr.eqns if stops_gradient(eqn)]
    for eqn in stopping:
        (x,), (y,) = eqn.invars, eqn.outvars
        uses = [use for use in jaxpr.eqns if any(atom is y for atom in use.invars)]
        is_choice = all(use.primitive is select_n_p and any(atom is x for atom in use.invars) for use in uses)
        if not is_choice or any(atom is y for atom in jaxpr.outvars):
            return False
    programs = chain.from_iterable(map(inner_jaxprs, jaxpr.eqns))
    inner = [program.jaxpr for program in programs if any(map(stops_gradient, equations_in(program)))]
    return bool(stopping or inner) and all(map(_stops_in_choices, inner))


@contextmanager
def _stopped_cotangents() -> Iterator[None]:
    """Meanwhile, what has passed `stop_gradient` has no cotangent. JAX's table of rules is as it was afterwards."""
    global _num_transposing  # noqa: PLW0603 - how many threads need the rule
    with _transposing:
        _num_transposing += 1
        ad.primitive_transposes[stop_gradient_p] = lambda _, x: [ad.Zero(x.aval)]
    try:
        yield
    finally:
        with _transposing:
            _num_transposing -= 1
            if not _num_transposing:
                del ad.primitive_transposes[stop_gradient_p]


# Arrays of 64 bits where `jax_enable_x64` is off: derivatives of operations that take elements out, or put them in.


def keep_bits(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, which is linear in its real arrays together; its derivatives keep 64 bits.

    Where `jax_enable_x64` is off, the zeros in JAX's transposes of gathers, slices, pads and updates have 32 bits, and
    do not fit cotangents of 64. So there the function becomes one operation, whose rules are written down with the
    flag on.
    """
    dtypes = [jax.typeof(x).dtype for x in arrays]  # real or complex ones that JAX would cut
    if all(jax.dtypes.canonicalize_dtype(d) == d for d in dtypes if jnp.issubdtype(d, jnp.inexact)):
        return function(*arrays)
    with jax.enable_x64(True):
        program, results = jax.make_jaxpr(function, return_shape=True)(*map(jax.typeof, arrays))
    return jax.tree.unflatten(jax.tree.structure(results), keep_bits_p.bind(*arrays, program=program))


keep_bits_p = new_primitive("keep_bits")


def _evaluate(*arrays: Any, program: ClosedJaxpr) -> list[Any]:
    """The meaning of the primitive."""
    with jax.enable_x64(True):
        return jaxpr_as_fun(program)(*arrays)


def _transpose(cts: Sequence[Any], *arrays: Any, program: ClosedJaxpr) -> list[Any]:
    """The transpose in the arrays that are undefined primals, as an operation of the same kind."""
    types = {i: x.aval for i, x in enumerate(arrays) if ad.is_undefined_primal(x)}
    known = {i: x for i, x in enumerate(arrays) if i not in types}

    def transposed(*values: Any) -> list[Any]:
        given = dict(zip(known, values[len(cts) :], strict=True))

        def results(linear: dict[int, Any]) -> list[Any]:
            return _evaluate(*((given | linear)[i] for i in range(len(arrays))), program=program)

        (found,) = linear_transpose(results, types)(values[: len(cts)])
        return [found[i] for i in types]

    if all(isinstance(ct, ad.Zero) for ct in cts):
        found = map(ad.Zero, types.values())
    else:
        written_out = [zeros(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in cts]
        found = keep_bits(transposed, *written_out, *known.values())
    of_linear = dict(zip(types, found, strict=True))
    return [of_linear.get(i) for i in range(len(arrays))]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], program: ClosedJaxpr) -> Any:
    mapped = jax.vmap(jaxpr_as_fun(program), in_axes=[None if d is None else int(d) for d in dims])
    results = keep_bits(mapped, *arrays)
    return results, [0] * len(results)


register(
    keep_bits_p,
    meaning=_evaluate,
    params=["program"],
    abstract_eval=lambda *_, program: program.out_avals,
    linear_in=lambda arrays: [i for i, x in enumerate(arrays) if has_tangents(x)],
    transpose=_transpose,
    batch_without_axis=_batch,
)


# Jaxprs with other parts. From JAX 0.12 on `Jaxpr` and `ClosedJaxpr` are one class, and the ways from one to the other,
# `.jaxpr`, `.consts` and `ClosedJaxpr(...)`, are to be removed. What both classes have is read anywhere: `eqns`,
# `invars`, `outvars`, `in_avals`, `out_avals`, `effects`.


def constants_of(closed: ClosedJaxpr) -> dict[Any, Any]:
    """The variables of a jaxpr's constants, with these."""
    return dict(zip(closed.constvars, closed.consts, strict=True))


def replace_jaxpr(
    closed: ClosedJaxpr,
    invars: Sequence[Any] | None = None,
    outvars: Sequence[Any] | None = None,
    eqns: Sequence[Any] | None = None,
) -> ClosedJaxpr:
    """A jaxpr with other inputs, outputs or equations. With other inputs it loses the names of its arguments."""
    jaxpr: Any = closed.jaxpr
    changes: dict[str, Any] = {}
    if invars is not None:
        changes |= {"invars": list(invars), "debug_info": jaxpr.debug_info.with_unknown_names()}
    if outvars is not None:
        changes["outvars"] = list(outvars)
    if eqns is not None:
        changes |= {"eqns": list(eqns), "effects": set().union(*(eqn.effects for eqn in eqns))}
    return ClosedJaxpr(jaxpr.replace(**changes), closed.consts)


def open_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its constants as first inputs, and the constants.

    `jax.closure_convert` does this for arrays that are perturbed only, and not for integers.
    """
    jaxpr = closed.jaxpr
    invars, consts = [*closed.constvars, *closed.invars], list(closed.consts)
    debug_info = jaxpr.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info), []), consts  # type: ignore[attr-defined]


def dce(closed: ClosedJaxpr, used: Sequence[bool], keep: Sequence[bool] | bool) -> tuple[ClosedJaxpr, list[bool]]:
    """Remove what the used outputs do not need; inputs marked in `keep` stay.

    Where nothing is removed, the program is the same object, which caches know.
    """
    jaxpr, used_inputs = pe.dce_jaxpr(closed.jaxpr, list(used), keep if isinstance(keep, bool) else list(keep))
    less = ClosedJaxpr(jaxpr, closed.consts)
    return closed if _is_as_large(less, closed) else less, list(used_inputs)


def _is_as_large(less: ClosedJaxpr, all_of_it: ClosedJaxpr) -> bool:
    """Whether nothing has been removed from a program."""
    lengths = [len(less.invars), len(less.outvars), len(less.eqns)]
    if lengths != [len(all_of_it.invars), len(all_of_it.outvars), len(all_of_it.eqns)]:
        return False
    return all(x is y or _is_as_large_in(x, y) for x, y in zip(less.eqns, all_of_it.eqns, strict=True))


def _is_as_large_in(less: Any, all_of_it: Any) -> bool:
    """Whether nothing has been removed from the programs in an equation."""
    if (len(less.invars), len(less.outvars)) != (len(all_of_it.invars), len(all_of_it.outvars)):
        return False
    pairs = zip(inner_jaxprs(less), inner_jaxprs(all_of_it), strict=True)
    return all(one is other or _is_as_large(one, other) for one, other in pairs)
