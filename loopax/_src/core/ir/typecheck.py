"""Whether the operands of an equation fit the bodies in it. Only `check_jaxpr` asks, under `jax_enable_checks` say.

A rule that mixes up operands, or forgets one, makes an equation that is wrong but can be traced: the types of results
follow from the bodies alone.
"""

from collections.abc import Sequence
from typing import Any

from jax import core

from loopax._src.core.ir.loop import Loop, LoopInputs, loop_abstract_eval
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepInputs, sweep_abstract_eval
from loopax._src.core.jaxpr.util import INDEX, stacked
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
    """Raise where these are not arrays with so many rows of the expected types."""
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
    """The types of a loop's results and its effects, if operands and results of the body fit.

    Operands are the types of `low, high, *consts, *carry, *xs`. The body's carry must fit itself: a loop is a fixed
    point of types.
    """
    loop = Loop(**params)
    low, high, *leaves = avals
    check_loop("loop", loop, [low, high], loop.inputs(leaves))
    return loop_abstract_eval(*avals, **params)


def check_loop(what: str, loop: Loop, window: Sequence[Any], given: LoopInputs) -> None:
    """Raise where operands of these types do not fit a loop's body, or the body's carry does not fit itself."""
    expected = loop.input_avals
    check_numbers(f"{what}: low and high", window)
    check_types(f"{what}: consts", expected.consts, given.consts)
    check_types(f"{what}: carry", expected.carry, given.carry)
    check_types(f"{what}: carry that the body returns", expected.carry, loop.output_avals.carry)
    check_rows(f"{what}: xs", expected.xs, given.xs, loop.bound)


def sweep_typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of a reverse sweep's results and its effects, if operands and results of both bodies fit.

    Operands are the types of `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`.
    """
    sweep = ReverseSweep(**params)
    low, high, rows, *leaves = avals
    given, states = sweep.operands(leaves), sweep.forward_avals.state
    check_sweep("reverse_sweep", sweep, [low, high], given.inputs(given.init))
    check_checkpoints("reverse_sweep", states, given.saved, rows, sweep.saving, sweep.bound)
    return sweep_abstract_eval(*avals, **params)


def check_sweep(what: str, sweep: ReverseSweep, window: Sequence[Any], given: SweepInputs) -> None:
    """Raise where operands of these types do not fit the step of a sweep, or its results do not."""
    expected, returned = sweep.backward_avals, sweep.step_outputs(sweep.step.out_avals)
    check_numbers(f"{what}: low and high", window)
    check_types(f"{what}: consts", expected.consts, given.consts)
    check_types(f"{what}: init", expected.state, given.state)
    check_types(f"{what}: states that the step returns", expected.state, returned.state)
    check_types(f"{what}: carry", expected.carry, given.carry)
    check_types(f"{what}: carry that the step returns", expected.carry, returned.carry)
    check_rows(f"{what}: xs", expected.xs, given.xs, sweep.bound)
