"""The state of JAX while a program is traced or lowered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe


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


def value_now(x: Any) -> Any:
    """The value of an array that is known now, also of one that is differentiated; None: it is not known."""
    return _core.to_concrete_value(x)


@contextmanager
def without_folding() -> Iterator[None]:
    """Write operations on constants into the program, under `jax.ensure_compile_time_eval()` too.

    It would call back while the program is traced, and JAX has no public way out of it.
    """
    with _config.eager_constant_folding(False):
        yield


def varying_as_needed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in which JAX marks arrays as varying over the axes of a `shard_map` where others in an operation vary.

    That is JAX's default, until `jax_auto_pcast` becomes False. Users are to mark theirs then, and ours are many.
    """

    @wraps(function)
    def marking(*arguments: Any, **params: Any) -> Any:
        if getattr(jax.config, "jax_auto_pcast", True):
            return function(*arguments, **params)
        with _config.auto_pcast(True):
            return function(*arguments, **params)

    return marking


def trace_context() -> Any:
    """The configuration under which a function is traced (`jax_enable_x64` and the like)."""
    return _config.trace_context()


def trace_state() -> Any:
    """A token that differs between traces: tells whether a tracer may be handed to an outer function.

    Public only under `jax.extend.core` by accident of its exports, so it is taken from its home.
    """
    return _core.get_opaque_trace_state()
