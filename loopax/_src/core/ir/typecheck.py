"""Whether the operands of an equation fit the bodies in it. Only `check_jaxpr` asks, under `jax_enable_checks` say.

A rule that mixes up operands, or forgets one, makes an equation that is wrong but can be traced: the types of results
follow from the bodies alone.
"""

from collections.abc import Sequence
from typing import Any

from jax import core

from loopax._src.core.ir.loop import Loop, loop_abstract_eval
from loopax._src.core.ir.reverse_sweep import ReverseSweep, sweep_abstract_eval
from loopax._src.core.jaxpr.util import INDEX, split_list, stacked
from loopax._src.jax_internals import JaxprTypeError, fits, varying_axes, with_varying_axes
from loopax._src.schedule.saving import Saving


def check_count(what: str, expected: int, given: Sequence[Any]) -> None:
    """Raise where there are more or fewer operands."""
    if len(given) != expected:
        raise JaxprTypeError(f"{what}: expected {expected} operands, got {len(given)}")


def check_types(what: str, expected: Sequence[Any], given: Sequence[Any]) -> None:
    """Raise where values of these types do not fit."""
    if not fits(expected, given):
        raise JaxprTypeError(f"{what}: expected ({_short(expected)}), got ({_short(given)})")


def check_rows(what: str, expected: Sequence[Any], given: Sequence[Any], rows: int | None) -> None:
    """The same for arrays with so many rows of the expected types."""
    check_types(what, [stacked(aval, rows or 0) for aval in expected], given)


def check_numbers(what: str, given: Sequence[Any], shape: tuple[int, ...] = ()) -> None:
    """Raise where these are not numbers of rows; they may vary over the axes of a `shard_map`."""
    index = core.ShapedArray(shape, INDEX.dtype)
    check_types(what, [with_varying_axes(index, varying_axes(aval)) for aval in given], given)


def check_checkpoints(
    what: str, expected: Sequence[Any], given: Sequence[Any], numbers: Any, saving: Saving, bound: int | None
) -> None:
    """Raise where these are not the states that were saved, and the numbers of their rows."""
    check_rows(f"{what}: saved", expected, given, saving.rows(bound))
    check_numbers(f"{what}: checkpoint_rows", [numbers], (saving.num_checkpoint_rows(),))


def _short(avals: Sequence[Any]) -> str:
    return ", ".join(str(aval) for aval in avals)


def loop_typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of a loop's results and its effects, if operands and results of the body fit."""
    loop = Loop(**params)
    check_loop("loop", loop, *split_list(avals, [2, *loop.sizes]))
    return loop_abstract_eval(*avals, **params)


def check_loop(
    what: str, loop: Loop, window: Sequence[Any], consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> None:
    """Raise where operands of these types do not fit a loop's body, or the body's carry does not fit itself."""
    expected_consts, expected_carry, expected_x = loop.input_avals
    check_numbers(f"{what}: low and high", window)
    check_types(f"{what}: consts", expected_consts, consts)
    check_types(f"{what}: carry", expected_carry, carry)
    check_types(f"{what}: carry that the body returns", expected_carry, loop.output_avals[0])
    check_rows(f"{what}: xs", expected_x, xs, loop.bound)


def sweep_typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of a reverse sweep's results, if operands and results of both bodies fit. A sweep has no effects."""
    static = ReverseSweep(**params)
    (low, high, numbers), consts, init, saved, carry, xs = split_list(avals, [3, *static.sizes])
    check_sweep("reverse_sweep", static, [low, high], consts, init, carry, xs)
    check_checkpoints("reverse_sweep", static.forward_avals[1], saved, numbers, static.saving, static.bound)
    return sweep_abstract_eval(*avals, **params), frozenset()


def check_sweep(
    what: str,
    static: ReverseSweep,
    window: Sequence[Any],
    consts: Sequence[Any],
    init: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> None:
    """Raise where operands of these types do not fit one of a sweep's bodies, or its results do not."""
    forward_consts, state, forward_x = static.forward_avals
    backward_consts, expected_carry, read_state, x = static.backward_avals
    check_numbers(f"{what}: low and high", window)
    check_types(f"{what}: consts of the forward step", forward_consts, consts)
    check_types(f"{what}: consts of the backward step", backward_consts, consts)
    check_types(f"{what}: init", state, init)
    check_types(f"{what}: states that the backward step reads", read_state, state)
    check_types(f"{what}: states that the forward step returns", state, static.forward.out_avals)
    check_types(f"{what}: carry", expected_carry, carry)
    check_types(
        f"{what}: carry that the backward step returns",
        expected_carry,
        static.backward.out_avals[: static.num_carry],
    )
    check_rows(f"{what}: xs that the forward step reads", forward_x, xs[: static.num_forward_xs], static.bound)
    check_rows(f"{what}: xs", x, xs, static.bound)
