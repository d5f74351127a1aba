"""The limits of a `fori_loop`: of which dtype its index is, whether it can hold them, and how far apart they are."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.options import is_traced_int
from loopax._src.frontend.runtime_checks import Check
from loopax._src.jax_internals import convert
from loopax._src.pytrees.leaves import describe


def width_of(*limits: Any) -> AbstractContextManager[None]:
    """In which arrays of 64 bits keep them, where `jax_enable_x64` is off: JAX would cut them."""
    are_wide = (isinstance(x, jax.Array) and x.dtype.itemsize == 8 for x in limits)
    return jax.enable_x64(True) if any(are_wide) else nullcontext()


def is_size(value: Any) -> bool:
    """Whether it is a symbolic dimension of an array (of `jax.export`), which is known when the program runs."""
    return jax.export.is_symbolic_dim(value)


def known_int(value: Any) -> int | None:
    """The integer, where it is known now: also an array outside of `jit`."""
    return None if value is None or isinstance(value, Tracer) else int(value)


class Distance(NamedTuple):
    """How far apart two limits are, of which at least one is traced."""

    steps: jax.Array  # int32[], at most MOST_STEPS
    is_more: Any  # False or bool[]: it is more than that
    longest: int  # the longest that it can be
    checks: list[Check]  # that the index can hold the limits; no steps where it cannot


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
        sizes = [is_size(lower), is_size(upper)]
        lower, upper = (jnp.asarray(x) if size else x for x, size in zip((lower, upper), sizes, strict=True))
        limits = cls(lower, upper, caller, any(sizes))
        for name, value in limits.by_name.items():
            is_traced_int(f"{caller}({name}=...)", value)
        dtypes = [jnp.result_type(x) for x in (lower, upper) if not _is_weak(x)]
        if "uint64" in {dtype.name for dtype in dtypes} and any(map(_is_signed, dtypes)):  # JAX takes a float for both
            raise TypeError(f"{caller}: {limits}, and no integer dtype holds both. Convert one, `limit.astype(...)`.")
        with width_of(lower, upper):
            jnp.result_type(lower, upper)  # refuses others, under strict promotion
        return limits

    @property
    def by_name(self) -> dict[str, Any]:
        """Both."""
        return {"lower": self.lower, "upper": self.upper}

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

    def distance(self) -> Distance:
        """How far apart they are, exactly, whatever their dtypes."""
        with width_of(self.lower, self.upper):
            return self._distance()

    def _distance(self) -> Distance:
        for name, limit in self.by_name.items():
            if (known := known_int(limit)) is not None:
                self._refuse_beyond(name, known)
        dtype = self.dtype
        beyond = _is_beyond(self.lower, dtype) | _is_beyond(self.upper, dtype)
        longest = _range(self.upper, dtype)[1] - _range(self.lower, dtype)[0]
        wide = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
        gap = _gap(convert(self.lower, wide), convert(self.upper, wide))
        if beyond is not False:
            gap = jnp.where(beyond, jnp.zeros((), gap.dtype), gap)
        checks = [] if beyond is False else [Check.of(f"loopax.{self.caller}", beyond, self._beyond())]
        if longest <= MOST_STEPS or self.are_sizes:
            return Distance(gap.astype(jnp.int32), False, longest, checks)
        return Distance(jnp.minimum(gap, MOST_STEPS).astype(jnp.int32), gap > MOST_STEPS, longest, checks)

    def _refuse_beyond(self, name: str, index: int) -> None:
        """Refuse a limit whose index is beyond the dtype of the index."""
        holds = jnp.iinfo(self.dtype)
        if not int(holds.min) <= index <= int(holds.max):
            got = known_int(self.by_name[name])
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


def _range(limit: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    """From where to where a limit that this dtype holds may be."""
    if (known := known_int(limit)) is not None:
        return known, known
    own, holds = jnp.iinfo(limit.dtype), jnp.iinfo(dtype)
    return max(int(own.min), int(holds.min)), min(int(own.max), int(holds.max))


def _is_beyond(limit: Any, dtype: np.dtype[Any]) -> Any:
    """Whether this dtype does not hold a traced limit; False, not an array, where it holds every such."""
    if known_int(limit) is not None:
        return False
    own, holds = jnp.iinfo(limit.dtype), jnp.iinfo(dtype)
    below = int(own.min) < int(holds.min) and limit < int(holds.min)
    return below | (int(own.max) > int(holds.max) and limit > int(holds.max))


def _gap(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """max(upper - lower, 0), without a sign: a signed difference may wrap, and its bits are right."""
    difference = upper - lower
    if jnp.issubdtype(difference.dtype, jnp.signedinteger):
        difference = lax.bitcast_convert_type(difference, jnp.dtype(f"uint{8 * difference.dtype.itemsize}"))
    return jnp.where(upper > lower, difference, jnp.zeros((), difference.dtype))
