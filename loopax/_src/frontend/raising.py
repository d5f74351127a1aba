"""How a check that fails becomes an error.

Where it is known at once, outside of `jit`, it is raised at once. In a program it is raised by a callback, as
`equinox.error_if` does it, and `equinox.filter_jit` shows it as it shows those. Under plain `jax.jit` an error of a
callback is shown by XLA: first the stack of its innermost frame, then its text. So ours has one frame, which is the
user's line, and nothing behind its text.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from traceback import FrameSummary, format_list
from types import FrameType, FunctionType, TracebackType
from typing import Any, NoReturn

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from equinox import _errors, _jit
from jax import core, lax
from jax.core import Tracer

from loopax._src.frontend.export_check import Said, unexported
from loopax._src.frontend.user_lines import Line, of_user
from loopax._src.jax_internals import (
    Primitive,
    calling_lines,
    register,
    varying_axes,
    with_varying_axes,
    without_folding,
)

# What Equinox has read when it was imported.
_ON_ERROR = os.environ.get("EQX_ON_ERROR", "raise")
AMOUNT = "{amount}"  # in a message: where a number goes that is known only when the check fails
_UNKNOWN = Line("unknown", 1, "unknown")
_MOST_MAPS = 8  # of which a lane is told: `jax.vmap`s around a check


def call_at(call: str) -> str:
    """A call and the user's line from which it comes: `loopax.scan at solver.py:31 (solve)`."""
    line = next(of_user(calling_lines()), None)
    return call if line is None else f"{call} at {line}"


def calls(lines: Iterable[tuple[str, int, str]]) -> tuple[Line, ...]:
    """The user's among these lines, innermost first, inside of `equinox.filter_jit`."""
    return tuple(of_user(takewhile(lambda line: line[0] != _jit.__file__, lines)))


def with_amount(message: str, amount: Any, lane: Sequence[int] = ()) -> str:
    """The message with this number, and the lane that has it, in the place of `AMOUNT`, or with none."""
    in_lane = f" in lane {lane[0] if len(lane) == 1 else tuple(lane)}" if lane else ""
    return message.replace(AMOUNT, "" if amount is None else f" ({float(amount):.3g}{in_lane})")


def raise_if(failed: Any, message: str, stack: tuple[Line, ...], amount: Any = None) -> Any:
    """False (bool[]), or an error from these lines: at once, if it is known now that there is one."""
    details: list[Any] = []
    if amount is not None:
        amount = jnp.where(failed, lax.stop_gradient(amount), -jnp.inf)
        details = [eqxi.unvmap_max(amount), worst_lane_p.bind(amount)]
    failed = eqxi.unvmap_any(failed)
    if _is_for_equinox():
        with without_folding():
            return eqx.error_if(jnp.zeros((), bool), failed, with_amount(message, None))
    if not isinstance(failed, Tracer):
        if failed:
            raise eqx.EquinoxRuntimeError(_detailed(message, details))
        return failed
    with without_folding():
        return _program(message, stack)(failed, details)


def text_of_check(error: Exception) -> str:
    """What a check that failed under `jax.jit` says; of another error, all it says.

    XLA puts something before it, and `equinox.error_if` a line behind it, with advice for plain `jax.jit`.
    """
    _, found, text = str(error).rpartition(f"{_errors._EquinoxRuntimeError.__name__}: ")
    return text.partition("\n-----")[0].strip() if found else str(error)


def _is_for_equinox() -> bool:
    """Whether `EQX_ON_ERROR` asks for something else than an error, or there cannot be one, as on a TPU."""
    return _ON_ERROR != "raise" or jax.default_backend() == "tpu"


@lru_cache(maxsize=1024)
def _program(message: str, stack: tuple[Line, ...]) -> Callable[[Any, Any], Any]:
    """Raise where a flag is True; compiled once for as many calls from the same lines."""

    def fail(details: Sequence[Any]) -> NoReturn:
        text = _detailed(message, details)
        shown = format_list([FrameSummary(*line) for line in reversed(stack)])
        _jit.last_error_info = text, shown[::-1]  # from where `equinox.filter_jit` takes its text
        frame = _frame(stack[0] if stack else _UNKNOWN)
        # The class by which `equinox.filter_jit` knows an error that it has to show.
        raise _errors._EquinoxRuntimeError(text).with_traceback(TracebackType(None, frame, 0, frame.f_lineno))

    def check(failed: Any, details: Sequence[Any]) -> Any:
        failed = unexported(failed, Said(with_amount(message, None)))
        return lax.cond(failed, lambda: jax.pure_callback(fail, jax.ShapeDtypeStruct((), bool), details), lambda: False)

    return jax.jit(check)


def _detailed(message: str, details: Sequence[Any]) -> str:
    """The message, with an amount and a lane if these are its details."""
    if not details:
        return with_amount(message, None)
    amount, lane = details
    return with_amount(message, amount, [int(i) for i in np.asarray(lane) if i >= 0])


def _worst_lane(amounts: Any) -> Any:
    """Which of all lanes has the largest amount, or NaN: int32[_MOST_MAPS], a number for each map from the outermost.

    -1 stands where there is no map. The amounts are those of one lane, or of all under `jax.vmap`s.
    """
    lane, numbers = jnp.argmax(amounts).astype(jnp.int32), []
    for size in reversed(amounts.shape):
        lane, number = lane // size, lane % size
        numbers.insert(0, number)
    none = jnp.full_like(lane, -1)
    return jnp.stack([*numbers[:_MOST_MAPS], *[none] * (_MOST_MAPS - len(numbers))])


def _worst_of_mapped(operands: Sequence[Any], axes: Sequence[int]) -> tuple[Any, None]:
    return worst_lane_p.bind(jnp.moveaxis(operands[0], axes[0], 0)), None


worst_lane_p = Primitive("worst_lane")
register(
    worst_lane_p,
    meaning=_worst_lane,
    abstract_eval=lambda amounts: with_varying_axes(
        core.ShapedArray((_MOST_MAPS,), jnp.dtype("int32")), varying_axes(amounts)
    ),
    batch_without_axis=_worst_of_mapped,
)


def _frame(line: Line) -> FrameType:
    """A frame of this line that nobody has called: a generator's, before it starts. All of its code is in one line."""

    def place() -> Iterator[None]: yield  # fmt: skip

    code = place.__code__.replace(co_filename=line.file, co_name=line.function, co_firstlineno=line.number)
    return FunctionType(code, {})().gi_frame
