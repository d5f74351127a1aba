"""Every use of private or version-dependent JAX, each with its reason.

Tested on JAX 0.10.0 and 0.10.2 (Python 3.11) and JAX 0.12.0.1 (Python 3.12) by `make test-all`. The rest
of loopax imports these names from here, so that a new JAX version is a change to this file alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import core, lax
from jax._src import api_util as _api_util
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun, mapped_aval, unmapped_aval
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "AbstractValue",
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "Primitive",
    "ad",
    "argument_names",
    "axis_arguments",
    "batched_outputs",
    "batching",
    "bind_checkpoint",
    "bind_shard_map",
    "call_dce_rule",
    "calling_lines",
    "communicates_over",
    "dce",
    "equation_context",
    "evaluate_partially",
    "happens",
    "is_for_export",
    "is_known",
    "is_nonzero",
    "is_of_jax",
    "is_reference",
    "jaxpr_as_fun",
    "known_value",
    "mapped_aval",
    "mesh_axis",
    "mlir",
    "name_in_errors",
    "names_axis",
    "new_primitive",
    "of_weak_type",
    "on_mesh",
    "open_constants",
    "partial_eval_jaxpr",
    "pe",
    "replace_jaxpr",
    "scan_sizes",
    "stage_unknown",
    "strong",
    "to_weak",
    "trace_context",
    "trace_state",
    "undifferentiable_effects",
    "unmapped_aval",
    "user_lines",
    "vary",
    "vary_like",
    "varying_axes",
    "with_varying_axes",
    "without_folding",
    "zeros",
]

_JAX = str(Path(jax.__file__).parent)
AbstractValue = Any  # jax.core.AbstractValue promises no fields; ours have shape, dtype and sharding


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


def strong(aval: AbstractValue) -> AbstractValue:
    """The same type without JAX's "weak type" flag (`strip_weak_type` is not a public method)."""
    return aval.strip_weak_type()


def to_weak(x: jax.Array) -> jax.Array:
    """Give an array a weak type again. Public JAX can only take weak types away."""
    return _lax._convert_element_type(x, x.dtype, weak_type=True)  # pyright: ignore[reportReturnType]


def zeros(aval: AbstractValue) -> jax.Array:
    """Zeros of exactly this type: sharded as it is, and varying over the same `shard_map` axes.

    `aval.mat` holds the varying axes (JAX calls the concept "manual axis types"); no public name.
    """
    mesh = aval.sharding.mesh
    explicit = not mesh.empty and mesh._any_axis_explicit
    array = lax.full(aval.shape, 0, aval.dtype, sharding=aval.sharding if explicit else None)
    return vary(array, varying_axes(aval))


def of_weak_type(x: jax.Array, aval: AbstractValue) -> jax.Array:
    """The array, weakly typed if and only if this type is."""
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) == weak:
        return x
    return to_weak(x) if weak else lax.convert_element_type(x, x.dtype)


def vary_like(x: jax.Array, aval: AbstractValue) -> jax.Array:
    """Mark `x` as varying over the `shard_map` axes over which `aval` varies."""
    return vary(x, varying_axes(aval) - varying_axes(x))


def varying_axes(x: Any) -> frozenset[Any]:
    """The `shard_map` axes over which an array varies, or one of this type. `mat` has no public name."""
    aval: AbstractValue = x if isinstance(x, core.AbstractValue) else jax.typeof(x)
    return aval.mat.varying


def with_varying_axes(aval: AbstractValue, axes: frozenset[Any]) -> AbstractValue:
    """A type that varies over these axes and no others. It may have been made outside of the `shard_map`."""
    aval = on_mesh(aval) if axes else aval
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def on_mesh(aval: AbstractValue) -> AbstractValue:
    """A type that knows the mesh of the trace. The type of a constant knows none, and gets it here."""
    if not aval.sharding.mesh.empty:
        return aval
    mesh = jax.sharding.get_abstract_mesh()
    return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(aval.shape))))


def vary(x: jax.Array, axes: Any) -> jax.Array:
    """Mark an array as varying over these axes, over which it does not."""
    return lax.pcast(x, tuple(axes), to="varying") if axes else x  # pyright: ignore[reportReturnType]


def is_nonzero(tangent: Any) -> bool:
    """Whether a tangent is more than a symbolic zero (integers have tangents of dtype float0)."""
    return not isinstance(tangent, ad.Zero) and jax.typeof(tangent).dtype != _dtypes.float0


def is_known(tracer: Any) -> bool:
    """Whether partial evaluation knows this value now; the tracer is not part of JAX's public API."""
    return tracer.is_known()


def known_value(tracer: Any) -> Any:
    """The value behind a known tracer of partial evaluation, or the tracer itself."""
    return tracer.pval.get_known() if tracer.is_known() else tracer


def stage_unknown(trace: Any, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Write `primitive` into the program that partial evaluation leaves for later.

    The same as what JAX does for a primitive without a rule of its own.
    """
    return trace.default_process_primitive(primitive, tracers, params)


@contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Evaluate an equation under the settings, and for the source line, for which it was traced."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def user_lines(eqn: Any) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that led to an equation, innermost first, without JAX's own.

    JAX prints them beside jaxprs; there is no public way to ask.
    """
    return _lines(eqn.source_info)


def calling_lines() -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that led here, or to the equation that is evaluated (`equation_context`)."""
    return _lines(_source_info.current())


def _lines(source_info: Any) -> Iterator[tuple[str, int, str]]:
    for frame in _source_info.user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def argument_names(closed: ClosedJaxpr) -> tuple[str, ...]:
    """What the inputs of a jaxpr were called in the function that was traced; empty where that is not known."""
    names = closed.jaxpr.debug_info.arg_names  # type: ignore[attr-defined]
    return tuple(names) if names is not None and len(names) == len(closed.in_avals) else ()


def name_in_errors(function: Callable[..., Any], caller: str, source: str, arguments: Sequence[str]) -> None:
    """Let JAX's errors name these in place of a function and its arguments, when `function` is traced.

    `source` is a name, and where it stands. JAX keeps them in an attribute that its own wrappers set: there is no
    public argument for them.
    """
    debug_info = _core.DebugInfo(caller, source, tuple(arguments), _core.initial_result_paths)
    _api_util.save_wrapped_fun_debug_info(function, debug_info)


def is_of_jax(closed: ClosedJaxpr) -> bool:
    """Whether a jaxpr is of a function of JAX, which may have been traced for another caller, and have his lines."""
    source = closed.jaxpr.debug_info.func_src_info  # type: ignore[attr-defined]
    return f"{_JAX}/" in (source or "")


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many constants and leaves of the carry a `lax.scan` has; JAX 0.12 keeps them in trees of its own."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def bind_shard_map(eqn: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    """A `shard_map` as in this equation, of another function. The name of its axes changed before 0.10."""
    params = eqn.params
    mapped = jax.shard_map(
        lambda *xs: tuple(function(*xs)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*operands)


def bind_checkpoint(eqn: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    """A `jax.checkpoint` as in this equation, of another function; the primitive's parameters are private."""
    checkpoint = jax.checkpoint(function, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return checkpoint(*operands)


def evaluate_partially(trace: Any, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on values of which partial evaluation knows some, equation by equation.

    A rule for a primitive runs outside of its `trace`; what sets the current one is not public.
    """
    with _core.set_current_trace(trace):
        return jaxpr_as_fun(closed)(*operands)


def partial_eval_jaxpr(
    closed: ClosedJaxpr, unknown: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool]]:
    """Split a jaxpr in what can be computed now, which also returns residuals, and what cannot.

    Public in `jax.interpreters.partial_eval` from JAX 0.12 on, private before.
    """
    known, later, out_unknown, _ = _pe.partial_eval_jaxpr_nounits(closed, list(unknown), list(instantiate))
    return known, later, list(out_unknown)


def dce(closed: ClosedJaxpr, used: Sequence[bool], keep: Sequence[bool] | bool) -> tuple[ClosedJaxpr, list[bool]]:
    """Remove what the used outputs do not need; inputs marked in `keep` stay.

    The type of `jaxpr` under a ClosedJaxpr changed in 0.12, where both are one class.
    """
    jaxpr, used_inputs = pe.dce_jaxpr(closed.jaxpr, list(used), keep if isinstance(keep, bool) else list(keep))
    return ClosedJaxpr(jaxpr, closed.consts), list(used_inputs)


def call_dce_rule(rule: Callable[..., Any], used: list[bool], eqn: Any) -> list[bool]:
    """Which inputs an equation needs for these outputs, by JAX's own rule for its primitive.

    From JAX 0.12 on a rule also takes which inputs are live.
    """
    try:
        return rule(used, eqn)[0]
    except TypeError:
        return rule(used, [True] * len(eqn.invars), eqn)[0]


def replace_jaxpr(
    closed: ClosedJaxpr, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any] | None = None
) -> ClosedJaxpr:
    """The same equations, or some of them, with other inputs and outputs; names of arguments no longer apply."""
    jaxpr = closed.jaxpr
    debug_info = jaxpr.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    changes: dict[str, Any] = {"invars": list(invars), "outvars": list(outvars), "debug_info": debug_info}
    if eqns is not None:
        changes |= {"eqns": list(eqns), "effects": set().union(*(eqn.effects for eqn in eqns))}
    return ClosedJaxpr(jaxpr.replace(**changes), closed.consts)  # type: ignore[attr-defined]


def open_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its constants as first inputs, and the constants.

    `jax.closure_convert` does this for arrays that are perturbed only, and not for integers.
    """
    jaxpr = closed.jaxpr
    invars, consts = [*jaxpr.constvars, *jaxpr.invars], list(closed.consts)
    debug_info = jaxpr.debug_info.with_unknown_names()  # type: ignore[attr-defined]
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info), []), consts  # type: ignore[attr-defined]


def axis_arguments(axis_data: Any) -> dict[str, Any]:
    """Arguments that make `jax.vmap` map over the axis of a batching rule (its fields are private)."""
    name = axis_data.name
    named = name is not None and type(name) is not object and "NoAxisName" not in type(name).__name__
    return {
        "axis_size": axis_data.size,
        "axis_name": name if named else None,
        "spmd_axis_name": axis_data.spmd_name,
    }


def mesh_axis(axis_data: Any) -> Any:
    """The `Explicit` mesh axis along which lanes are spread; None: they are not. Its name is not public."""
    return axis_data.explicit_mesh_axis


def names_axis(closed: ClosedJaxpr, axis_name: Any) -> bool:
    """Whether a jaxpr has the effect of communicating over this mapped axis (`NamedAxisEffect` is not public)."""
    return any(isinstance(e, _core.NamedAxisEffect) and e.name == axis_name for e in closed.effects)


def happens(effects: Iterable[Any]) -> bool:
    """Whether there are effects but those that only say over which axis something communicates."""
    return any(not isinstance(e, _core.NamedAxisEffect) for e in effects)


def communicates_over(eqn: Any) -> frozenset[Any]:
    """The mapped axes, also of a `shard_map`, over which an equation communicates."""
    axes = {e.name for e in eqn.effects if isinstance(e, _core.NamedAxisEffect)}
    if eqn.primitive.name in ("ppermute", "pbroadcast"):  # before JAX 0.12 they say so in their parameters only
        names = eqn.params["axis_name"]
        axes.update(names if isinstance(names, tuple | list) else [names])
    return frozenset(axes)


def batched_outputs(closed: ClosedJaxpr, axis_data: Any, batched: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr are batched, exactly; the public `jax.vmap` wants to be told."""
    return list(_batching.batch_jaxpr(closed, axis_data, list(batched), False)[1])


def is_reference(x: Any) -> bool:
    """Whether this is a mutable array (`jax.new_ref`), whose class is not public."""
    return "Ref" in type(jax.typeof(x)).__name__


def undifferentiable_effects(closed: ClosedJaxpr) -> list[Any]:
    """Effects that a derivative may neither drop nor repeat: ordered ones, and `io_callback`'s."""
    return [
        e
        for e in closed.effects
        if _effects.ordered_effects.contains(e) or type(e).__name__ in ("IOEffect", "OrderedIOEffect")
    ]


def is_for_export(ctx: Any) -> bool:
    """Whether a rule that lowers an equation is called by `jax.export`, which only the parameters of lowering tell."""
    return ctx.module_context.lowering_parameters.for_export


def is_tracing() -> bool:
    """Whether a transformation is under way (`jit`, `vmap`, `grad`), even one without tracers here."""
    return not _core.trace_state_clean()


@contextmanager
def without_folding() -> Iterator[None]:
    """Write operations on constants into the program, under `jax.ensure_compile_time_eval()` too.

    It would call back while the program is traced, and JAX has no public way out of it.
    """
    with _config.eager_constant_folding(False):
        yield


def trace_context() -> Any:
    """The configuration under which a function is traced (`jax_enable_x64` and the like)."""
    return _config.trace_context()


def trace_state() -> Any:
    """A token that differs between traces: tells whether a tracer may be handed to an outer function.

    Public only under `jax.extend.core` by accident of its exports, so it is taken from its home.
    """
    return _core.get_opaque_trace_state()
