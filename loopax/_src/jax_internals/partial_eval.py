"""Partial evaluation: which values are known, and what is left for later."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad

from loopax._src.jax_internals.types import zeros


def is_known(tracer: Any) -> bool:
    """Whether partial evaluation knows this value now; the tracer is not part of JAX's public API."""
    return tracer.is_known()


def known_value(tracer: Any) -> Any:
    """The value behind a known tracer of partial evaluation, or the tracer itself."""
    return tracer.pval.get_known() if tracer.is_known() else tracer


def known_now(x: Any) -> Any:
    """What partial evaluation knows of a value in a function that `linear_transpose` traces; None: nothing.

    JAX evaluates such a function partially, and hands what needs no linear operand through as it is; but the results of
    an equation of which some are linear are tracers, which hold the known ones.
    """
    if not isinstance(x, _pe.JaxprTracer):
        return x
    return x.pval.get_known() if x.is_known() else None


def stage_unknown(trace: Any, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Write `primitive` into the program that partial evaluation leaves for later.

    The same as what JAX does for a primitive without a rule of its own.
    """
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

    Cotangents that are zero are those of their types, in memory and dtype; JAX's are numbers on the device.
    """
    avals, structure = jax.tree.flatten(types)
    debug_info = _api_util.debug_info("linear_transpose", function, types, {})
    flat = _lu.wrap_init(
        lambda *xs: jax.tree.leaves(function(*structure.unflatten(xs))), debug_info=debug_info.with_unknown_names()
    )
    jaxpr, _, consts = _pe.trace_to_jaxpr_nounits(flat, list(map(_pe.PartialVal.unknown, avals)), instantiate=True)
    jaxpr, _ = _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    linear = [ad.UndefinedPrimal(aval.to_ct_aval()) for aval in avals]

    def transposed(cts: Any) -> Any:
        found = _backward_pass(jaxpr, consts, linear, jax.tree.leaves(cts))
        return structure.unflatten([zeros(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in found])

    return transposed


def _backward_pass(jaxpr: Any, consts: Sequence[Any], linear: list[Any], cts: list[Any]) -> list[Any]:
    """The cotangents. From JAX 0.12 on a backward rule may also log (`jax.custom_vjp.defvjp_with_logs`)."""
    if jax.__version_info__ < (0, 12):
        return _ad.backward_pass(jaxpr, True, consts, linear, cts)
    found, logs = _ad.backward_pass(jaxpr, True, consts, linear, cts, return_logs=True)  # pyright: ignore[reportCallIssue]
    if logs:
        raise NotImplementedError(
            f"the backward rule of a function in the body of a loop logs {', '.join(map(repr, logs))}, and loops of "
            "loopax do not hand logs on. Use `jax.lax.scan` there, log with `jax.debug.callback`, or define the rule "
            "with `defvjp`, without logs."
        )
    return found
