"""How many steps a loop may take, from static and traced limits."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.options import Words, is_traced_int, unroll_steps
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.run_time_checks import Check
from loopax._src.jax_internals import convert
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import int_within

# The limits of a `fori_loop`: of which dtype its index is, whether it can hold them, and how far apart they are.


def width_of(*limits: Any) -> AbstractContextManager[None]:
    """In which arrays of 64 bits keep them, where `jax_enable_x64` is off: JAX would cut them."""
    are_wide = (isinstance(x, jax.Array) and x.dtype.itemsize == 8 for x in limits)
    return jax.enable_x64(True) if any(are_wide) else nullcontext()


def known_int(value: Any) -> int | None:
    """The integer, where it is known now: also an array outside of `jit`."""
    return None if value is None or isinstance(value, Tracer) else int(value)


@dataclass(frozen=True)
class Limits:
    """The two limits, each an integer that is known now or traced."""

    lower: Any
    upper: Any
    caller: str  # as the user calls it
    are_sizes: bool = False  # one is the size of an array: they are not too far apart to count

    @classmethod
    def of(cls, lower: Any, upper: Any, caller: str) -> "Limits":
        """The limits, or an error where one is not an integer, or they do not go together."""
        # A symbolic dimension of an array (of `jax.export`) is known when the program runs.
        sizes = [jax.export.is_symbolic_dim(lower), jax.export.is_symbolic_dim(upper)]
        lower, upper = (jnp.asarray(x) if size else x for x, size in zip((lower, upper), sizes, strict=True))
        limits = cls(lower, upper, caller, any(sizes))
        is_traced_int(f"{caller}(lower=...)", lower)
        is_traced_int(f"{caller}(upper=...)", upper)
        dtypes = [jnp.result_type(x) for x in (lower, upper) if not _is_weak(x)]
        if "uint64" in {dtype.name for dtype in dtypes} and any(map(_is_signed, dtypes)):  # JAX takes a float for both
            raise TypeError(f"{caller}: {limits}, and no integer dtype holds both. Convert one, `limit.astype(...)`.")
        with width_of(lower, upper):
            jnp.result_type(lower, upper)  # refuses others, under strict promotion
        return limits

    @property
    def known(self) -> tuple[int, int] | None:
        """Both, where they are known now."""
        lower, upper = known_int(self.lower), known_int(self.upper)
        return None if lower is None or upper is None else (lower, upper)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the index. Where both limits are known it is Python's, as in `jax.lax`, arrays or not."""
        if self.known:
            return jnp.asarray(0).dtype
        with width_of(self.lower, self.upper):
            return jnp.result_type(self.lower, self.upper)

    def first_index(self) -> tuple[jax.Array, bool]:
        """`lower` as an index, and whether that is weakly typed, as Python numbers are."""
        if known := self.known:
            return jnp.asarray(known[0] if known[0] < known[1] else 0, self.dtype), True
        is_weak = _is_weak(self.lower) and jnp.result_type(self.lower) == self.dtype
        return convert(self.lower, self.dtype), is_weak

    def known_distance(self) -> int:
        """How far apart they are, where both are known."""
        lower, upper = self.known or (0, 0)
        if lower < upper:
            self._refuse_beyond("lower", lower)
            self._refuse_beyond("upper", upper - 1)
        return max(upper - lower, 0)

    def distance(self) -> tuple[jax.Array, Any, int, list[Check]]:
        """How far apart limits are of which one is traced, exactly, whatever their dtypes.

        int32[], at most MOST_STEPS; whether it is more than that (False or bool[]); the most that it can be; and the
        checks that the index can hold the limits, without which there are no steps.
        """
        with width_of(self.lower, self.upper):
            for name in ("lower", "upper"):
                if (known := known_int(getattr(self, name))) is not None:
                    self._refuse_beyond(name, known)
            dtype = self.dtype
            least, _, lower_beyond = _range_in(dtype, self.lower)
            _, most, upper_beyond = _range_in(dtype, self.upper)
            beyond, longest = lower_beyond | upper_beyond, most - least
            wide = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
            lower, upper = convert(self.lower, wide), convert(self.upper, wide)
            # max(upper - lower, 0), without a sign: a signed difference may wrap, and its bits are right.
            gap = upper - lower
            if _is_signed(gap.dtype):
                gap = lax.bitcast_convert_type(gap, jnp.dtype(f"uint{8 * gap.dtype.itemsize}"))
            gap = jnp.where(upper > lower, gap, jnp.zeros((), gap.dtype))
            checks = []
            if beyond is not False:
                gap = jnp.where(beyond, jnp.zeros((), gap.dtype), gap)
                checks = [Check.of(f"loopax.{self.caller}", beyond, self._beyond())]
            if longest <= MOST_STEPS or self.are_sizes:
                return gap.astype(jnp.int32), False, longest, checks
            return jnp.minimum(gap, MOST_STEPS).astype(jnp.int32), gap > MOST_STEPS, longest, checks

    def _refuse_beyond(self, name: str, index: int) -> None:
        """Refuse a limit whose index is beyond the dtype of the index."""
        holds = jnp.iinfo(self.dtype)
        if not int(holds.min) <= index <= int(holds.max):
            got = known_int(getattr(self, name))
            raise ValueError(f"{self.caller}({name}=...): got {got}. {self._beyond()}")

    def _beyond(self) -> str:
        holds = jnp.iinfo(self.dtype)
        return (
            f"{self}, and one of them is beyond {self.dtype}, the dtype of the index, which goes from {holds.min} to "
            f"{holds.max}. Give both a dtype that holds them, `limit.astype(...)` (64 bits need `jax_enable_x64`), or "
            f"use `{self.caller.replace('fori', 'while')}`, whose steps have no index."
        )

    def __str__(self) -> str:
        """As errors have it."""
        return f"lower is {describe(self.lower)}, upper is {describe(self.upper)}"


def _is_weak(limit: Any) -> bool:
    return isinstance(limit, int) or getattr(limit, "weak_type", False)


def _is_signed(dtype: np.dtype[Any]) -> bool:
    return jnp.issubdtype(dtype, jnp.signedinteger)


def _range_in(dtype: np.dtype[Any], limit: Any) -> tuple[int, int, Any]:
    """From where to where a limit that this dtype holds may be, and whether it is none; False, not an array: never."""
    if (known := known_int(limit)) is not None:
        return known, known, False
    own, holds = ((int(info.min), int(info.max)) for info in (jnp.iinfo(limit.dtype), jnp.iinfo(dtype)))
    below = own[0] < holds[0] and limit < holds[0]
    return max(own[0], holds[0]), min(own[1], holds[1]), below | (own[1] > holds[1] and limit > holds[1])


@dataclass(frozen=True)
class Extent:
    """The rows that a loop walks, and the limits on its steps."""

    low: Any  # an int where it is known when traced, else int32[]
    high: Any  # likewise
    bound: int | None  # static: rows are below it
    fixed: bool  # always the same number of steps, known when traced
    over_limit: Any = False  # bool or bool[]: max_steps is less than the length
    checks: list[Check] = field(default_factory=list)
    capacity: int | None = None  # rows of ys, where there are any
    bound_is_loose: bool = False  # the bound is `max_steps`, which may be far above the steps that are taken
    reverse: bool = False  # from the last row to the first
    unroll: int = 1  # steps per iteration of the compiled loop

    def unrolled(self, name: str, unroll: Any, stops: bool = False) -> "Extent":
        """The same, with what the user says of `unroll`."""
        steps = unroll_steps(name, unroll, self.bound if self.fixed else None, stops)
        return self if steps == 1 else replace(self, unroll=steps)


def while_extent(max_steps: int | None) -> Extent:
    """The steps of a `while_loop`, whose condition may end it before."""
    high, over = MOST_STEPS if max_steps is None else max_steps, max_steps is not None
    return Extent(0, high, max_steps, fixed=False, over_limit=over, bound_is_loose=True)


def fori_extent(limits: Limits, max_steps: int | None, throw: bool) -> Extent:
    """The steps of a `fori_loop`. One that is going to raise takes none: they could be 2**31."""
    if limits.known:
        length = limits.known_distance()
        if length > MOST_STEPS and max_steps is None:
            raise ValueError(f"{limits.caller}: {length} steps are more than {MOST_STEPS}, to which step counts go.")
        steps = length if max_steps is None else min(length, max_steps)
        return Extent(0, steps, steps, fixed=steps == length, over_limit=steps < length)
    steps, is_more, longest, checks = limits.distance()
    if max_steps is not None:
        over = longest > max_steps and (is_more | (steps > max_steps))
        high = jnp.minimum(steps, max_steps)
        return Extent(0, high, max_steps, False, over_limit=over, checks=checks, bound_is_loose=True)
    if is_more is not False:
        steps = jnp.where(is_more, 0, steps) if throw else steps
        problem = (
            f"{limits}. upper - lower is more than {MOST_STEPS}, to which step counts go. Give closer limits, or use "
            "`while_loop`, which may take more steps."
        )
        checks = [*checks, Check.of(f"loopax.{limits.caller}", is_more, problem)]
    return Extent(0, steps, None, fixed=False, checks=checks)


def scan_extent(
    words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool, stops: bool, throw: bool
) -> Extent:
    """The steps of a `scan` over `rows` rows of xs (None: no arrays in xs)."""
    name, xs, of_array = words.name, words.xs, jax.export.is_symbolic_dim(length)
    if length is None and rows is None:
        if not stops:
            raise ValueError(
                f"{name} does not know how many steps to take: {xs} has no arrays, and neither `length` nor "
                "`stop` is given. Give one of them."
            )
        if reverse:
            raise ValueError("scan(reverse=True) starts at the last row, so it needs `xs` or `length`.")
        return replace(while_extent(max_steps), capacity=max_steps)
    if of_array:
        length = jnp.asarray(length)
    is_array = length is not None and is_traced_int(f"{name}(length=...)", length)
    if (known := known_int(length)) is not None:
        int_within(f"{name}(length=...)", known, 0, MOST_STEPS)
        if rows is not None and known > rows:
            raise ValueError(
                f"{name}(length=...): got {known}, but {xs} has {rows} rows. Give at most {rows}, or more rows of {xs}."
            )
    # An array is a length of the run, also where it is known: one program serves other lengths.
    if length is None or (known is not None and (not is_array or (rows is None and max_steps is None))):
        number = rows if known is None else known
        assert number is not None
        steps = number if max_steps is None else min(number, max_steps)
        low, high = (number - steps, number) if reverse else (0, steps)
        fixed, capacity = steps == number, number if rows is None else rows
        return Extent(low, high, high, fixed, over_limit=not fixed, capacity=capacity, reverse=reverse)
    with width_of(length):
        return _traced_scan(words, length, rows, max_steps, reverse, throw, of_array)


def _traced_scan(
    words: Words, length: Any, rows: int | None, max_steps: int | None, reverse: bool, throw: bool, of_array: bool
) -> Extent:
    """A length known at run time: it may not be negative, nor beyond the rows of xs, nor beyond what can be counted.

    The size of an array can only be beyond the rows.
    """
    most, top = int(jnp.iinfo(length.dtype).max), MOST_STEPS if rows is None else rows
    negative = not of_array and _is_signed(length.dtype) and length < 0
    beyond = most > top and not (of_array and rows is None) and length > top
    checks = []
    if (wrong := negative | beyond) is not False:
        there_is = f"{words.xs} has {rows} rows" if rows is not None else f"step counts go to {MOST_STEPS}"
        problem = (
            f"`length`{AMOUNT} is negative, or more than there is ({there_is}). Give a length within the data, or "
            "throw=False to take what there is."
        )
        checks = [Check.of(f"loopax.{words.name}", wrong, problem, length)]
    length = jnp.clip(length, 0, min(top, most)).astype(jnp.int32)
    if beyond is not False and rows is None and throw:
        length = jnp.where(beyond, 0, length)  # it is going to raise, and should not take 2**31 steps first
    over = max_steps is not None and min(top, most) > max_steps and length > max_steps
    if max_steps is None:
        low, high, bound = 0, length, rows
    elif reverse and rows is not None:
        low, high, bound = jnp.maximum(length - max_steps, 0), length, rows
    else:  # without rows of xs, max_steps is the capacity, also in reverse: the last row that there can be comes first
        low, high, bound = 0, jnp.minimum(length, max_steps), min(top, max_steps)
    capacity = max_steps if rows is None else rows
    return Extent(low, high, bound, False, over, checks, capacity, bound_is_loose=rows is None, reverse=reverse)
