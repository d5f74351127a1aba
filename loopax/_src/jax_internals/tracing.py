"""The state of JAX while a program is traced or lowered."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

# Where equations and jaxprs come from: lines of a user's, names of arguments.

F = TypeVar("F", bound=Callable[..., Any])

JAX_FOLDER = str(Path(jax.__file__).parent)
LOOPAX_FOLDER = Path(__file__).parents[2]

# JAX leaves out its own files where an error is shown, and where it names the line of an operation. Files of loopax are
# left out as well, so that both are the user's. There is no public list to add them to.
_traceback.register_exclusion(str(LOOPAX_FOLDER))
_source_info.register_exclusion(f"{LOOPAX_FOLDER}{os.sep}")


def api_boundary(entry: F) -> F:
    """A function or class that users call, with errors that are shown without frames of JAX and of loopax.

    The outermost boundary takes them out, as `JAX_TRACEBACK_FILTERING` says. JAX has this decorator for its own
    functions alone.
    """
    if not isinstance(entry, type):
        return _traceback.api_boundary(entry)
    made: Any = entry  # a dataclass, whose `__init__` is compiled in a file "<string>"
    init = made.__init__
    init.__code__ = init.__code__.replace(co_filename=__file__)
    made.__init__ = _traceback.api_boundary(init)
    return made


@contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Evaluate an equation under the settings, and for the source line, for which it was traced."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def user_lines(eqn: Any = None) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that led to an equation, innermost first, without JAX's and loopax's own.

    None: that led here, or to the equation that is evaluated (`equation_context`). JAX prints them beside jaxprs; there
    is no public way to ask.
    """
    # Asked now, and not when the first line is: that may be elsewhere.
    source_info = _source_info.current() if eqn is None else eqn.source_info
    frames = _source_info.user_frames(source_info.traceback)
    return ((frame.file_name, frame.start_line, frame.function_name) for frame in frames)


source_here = _source_info.current  # the calls that led here, for `made_at`


def made_at(where: Any, tree: Any) -> Any:
    """The same pytree, of whose tracers JAX's error about one that has left its function says that they were made here.

    JAX makes the arguments of a function where no frame is the user's, and then says nothing.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            leaf._line_info = where
    return tree


def made_with(given: Any, x: Any) -> Any:
    """The same value, as if it had been made where another one was."""
    return made_at(given._line_info, x) if isinstance(given, Tracer) and hasattr(given, "_line_info") else x


def argument_names(closed: ClosedJaxpr) -> tuple[str, ...]:
    """What the inputs of a jaxpr were called in the function that was traced; empty where that is not known."""
    names = closed.debug_info.arg_names
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
    return f"{JAX_FOLDER}/" in (closed.debug_info.func_src_info or "")


# Mapped axes, of `jax.vmap` and of `shard_map`: what they are called, and what communicates over them.


def axis_arguments(axis_data: Any) -> dict[str, Any]:
    """Arguments that make `jax.vmap` map over the axis of a batching rule (its fields are private)."""
    name = axis_data.name
    named = name is not None and type(name) is not object and "NoAxisName" not in type(name).__name__
    return {"axis_size": axis_data.size, "axis_name": name if named else None, "spmd_axis_name": axis_data.spmd_name}


def mesh_axis(axis_data: Any) -> Any:
    """The `Explicit` mesh axis along which lanes are spread; None: they are not. Its name is not public."""
    return axis_data.explicit_mesh_axis


def communicates_over(eqn: Any) -> frozenset[Any]:
    """The mapped axes, also of a `shard_map`, over which an equation communicates (`NamedAxisEffect` is not public)."""
    axes = {e.name for e in eqn.effects if isinstance(e, _core.NamedAxisEffect)}
    if eqn.primitive.name in ("ppermute", "pbroadcast"):  # before JAX 0.12 they say so in their parameters only
        names = eqn.params["axis_name"]
        axes.update(names if isinstance(names, tuple | list) else [names])
    return frozenset(axes)


def batched_outputs(closed: ClosedJaxpr, axis_data: Any, batched: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr are batched, exactly; the public `jax.vmap` wants to be told."""
    return list(_batching.batch_jaxpr(closed, axis_data, list(batched), False)[1])


def is_for_export(ctx: Any) -> bool:
    """Whether a rule that lowers an equation is called by `jax.export`, which only the parameters of lowering tell."""
    return ctx.module_context.lowering_parameters.for_export


def is_tracing() -> bool:
    """Whether a transformation is under way (`jit`, `vmap`, `grad`), even one without tracers here."""
    return not _core.trace_state_clean()


def runs_in_python() -> bool:
    """Whether `jax.disable_jit` asks for a run in Python, and nothing around it writes down a program instead.

    JAX says whether there is a `jit` around only in the text of its traces.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is None and _config.disable_jit.value


def runs_eagerly() -> bool:
    """Whether operations are run as they are called, be it on batches or with tangents: no program is written down.

    What other traces do is not known here: those of `shard_map`, of sparse arrays, of other libraries.
    """
    trace = _core.trace_ctx.trace
    while isinstance(trace, _ad.JVPTrace | _ad.LinearizeTrace | _batching.BatchTrace):
        trace = trace.parent_trace
    return isinstance(trace, _core.EvalTrace) and not _config.disable_jit.value


value_now = _core.to_concrete_value  # of an array, also of one that is differentiated; None: it is not known


def without_folding() -> AbstractContextManager[None]:
    """Write operations on constants into the program, under `jax.ensure_compile_time_eval()` too.

    It would call back while the program is traced, and JAX has no public way out of it.
    """
    return _config.eager_constant_folding(False)


def varying_as_needed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in which JAX marks arrays as varying over the axes of a `shard_map` where others in an operation vary.

    That is JAX's default, until `jax_auto_pcast` becomes False. Users are to mark theirs then, and ours are many.
    """

    @wraps(function)
    def marking(*arguments: Any, **params: Any) -> Any:
        with nullcontext() if getattr(jax.config, "jax_auto_pcast", True) else _config.auto_pcast(True):
            return function(*arguments, **params)

    return marking


def for_all_threads(context: Any) -> Any:
    """What gets and sets the value of a `jax.make_user_context` for all threads. JAX 0.10.0 has no public way."""
    return context if hasattr(context, "set_global") else context._obj


# The configuration under which a function is traced (`jax_enable_x64` and the like).
trace_context = _config.trace_context
# A token that differs between traces: tells whether a tracer may be handed to an outer function. Public only under
# `jax.extend.core`, by accident of its exports.
trace_state = _core.get_opaque_trace_state
