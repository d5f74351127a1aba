"""A scan, by whatever name the user has called it: `scan` itself, or a rollout."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from jax.core import Tracer
from jaxtyping import PyTree

from loopax._src.frontend import options as arguments
from loopax._src.frontend import trace as tracing
from loopax._src.frontend.references import NO_REFERENCES, ReferenceRows
from loopax._src.frontend.run import LoopSpec, finish, loop_spec_of, run
from loopax._src.frontend.steps import always, functions_of_step, scan_rows, scan_step, within_length
from loopax._src.function_names import Called
from loopax._src.pytrees.types import LoopInfo


class ScanBody(NamedTuple):
    """What a scan repeats."""

    words: arguments.Words
    f: Callable[..., tuple[Any, Any]]
    stop: Callable[[Any, Any], Any] | None
    functions: tuple[Any, ...]  # the user's, for which it is traced once
    options: Hashable = ()  # what else it depends on
    parameters: tuple[str, str] = ("carry", "x")  # that of the user's function
    back: tracing.StepBack | None = None  # what the kind brings to walk back


def scan_spec(
    words: arguments.Words,
    options: arguments.Options,
    f: Any,
    stop: Any,
    xs: PyTree[Any],
    length: Any,
    reverse: Any,
    unroll: Any,
) -> LoopSpec:
    """Which rows a scan walks and how; an error where an argument does not fit."""
    extent, reverse = scan_rows(words, options, f, stop, xs, length, reverse)
    unroll = arguments.unroll_steps(words.name, unroll, extent.bound if extent.fixed else None, stop is not None)
    return loop_spec_of(options, extent, f, reverse, unroll)


def run_scan(
    body: ScanBody,
    options: arguments.Options,
    loop_spec: LoopSpec,
    init: PyTree[Any],
    xs: PyTree[Any],
    references: ReferenceRows = NO_REFERENCES,
) -> tuple[tuple[Any, Any], LoopInfo]:
    """Run a scan; `references` are those whose values are among xs."""
    words, f, stop = body[:3]
    extent = loop_spec.extent
    call = scan_step(words, options, f, stop, has_rows=extent.capacity is not None)
    is_counted = stop is not None and extent.bound is None and isinstance(extent.high, Tracer)
    spec = (words.name, extent.capacity is None, options.key_spec, body.options, is_counted and loop_spec.reverse)
    called = Called(words.name, body.functions, body.parameters)
    keys = functions_of_step(options, *body.functions)
    extras, goes_on = options.extras, None if stop is None else always
    if is_counted:
        call, extras, goes_on = (
            within_length(call, loop_spec.reverse),
            [extent.high, *extras],
            lambda extras, _: extras[0] > 0,
        )
        called = called._replace(extras=("length", "key"))
    step = tracing.Step(call, words.where, keys, (*spec, is_counted), called, body.back)
    done = run(step, loop_spec, extras, init, xs, goes_on, references)
    carry, ys, loop_info = finish(options, extent, done)
    return (carry, ys), loop_info
