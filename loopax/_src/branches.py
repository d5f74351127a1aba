"""Branches: `cond` and `switch`. A branch is a loop of one step or none.

So lanes of a batch take branches as they take steps: nothing comes to a lane from a branch that it does not take, and a
costly branch that no lane takes is not run. The loops of a call stand one after another, and one of them takes its
step. They carry the result, which each hands on if it takes none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from loopax._src.core.ir.lanes import Free, Lanes, LanesLike, Lockstep, to_lanes
from loopax._src.frontend import trace as tracing
from loopax._src.frontend.branch_results import Branch, Results, as_arrays, common_results
from loopax._src.frontend.checks import settle
from loopax._src.frontend.extent import Extent, width_of
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.run import LoopSpec, run
from loopax._src.jax_internals import api_boundary, is_reference, runs_in_python, value_now, zero
from loopax._src.kinds import Auto, Bounded
from loopax._src.nnx.functional import is_object
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Called

R = TypeVar("R")
_NOT_GIVEN: Any = object()


@api_boundary
def cond(
    pred: bool | Bool[Array, ""],
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    operand: Any = _NOT_GIVEN,
    lanes: LanesLike = "lockstep",
) -> R:
    """Call one of two functions; under `jax.vmap`, each lane calls its own.

    The meaning::

        return true_fun(*operands) if pred else false_fun(*operands)

    A lane is one member of a batch under `jax.vmap`. If lanes have different predicates:

    - A costly function that no lane selects is not evaluated.
    - A lane gets nothing from the function that it does not select: no NaN, no error, no loop iteration and no effect.
    - A function of a few elementwise operations is computed for all lanes, and each lane selects its result.

    Parameters
    ----------
    pred
        The predicate: one bool, or one number (True if not zero).
    true_fun, false_fun
        Functions of the operands. Both return the same structure, shapes and dtypes.
    operands
        Arguments for the function: pytrees. Leaves that are not arrays keep their Python values. The functions may
        change NNX objects and mutable arrays (`jax.new_ref`) in place.
    operand
        The single operand, given by name as in `jax.lax.cond`.
    lanes
        How a batch runs if its lanes select different functions. Give an object or its name:

        - `"lockstep"`, `Lockstep()`: each selected function is evaluated once for all lanes.
        - `"compact"`, `Compact()`: the lanes of each function are gathered into batches of a fixed size.
        - `"sequential"`, `Sequential()`: one lane after another calls its own function.
        - `"auto"`, `AutoLanes()`: the fastest of these by an estimate.

    Returns
    -------
    result
        The result of the selected function.

    Raises
    ------
    TypeError
        `pred` is not one bool or number, or the functions return different structures, shapes or dtypes.
    ValueError
        `lanes` is unknown, or `lanes="free"`.
    NotImplementedError
        The functions communicate over the mapped axis (`jax.lax.psum`), and lanes have different predicates.

    Notes
    -----
    Cost without a batch: one function. In lockstep: each function that any lane selects, for all lanes. With compact
    lanes: each function for its own lanes, rounded up to whole batches. With compact lanes, a gradient stores nothing
    of the functions and evaluates each function once more.

    Derivatives: forward and reverse mode, in every order.

    """
    true_fun, false_fun, operands = _with_operands_together(true_fun, false_fun, operands)
    check_callable("true_fun of cond", true_fun)
    check_callable("false_fun of cond", false_fun)
    given = _operands("cond", operands, operand)
    is_true, how = _predicate(pred), to_lanes(lanes)
    if runs_in_python() and (value := value_now(is_true)) is not None:
        return (true_fun if value else false_fun)(*given)
    branches = [Branch("true_fun", true_fun), Branch("false_fun", false_fun)]
    return _run_one("cond", branches, [is_true, ~is_true], given, how)


@api_boundary
def switch(
    index: int | Int[Array, ""],
    branches: Sequence[Callable[..., R]],
    *operands: Any,
    operand: Any = _NOT_GIVEN,
    lanes: LanesLike = "lockstep",
) -> R:
    """Call one of several functions; under `jax.vmap`, each lane calls its own.

    The meaning::

        index = min(max(index, 0), len(branches) - 1)
        return branches[index](*operands)

    Parameters
    ----------
    index
        The number of the function to call: one integer. An index out of range is clamped, as in `jax.lax.switch`.
    branches
        Functions of the operands. All return the same structure, shapes and dtypes.
    operands, operand, lanes
        As in `cond`.

    Returns
    -------
    result
        The result of the selected function.

    Raises
    ------
    TypeError
        `index` is not one integer, a branch is not a function, or the functions return different structures, shapes or
        dtypes.
    ValueError
        `branches` is empty, `lanes` is unknown, or `lanes="free"`.
    NotImplementedError
        As in `cond`.

    Notes
    -----
    Cost and derivatives: as in `cond`.

    """
    functions = tuple(branches)
    for i, function in enumerate(functions):
        check_callable(f"branches[{i}] of switch", function)
    given = _operands("switch", operands, operand)
    number = _index(index)
    if not functions:
        raise ValueError("switch(branches=...): got no branches, expected at least one function.")
    how = to_lanes(lanes)
    if len(functions) == 1:
        return functions[0](*given)
    with width_of(number):
        number = jnp.clip(number, 0, len(functions) - 1).astype(jnp.int32)
    if runs_in_python() and (value := value_now(number)) is not None:
        return functions[int(value)](*given)
    named = [Branch(f"branches[{i}]", function) for i, function in enumerate(functions)]
    return _run_one("switch", named, [number == i for i in range(len(functions))], given, how)


def _with_operands_together(true_fun: Any, false_fun: Any, operands: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Functions and operands, also of a call `cond(pred, true_operand, true_fun, false_operand, false_fun)`.

    `jax.lax.cond` takes it, too, but does not document it any more.
    """
    if callable(true_fun) or not callable(false_fun) or len(operands) != 2 or not callable(operands[1]):
        return true_fun, false_fun, operands
    if_true, (if_false, of_false) = false_fun, operands
    return wraps(if_true)(lambda x, _: if_true(x)), wraps(of_false)(lambda _, x: of_false(x)), (true_fun, if_false)


def _operands(caller: str, operands: tuple[Any, ...], operand: Any) -> tuple[Any, ...]:
    """The operands, by whatever name they are given."""
    if operand is _NOT_GIVEN:
        return operands
    if operands:
        raise TypeError(
            f"{caller}(operand=...): got an operand by name and {len(operands)} by position, expected one of the two."
        )
    return (operand,)


def _predicate(pred: Any) -> Any:
    """A predicate as one bool; numbers that are not zero are True, as in `jax.lax`."""
    is_one = isinstance(pred, bool | int | float | np.generic | np.ndarray | jax.Array) and np.ndim(pred) == 0
    if not is_one or jnp.result_type(pred).kind not in "biuf":
        raise TypeError(f"cond(pred=...): got {describe(pred)}, expected one bool.")
    pred = jnp.asarray(pred)
    return pred if pred.dtype == jnp.bool_ else lax.ne(pred, zero(pred.dtype))


def _index(index: Any) -> Any:
    """An index as an array."""
    is_one = isinstance(index, int | np.generic | np.ndarray | jax.Array) and np.ndim(index) == 0
    if not is_one or isinstance(index, bool) or jnp.result_type(index).kind not in "iu":
        raise TypeError(f"switch(index=...): got {describe(index)}, expected one integer.")
    return jnp.asarray(index)


class _Call(NamedTuple):
    """A call of `cond` or `switch`."""

    name: str
    operands: tuple[Any, ...]
    results: Results
    lanes: Lanes


def _run_one(
    name: str, branches: Sequence[Branch], is_taken: Sequence[Any], operands: tuple[Any, ...], how: Lanes
) -> Any:
    """The result of the branch that is taken."""
    if isinstance(how, Free):
        raise ValueError(f'{name}(lanes="free"): free lanes are for a loop with a loop in its body. Use "compact".')
    branches, operands = _with_references(branches, operands)
    call = _Call(name, operands, common_results(name, branches, operands), how)
    result = call.results.zeros()
    used_keys: list[Any] = []
    for branch, taken in zip(branches, is_taken, strict=True):
        result = _run_if(call, branch, taken, result, used_keys)
    return call.results.as_returned(result)


@dataclass(frozen=True)
class _Reference:
    """Where a mutable array stands among operands."""

    number: int


def _with_references(branches: Sequence[Branch], operands: tuple[Any, ...]) -> tuple[Sequence[Branch], Any]:
    """Branches that close over mutable arrays among operands (`jax.new_ref`), which no loop can carry."""
    references = [leaf for leaf in jax.tree.leaves(operands, is_leaf=is_object) if _is_reference(leaf)]
    if not references:
        return branches, operands
    numbers = iter(range(len(references)))

    def taken_out(leaf: Any) -> Any:
        return _Reference(next(numbers)) if _is_reference(leaf) else leaf

    def put_back(leaf: Any) -> Any:
        return references[leaf.number] if isinstance(leaf, _Reference) else leaf

    def closing(function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(lambda *given: function(*jax.tree.map(put_back, given, is_leaf=is_object)))

    branches = [Branch(branch.name, closing(branch.function)) for branch in branches]
    return branches, jax.tree.map(taken_out, operands, is_leaf=is_object)


def _is_reference(leaf: Any) -> bool:
    return is_reference(leaf) and not is_object(leaf)


def _run_if(call: _Call, branch: Branch, is_taken: Any, result: list[Any], used_keys: list[Any]) -> list[Any]:
    """The result of a branch if it is taken; else `result`."""

    def step(row: Any, extras: Sequence[Any], carry: Any, x: Any) -> tuple[Any, Any, Any]:
        del row, extras, x
        operands, _ = carry
        return (operands, as_arrays(call.results, branch.function(*operands))), None, None

    called = Called(call.name, (branch.function,), ())
    options = call.name, tuple(call.results.is_given)  # which results are computed depends on the other branches, too
    traced = tracing.Step(step, f"{branch.name} of {call.name}", (branch.function,), options, called, once=True)
    extent = Extent(0, is_taken.astype(jnp.int32), 1, fixed=False)
    kind = Auto() if call.lanes == Lockstep() else Bounded()
    loop_spec = LoopSpec(call.name, extent, False, 1, kind, call.lanes, branch=branch.name, used_keys=used_keys)
    done = run(traced, loop_spec, [], (call.operands, result), None, None)
    return done.hand_over(settle(done.carry, done.checks))[1]
