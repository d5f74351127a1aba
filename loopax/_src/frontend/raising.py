"""How a check that fails becomes an error.

Where it is known at once, outside of `jit`, it is raised at once. In a program it is raised by a callback, as
`equinox.error_if` does it, and `equinox.filter_jit` shows it as it shows those. Under plain `jax.jit` an error of a
callback is shown by XLA: first the stack of its innermost frame, then its text. So ours has one frame, which is the
user's line, and nothing behind its text.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, format_list
from types import FunctionType, TracebackType
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from equinox import _errors, _jit
from jax import lax
from jax.core import ShapedArray

from loopax._src.jax_internals import Primitive, convert, is_for_export, register, without_folding

# Lines of the user's code. Calls go through these packages: Equinox wraps methods of modules, ours among them, and
# jaxtyping checks types.
_BETWEEN = tuple(f"{Path(file).parent}{os.sep}" for file in (eqx.__file__, jaxtyping.__file__))


class Line(NamedTuple):
    """A line of a function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """As it is shown: `solver.py:31 (solve)`."""
        path, here = Path(self.file), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path.name
        return f"{shown}:{self.number} ({self.function})"


def of_user(lines: Iterable[tuple[str, int, str]]) -> Iterator[Line]:
    """Those that are not of what stands between loopax and the user."""
    return (Line(*line) for line in lines if not line[0].startswith(_BETWEEN))


# What Equinox has read when it was imported.
_ON_ERROR = os.environ.get("EQX_ON_ERROR", "raise")
AMOUNT = "{amount}"  # in a message: where a number goes that is known only when the check fails
Message = str | Callable[[Sequence[Any]], str]  # or what makes one of such numbers; of none where they are not known


def calls(lines: Iterable[tuple[str, int, str]]) -> tuple[Line, ...]:
    """The user's among these lines, innermost first, inside of `equinox.filter_jit`."""
    return tuple(of_user(takewhile(lambda line: line[0] != _jit.__file__, lines)))


def with_amounts(message: Message, amounts: Sequence[Any] = (), lane: Any = ()) -> str:
    """The message with these numbers, which stand in the place of `AMOUNT`, and the place of a lane in its batch."""
    shown = ""
    for amount in map(np.asarray, amounts if isinstance(message, str) else ()):
        shown = f" ({int(amount)})" if np.issubdtype(amount.dtype, np.integer) else f" ({float(amount):.3g})"
    text = message.replace(AMOUNT, shown) if isinstance(message, str) else message(list(map(np.asarray, amounts)))
    place = ", ".join(map(str, np.asarray(lane, int).tolist()))
    place = f"({place})" if "," in place else place
    return text + (f" First at index {place} of the batch." if place else "")


@dataclass(frozen=True)
class Failure:
    """What a check says, and from which lines."""

    message: Message
    stack: tuple[Line, ...]

    def __repr__(self) -> str:
        """Short, and without lines, for it stands in printed jaxprs."""
        return "check"


def raise_if(failed: Any, message: Message, stack: tuple[Line, ...], amounts: Sequence[Any] = ()) -> Any:
    """False (bool[]), or an error from these lines: at once, if it is known now that there is one."""
    # `EQX_ON_ERROR` asks for something else than an error, or there cannot be one, as on a TPU.
    if _ON_ERROR != "raise" or jax.default_backend() == "tpu":
        failed = eqxi.unvmap_any(failed)
        with without_folding():
            return eqx.error_if(jnp.zeros((), bool), failed, with_amounts(message))
    amounts = list(map(_for_callback, amounts))
    return raise_by_callback_p.bind(jnp.asarray(failed), *amounts, what=Failure(message, stack))


def _for_callback(amount: Any) -> Any:
    """A number that a callback is given: JAX cuts one of 64 bits where `jax_enable_x64` is off."""
    amount = jnp.asarray(lax.stop_gradient(amount))
    is_cut = jax.dtypes.canonicalize_dtype(amount.dtype) != amount.dtype
    return convert(amount, jnp.dtype("float32")) if is_cut else amount


def _raise_now(failed: Any, *amounts: Any, what: Failure) -> Any:
    failed, lane, *found = jax.jit(_first_failure)(failed, *amounts)
    if failed:
        raise eqx.EquinoxRuntimeError(with_amounts(what.message, found, lane))
    return failed


def _raise_later(failed: Any, *amounts: Any, what: Failure) -> Any:
    with without_folding():
        return _program(what)(*_first_failure(failed, *amounts))


def _first_failure(failed: Any, *amounts: Any) -> list[Any]:
    """Of a batch of any shape: whether one failed; of the first that did, its indices in the batch, and the amount."""
    failed, *found = map(jnp.asarray, (failed, *amounts))
    if not failed.size:
        return [jnp.zeros((), bool), jnp.zeros(failed.ndim, int), *(jnp.zeros((), x.dtype) for x in found)]
    first = jnp.argmax(failed.reshape(-1))
    lane = jnp.stack(jnp.unravel_index(first, failed.shape)) if failed.ndim else jnp.zeros(0, int)
    return [jnp.any(failed), lane, *(x.reshape(-1)[first] for x in found)]


def _batch(operands: Any, dims: Any, *, what: Failure) -> Any:
    """One check for all lanes, whose axis stands first."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    return raise_by_callback_p.bind(*moved, what=what), None


def _lowered(lower: Callable[..., Any], ctx: Any, *operands: Any, what: Failure) -> Any:
    if is_for_export(ctx):
        raise NotImplementedError(
            "jax.export: the program can raise an error when it runs, which calls Python, and JAX exports no "
            f"callbacks. The error is:\n  {with_amounts(what.message)}\nThree ways out:\n"
            "  avoid the check: give an int32 `upper` and a static `lower` from 0 on, or a History a static index;\n"
            "  give throw=False to the loop, with info=True to return `limit_reached`, and unsolved='nan' to "
            "Implicit;\n"
            "  export in a process with EQX_ON_ERROR=nan in its environment: where the check fails, results are NaN, "
            "and integers are the largest of their dtype."
        )
    return lower(ctx, *operands, what=what)


# False (bool[]), which no `jax.vmap` batches, or an error if one of a batch failed.
raise_by_callback_p = Primitive("raise_by_callback")
register(
    raise_by_callback_p,
    impl=_raise_now,
    meaning=_raise_later,
    params=["what"],
    lowering=_lowered,
    abstract_eval=lambda failed, *_, what: ShapedArray((), failed.dtype),  # noqa: ARG005
    batch_without_axis=_batch,
)


def text_of_check(error: Exception) -> str:
    """What a check that failed under `jax.jit` says; of another error, all it says.

    XLA puts something before it, and `equinox.error_if` a line behind it, with advice for plain `jax.jit`.
    """
    _, found, text = str(error).rpartition(f"{_errors._EquinoxRuntimeError.__name__}: ")
    return text.partition("\n-----")[0].strip() if found else str(error)


@lru_cache(maxsize=1024)
def _program(what: Failure) -> Callable[..., Any]:
    """Raise where a flag is True; compiled once for as many calls from the same lines."""
    line = what.stack[0] if what.stack else Line("unknown", 1, "unknown")

    # A frame of this line that nobody has called: a generator's, before it starts. All of its code is in one line.
    def place() -> Iterator[None]: yield  # fmt: skip

    code = place.__code__.replace(co_filename=line.file, co_name=line.function, co_firstlineno=line.number)

    def fail(lane: Any = (), *amounts: Any) -> NoReturn:
        text = with_amounts(what.message, amounts, lane)
        shown = format_list([FrameSummary(*line) for line in reversed(what.stack)])
        _jit.last_error_info = text, shown[::-1]  # from where `equinox.filter_jit` takes its text
        frame = FunctionType(code, {})().gi_frame
        # The class by which `equinox.filter_jit` knows an error that it has to show.
        raise _errors._EquinoxRuntimeError(text).with_traceback(TracebackType(None, frame, 0, frame.f_lineno))

    def check(failed: Any, *found: Any) -> Any:
        return lax.cond(failed, lambda: jax.pure_callback(fail, jax.ShapeDtypeStruct((), bool), *found), lambda: False)

    return jax.jit(check)
