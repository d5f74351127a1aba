"""What of a loop's carry is a fixed point, and what is zero there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core import BoundLoop, LoopCall, LoopInputs
from loopax._src.core.jaxpr.util import Mask, merge_lists, reject, select
from loopax._src.jax_internals import (
    ClosedJaxpr,
    convert,
    jaxpr_as_fun,
    moved_like,
    on_device,
    open_constants,
    replace_jaxpr,
    to_device,
)
from loopax._src.pytrees.diff import same_structure


@dataclass(frozen=True)
class FixedPoint:
    """The unknowns among the leaves of a carry, and a residual that is zero where they are the fixed point."""

    call: LoopCall
    is_real: Mask  # leaves of the carry that have derivatives
    is_constant: Mask  # those that the body returns as they came, such as weights
    is_unknown: Mask  # those of the fixed point
    extras: list[Any]  # what the user's function closes over
    user_residual: ClosedJaxpr | None  # (*extras, *carry) -> residual; None: unknowns - step(unknowns)

    @classmethod
    def of(cls, call: LoopCall, function: Callable[[Any], Any] | None) -> "FixedPoint":
        """As the user's function says; without one, all leaves that have derivatives and change are unknowns."""
        low, high, *inputs = call.operands
        is_constant = BoundLoop.of(call.loop, low, high, LoopInputs(*inputs)).fixed
        is_real = tuple(_has_derivative(aval) for aval in call.loop.input_avals.carry)
        if function is None and not any(is_real):
            raise ValueError(
                f"{call.where}: kind=Implicit() differentiates a fixed point, and no leaf of the carry is real or "
                "complex. Leave the kind out."
            )
        if function is None:
            changing = tuple(real and not constant for real, constant in zip(is_real, is_constant, strict=True))
            return cls(call, is_real, is_constant, changing, [], None)
        return cls(call, is_real, is_constant, *_of_function(call, function, is_constant))

    @property
    def is_other(self) -> Mask:
        """Leaves that have derivatives and are not of the fixed point."""
        return tuple(real and not unknown for real, unknown in zip(self.is_real, self.is_unknown, strict=True))

    def residual(self, unknowns: Sequence[Any], carry: Sequence[Any], row: Any, inputs: Any) -> list[Any]:
        """What is zero at the fixed point: an array for each unknown. `inputs` are operands and extras."""
        operands, extras = inputs
        carry = self._with(unknowns, carry, inputs)
        if self.user_residual is not None:
            return jaxpr_as_fun(self.user_residual)(*extras, *carry)
        after = select(self.is_unknown, self.call.at(operands).step(row, carry).carry)
        return [on_device(jnp.subtract, *pair) for pair in zip(unknowns, after, strict=True)]

    def others_after(self, unknowns: Sequence[Any], carry: Sequence[Any], row: Any, inputs: Any) -> list[Any]:
        """The other leaves that have derivatives, after a step from the fixed point."""
        carry = self._with(unknowns, carry, inputs)
        return select(self.is_other, self.call.at(inputs[0]).step(row, carry).carry)

    def _with(self, unknowns: Sequence[Any], carry: Sequence[Any], inputs: Any) -> list[Any]:
        """The carry with these unknowns, and with the constants as the loop was given them: a step depends on them."""
        constants = select(self.is_constant, inputs[0].carry)
        carry = merge_lists(self.is_constant, reject(self.is_constant, carry), constants)
        return merge_lists(self.is_unknown, reject(self.is_unknown, carry), unknowns)


def raveled(arrays: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """The arrays as one vector of the widest of their dtypes, and the function that makes arrays of such a vector."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        dtype = jnp.result_type(*(x.dtype for x in arrays))
    ends = list(accumulate(x.size for x in arrays))

    def unravel(vector: Any) -> list[Any]:
        pieces = jnp.split(vector, ends[:-1])
        return [moved_like(x, _cast(piece, x.dtype).reshape(x.shape)) for piece, x in zip(pieces, arrays, strict=True)]

    return jnp.concatenate([convert(to_device(x), dtype).ravel() for x in arrays]), unravel


def _cast(x: Any, dtype: Any) -> Any:
    return convert(x if jnp.issubdtype(dtype, jnp.complexfloating) else x.real, dtype)


def _has_derivative(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _of_function(
    call: LoopCall, function: Callable[[Any], Any], is_constant: Mask
) -> tuple[Mask, list[Any], ClosedJaxpr | None]:
    """Which leaves are the unknowns, what the function closes over, and its residual if it has one.

    Constants are no unknowns, also if the function returns them.
    """
    results: list[Any] = []

    def flat(*carry: Any) -> list[Any]:
        results.append(function(call.unpack(carry)))
        return jax.tree.leaves(results[0])

    raw = jax.make_jaxpr(flat)(*call.loop.input_avals.carry)
    carry, out = raw.jaxpr.invars, raw.jaxpr.outvars
    half = len(out) // 2 if _is_pair(results[0]) and not all(leaf in carry for leaf in out) else len(out)
    unknowns, residual = out[:half], out[half:]
    if not unknowns or not all(leaf in carry and _has_derivative(leaf.aval) for leaf in unknowns):
        raise TypeError(
            f"Implicit(fixed_point=...), called with a carry of {call.where}: got a result that is not made of real or "
            "complex leaves of the carry, as they came. Return these, as a pytree, or a pair of them and of a residual "
            "of the same structure: lambda val: (val.x, val.x - f(val.x))."
        )
    for leaf, zero in zip(unknowns, residual, strict=False):
        if (leaf.aval.shape, leaf.aval.dtype) != (zero.aval.shape, zero.aval.dtype):
            raise TypeError(
                f"Implicit(fixed_point=...), called with a carry of {call.where}: got a residual of "
                f"{_type(zero.aval)} for a leaf of {_type(leaf.aval)}. They must have the same shape and dtype."
            )
    is_unknown = tuple(leaf in unknowns and not fixed for leaf, fixed in zip(carry, is_constant, strict=True))
    if not residual:
        return is_unknown, [], None
    in_order = [residual[unknowns.index(leaf)] for leaf in select(is_unknown, carry)]
    whole, extras = open_constants(raw)
    return is_unknown, extras, replace_jaxpr(whole, whole.jaxpr.invars, in_order)


def _type(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _is_pair(result: Any) -> bool:
    """Whether this is a pair of two pytrees of the same structure."""
    if not isinstance(result, tuple) or len(result) != 2:
        return False
    return same_structure(*map(jax.tree.structure, result))
