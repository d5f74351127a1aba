"""Branches: `cond` and `switch`. A branch is a loop of one step or none.

So lanes of a batch take branches as they take steps: nothing comes to a lane from a branch that it does not take, and a
costly branch that no lane takes is not run. The loops of a call stand one after another, and one of them takes its
step. They carry the result, which each hands on if it takes none.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.lanes import Free, Lanes, LanesLike, Lockstep, to_lanes
from loopax._src.core.jaxpr.util import merge_lists, reject
from loopax._src.core.own_arrays import versions_of_inputs
from loopax._src.frontend.extent import Extent, width_of
from loopax._src.frontend.options import Options, check_callable
from loopax._src.frontend.references import refuse_references_in
from loopax._src.frontend.run import UserLoop
from loopax._src.frontend.run_time_checks import collecting, settle
from loopax._src.frontend.steps import call_user
from loopax._src.frontend.trace import Step, traced_once, without_flags
from loopax._src.jax_internals import ClosedJaxpr, Literal, jaxpr_as_fun
from loopax._src.kinds import Auto, Bounded
from loopax._src.nnx.functional import freeze, is_object, thaw
from loopax._src.pytrees.leaves import Dynamic, Spec, describe, differences, pack, same_structure
from loopax._src.pytrees.match_carry import NO_RETURN, conversion
from loopax._src.pytrees.static import Called, parameters_of

R = TypeVar("R")
_NOT_GIVEN: Any = object()


@jaxi.api_boundary
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
        How a batch runs if its lanes select different functions, as in `while_loop`. In lockstep, each selected
        function is evaluated once for all lanes. With compact lanes, those of each function are gathered into batches
        of a fixed size.

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
    # `jax.lax.cond` also takes `cond(pred, true_operand, true_fun, false_operand, false_fun)`, without documenting it.
    if not callable(true_fun) and callable(false_fun) and len(operands) == 2 and callable(operands[1]):
        if_true, of_true, (of_false, if_false) = false_fun, true_fun, operands
        operands = of_true, of_false
        true_fun, false_fun = wraps(if_true)(lambda x, _: if_true(x)), wraps(if_false)(lambda _, x: if_false(x))
    functions = {"true_fun": true_fun, "false_fun": false_fun}
    given = _operands("cond", functions, operands, operand)
    is_one = isinstance(pred, bool | int | float | np.generic | np.ndarray | jax.Array) and np.ndim(pred) == 0
    if not is_one or jnp.result_type(pred).kind not in "biuf":
        raise TypeError(f"cond(pred=...): got {describe(pred)}, expected one bool.")
    pred = jnp.asarray(pred)
    is_true = pred if pred.dtype == jnp.bool_ else lax.ne(pred, jaxi.zero(pred.dtype))  # numbers too, as in `jax.lax`
    return _run_one("cond", functions, [is_true, ~is_true], given, to_lanes(lanes))


@jaxi.api_boundary
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
    functions = {f"branches[{i}]": function for i, function in enumerate(branches)}
    given = _operands("switch", functions, operands, operand)
    is_one = isinstance(index, int | np.generic | np.ndarray | jax.Array) and np.ndim(index) == 0
    if not is_one or isinstance(index, bool) or jnp.result_type(index).kind not in "iu":
        raise TypeError(f"switch(index=...): got {describe(index)}, expected one integer.")
    number = jnp.asarray(index)
    if not functions:
        raise ValueError("switch(branches=...): got no branches, expected at least one function.")
    how = to_lanes(lanes)
    if len(functions) == 1:
        return functions["branches[0]"](*given)
    with width_of(number):
        number = jnp.clip(number, 0, len(functions) - 1).astype(jnp.int32)
    return _run_one("switch", functions, [number == i for i in range(len(functions))], given, how)


Functions = Mapping[str, Callable[..., Any]]  # branches, by what the user calls them


def _operands(name: str, branches: Functions, operands: tuple[Any, ...], operand: Any) -> tuple[Any, ...]:
    """The operands, by whatever name they are given; an error where a branch cannot be called."""
    for branch, function in branches.items():
        check_callable(f"{branch} of {name}", function)
    if operand is _NOT_GIVEN:
        return operands
    if operands:
        raise TypeError(
            f"{name}(operand=...): got an operand by name and {len(operands)} by position, expected one of the two."
        )
    return (operand,)


def _run_one(name: str, branches: Functions, is_taken: Sequence[Any], operands: tuple[Any, ...], how: Lanes) -> Any:
    """The result of the branch that is taken."""
    if jaxi.runs_in_python() and None not in (known := list(map(jaxi.value_now, is_taken))):
        return list(branches.values())[known.index(True)](*operands)
    if isinstance(how, Free):
        raise ValueError(f'{name}(lanes="free"): free lanes are for a loop with a loop in its body. Use "compact".')
    branches, operands = _with_references(branches, operands)
    given_arrays, operand_spec = pack(freeze(operands))
    traced = _traced(name, branches, given_arrays, operand_spec)
    inputs = {branch: [*found.closed_over, *given_arrays] for branch, found in traced.items()}
    spec, avals, given = _common_results(name, traced, inputs)
    # An array that every branch returns as it was given is known without a branch: lanes go on sharing it.
    is_given = [x is not _COMPUTED for x in given]
    computed = reject(is_given, avals)
    options = Options(name, Auto() if how == Lockstep() else Bounded(), how)
    has_objects = any(map(is_object, jax.tree.leaves(operands, is_leaf=is_object)))
    starts = [None] * len(computed) if has_objects else reject(is_given, _starts(traced, avals, is_given, inputs))
    result = [jaxi.zeros(aval) if x is None else x for x, aval in zip(starts, computed, strict=True)]
    at = {id(x): k for k, x in enumerate(starts) if x is not None}
    used_keys = []

    def call(
        branch: str, function: Any, begins: Any, row: Any, extras: Any, carry: Any, x: Any
    ) -> tuple[Any, Any, Any]:
        del row, extras, x
        operands, result = carry
        if at:
            pairs = zip([*traced[branch].closed_over, *pack(operands)[0]], begins, strict=True)
            arrays = jaxpr_as_fun(traced[branch].program)(*(x if k is None else result[k] for x, k in pairs))
        else:
            arrays, _ = pack(without_flags(freeze(call_user(f"{branch} of {name}", function, [], *operands))))
        pairs = zip(reject(is_given, arrays), computed, strict=True)
        return (operands, [jaxi.convert(x, aval.dtype) for x, aval in pairs]), None, None

    for (branch, function), taken in zip(branches.items(), is_taken, strict=True):
        # A loop of one step, or of none, whose carry are the operands and the result so far. Which arrays it computes,
        # and which of its inputs these begin as, depends on the other branches, too.
        begins = tuple(at.get(id(x)) for x in inputs[branch]) if at else ()
        body, called = partial(call, branch, function, begins), Called(name, (function,), ())
        step = Step(body, f"{branch} of {name}", called, (name, tuple(is_given), begins), once=True)
        extent = Extent(0, taken.astype(jnp.int32), 1, fixed=False)
        done = UserLoop(step, options, extent, [], (operands, result), branch=branch, used_keys=used_keys).run()
        _, result = done.hand_over(settle(done.carry, done.checks))
    arrays = merge_lists(is_given, result, [x for x in given if x is not _COMPUTED])
    arrays = [jaxi.to_weak(x) if aval.weak_type else x for x, aval in zip(arrays, avals, strict=True)]
    return thaw(spec.unpack(arrays))


def _with_references(branches: Functions, operands: tuple[Any, ...]) -> tuple[Functions, Any]:
    """Branches that close over mutable arrays among operands (`jax.new_ref`), which no loop can carry."""
    is_taken_out = lambda leaf: jaxi.is_reference(leaf) and not is_object(leaf)  # noqa: E731
    references, rest = eqx.partition(operands, is_taken_out, is_leaf=is_object)
    if not jax.tree.leaves(references):
        return branches, operands

    def closing(function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(lambda *given: function(*eqx.combine(references, given, is_leaf=is_object)))

    return {name: closing(function) for name, function in branches.items()}, rest


# What branches return: the same structure and types, or an error that says where not.


_COMPUTED = object()


class _TracedBranch(NamedTuple):
    """What one branch returns."""

    spec: Spec
    # For each array: where it stands among what the branch closes over and behind it its operands; None: it is computed
    places: list[int | None]
    closed_over: list[Any]
    program: ClosedJaxpr  # (*closed over, *operands) -> arrays
    is_pure: bool  # whether it does nothing else
    versions: list[int | None]  # for each array: of which of these inputs rows are written to make it

    @property
    def tree(self) -> Any:
        """The pytree with types at its leaves."""
        return self.spec.treedef.unflatten(x.aval if isinstance(x, Dynamic) else x.value for x in self.spec.leaves)


def _traced(name: str, branches: Functions, arrays: Sequence[Any], spec: Spec) -> dict[str, _TracedBranch]:
    """What each branch returns for operands of these types."""
    return {
        branch: traced_once(
            (function,), ("branch", spec), partial(_trace, f"{branch} of {name}", name, function, spec, arrays)
        )
        for branch, function in branches.items()
    }


def _starts(
    branches: Mapping[str, _TracedBranch],
    avals: Sequence[Any],
    is_given: Sequence[bool],
    inputs: Mapping[str, list[Any]],
) -> list[Any]:
    """For each array that is computed, the one of which all branches write rows to make it; None: there is none.

    The result begins as this array. The branch that is taken finds it there, and changes it in place.
    """
    if not all(branch.is_pure for branch in branches.values()):
        return [None] * len(avals)
    starts: list[Any] = []
    columns = zip(*(branch.versions for branch in branches.values()), strict=True)
    for aval, is_other, places in zip(avals, is_given, columns, strict=True):
        x, *others = (None if i is None else given[i] for i, given in zip(places, inputs.values(), strict=True))
        fits = x is not None and jax.typeof(x) == aval and not (is_other or aval.weak_type)
        starts.append(x if fits and all(y is x for y in others) and all(y is not x for y in starts) else None)
    return starts


def _common_results(
    name: str, branches: Mapping[str, _TracedBranch], inputs: Mapping[str, list[Any]]
) -> tuple[Spec, list[Any], list[Any]]:
    """The types that all branches return for these operands, as a pytree and as arrays.

    For each array, the one that all branches return as it is; `_COMPUTED`: there is none.
    """
    traced = list(branches.values())
    results = [
        [_COMPUTED if i is None else inputs[name][i] for i in branch.places] for name, branch in branches.items()
    ]
    first, avals, given = traced[0], traced[0].spec.avals, results[0]
    own_name, *others = branches
    for other_name, other, other_given in zip(others, traced[1:], results[1:], strict=True):
        names = own_name, other_name
        if (first.tree is None) != (other.tree is None):
            forgetful, second = names if first.tree is None else names[::-1]
            raise TypeError(f"{forgetful} of {name} must return what {second} does. Got None. {NO_RETURN}")
        if problems := _problems(first, avals, other):
            raise TypeError(
                f"{name}: {names[1]} and {names[0]} must return the same structure, shapes and dtypes. They do not, "
                "at:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + f"\nConvert a result ({conversion(problems)}), or return the same containers."
            )
        avals = [_joined(a, b) for a, b in zip(avals, other.spec.avals, strict=True)]
        given = [a if a is b else _COMPUTED for a, b in zip(given, other_given, strict=True)]
    # Arrays of `float0`, which no loop carries, have only one value.
    only = [np.zeros(aval.shape, aval.dtype) if aval.dtype == jax.dtypes.float0 else None for aval in avals]
    return first.spec, avals, [x if one is None else one for x, one in zip(given, only, strict=True)]


def _trace(where: str, name: str, function: Any, spec: Spec, arrays: Sequence[Any]) -> tuple[_TracedBranch, list[Any]]:
    """What a branch returns for operands of these types, and the values that it closes over."""
    found: list[Spec] = []
    has_checks: list[bool] = []
    here = jaxi.source_here()

    def call(arrays: Sequence[Any]) -> list[Any]:
        with collecting() as collected:
            operands = thaw(jaxi.made_at(here, spec.unpack(arrays)))
            names = [f"operands[{i}]" for i in range(len(operands))]
            result = freeze(call_user(where, function, names, *operands))
        refuse_references_in(f"{where} returned", result)
        out, out_spec = pack(without_flags(result))
        found.append(out_spec)
        has_checks.append(bool(collected.checks or collected.infos or collected.watched))
        return out

    # What the branch calls the arrays that it is given.
    names = spec.names("operands")
    for i, parameter in enumerate(parameters_of(function)):
        prefix = f"operands[{i}]"
        names = [parameter + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names]
    Called(name, (function,), ()).name_in_errors(call, names)
    closed = jax.make_jaxpr(call)(arrays)
    (of_result,) = found
    opened, consts = jaxi.open_constants(closed)
    inputs = {var: i for i, var in enumerate(opened.invars)}
    places = [None if isinstance(out, Literal) else inputs.get(out) for out in opened.outvars]
    is_pure = not closed.effects and not any(has_checks)
    return _TracedBranch(of_result, places, consts, opened, is_pure, versions_of_inputs(opened)), consts


def _problems(first: _TracedBranch, avals: Sequence[Any], other: _TracedBranch) -> list[str]:
    """Where the results of two branches differ; `avals` are the types of the first and those between."""
    a, b = first.spec, other.spec
    if not same_structure(a.treedef, b.treedef):
        found = differences(first.tree, other.tree, root="the result itself")
        return list(found) or [f"{b.treedef} and {a.treedef}"]
    problems, numbered = [], iter(avals)
    for path, x, y in zip(a.paths(), a.leaves, b.leaves, strict=True):
        fits, aval = x == y, next(numbered) if isinstance(x, Dynamic) else None
        if aval is not None and isinstance(x, Dynamic) and isinstance(y, Dynamic):
            same = x.key_impl == y.key_impl and aval.shape == y.aval.shape
            fits = same and _joined(aval, y.aval) is not None
        if not fits:
            words = [describe(leaf.aval if isinstance(leaf, Dynamic) else leaf.value) for leaf in (y, x)]
            problems.append(f"{path or 'the result itself'}: {words[0]} and {words[1]}")
    return problems


def _joined(a: Any, b: Any) -> Any:
    """The type of both; None if there is none. A weakly typed result takes the dtype of the other one."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = a.dtype if a.dtype == b.dtype else jnp.result_type(a, b)
    other_place = jaxi.memory_space(a) is not jaxi.memory_space(b) or jaxi.spec_of(a) != jaxi.spec_of(b)
    if other_place or any(x.dtype != dtype and not x.weak_type for x in (a, b)):
        return None
    joined = a.update(dtype=dtype, weak_type=a.weak_type and b.weak_type)
    return jaxi.with_varying_axes(joined, jaxi.varying_axes(a) | jaxi.varying_axes(b))
