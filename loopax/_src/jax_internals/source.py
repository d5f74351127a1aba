"""Where equations and jaxprs come from: lines of a user's, names of arguments."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

F = TypeVar("F", bound=Callable[..., Any])

_JAX = str(Path(jax.__file__).parent)
_LOOPAX = Path(__file__).parents[2]

# JAX leaves out its own files where an error is shown, and where it names the line of an operation. Files of loopax are
# left out as well, so that both are the user's. There is no public list to add them to.
_traceback.register_exclusion(str(_LOOPAX))
_source_info.register_exclusion(f"{_LOOPAX}{os.sep}")


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


def user_lines(eqn: Any) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that led to an equation, innermost first, without JAX's and loopax's own.

    JAX prints them beside jaxprs; there is no public way to ask.
    """
    return _lines(eqn.source_info)


def calling_lines() -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that led here, or to the equation that is evaluated (`equation_context`)."""
    return _lines(_source_info.current())


def _lines(source_info: Any) -> Iterator[tuple[str, int, str]]:
    for frame in _source_info.user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def source_here() -> Any:
    """The calls that led here, for `made_at`."""
    return _source_info.current()


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
