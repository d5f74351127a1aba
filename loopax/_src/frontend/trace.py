"""From a user's functions on pytrees to a loop of the core: trace once, run for any number of steps."""

import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from loopax._src import core
from loopax._src.core.jaxpr.util import INDEX, merge_lists, reject, select, split_list, take_out_places, trace
from loopax._src.core.row_buffers.versions import chained
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.options import SCAN, no_capacity
from loopax._src.frontend.references import (
    NO_REFERENCES,
    ReferenceRows,
    refuse_closed_over,
    refuse_other_types,
    refuse_references_in,
)
from loopax._src.frontend.rows import refuse_strays
from loopax._src.frontend.runtime_checks import Check, collecting, failures
from loopax._src.function_names import Called
from loopax._src.jax_internals import (
    ClosedJaxpr,
    is_reference,
    open_constants,
    trace_context,
    uses_references,
    vary_like,
    with_values,
    zeros,
)
from loopax._src.kinds import Kind
from loopax._src.lanes import Lanes
from loopax._src.nnx.functional import freeze, is_object, keeps_closures, thaw_numbered
from loopax._src.nnx.writeback import Changes, clear_errors, hand_over, refuse_lost_changes, take_back
from loopax._src.nnx.xs_writeback import WrittenRows, written_rows
from loopax._src.progress import Reporter
from loopax._src.pytrees.leaves import (
    CarryMismatchError,
    Dynamic,
    Spec,
    has_numbers,
    in_modules,
    match_carry,
    pack,
    restore_weak,
    with_arrays,
)

# The user's argument for the first carry, in errors; elsewhere it is `init_val`. That of a rollout has a field `state`.
_INITIAL = {"scan": "scan(init=...)", "rollout": "rollout"}


@dataclass(frozen=True)
class Step:
    """One step of a loop in terms of the user's pytrees.

    `call(row, extras, carry, x)` returns the new carry, a row of ys, and whether to go on (None where
    the loop has no condition). `functions` are the user's functions in it, which key the cache.
    """

    call: Callable[[Any, Sequence[Any], Any, Any], tuple[Any, Any, Any]]
    where: str  # the user's function in error messages
    functions: tuple[Any, ...]
    options: Hashable  # what else `call` depends on
    called: Called  # what JAX's errors name


@dataclass(frozen=True)
class LoopSpec:
    """The rows that a loop walks, and how."""

    name: str  # of the loop, as the user calls it
    extent: Extent
    reverse: bool
    unroll: int
    kind: Kind
    lanes: Lanes
    reporter: Reporter | None = None  # to whom it tells how far it is


@dataclass(frozen=True)
class Traced:
    """A traced step."""

    # (row, *closed over, *extras, [goes on], *carry, *flags, *refs, *x) -> ([goes on], *carry, *flags, *refs, *y)
    body: ClosedJaxpr
    closed_over: list[Any]  # values that the user's functions close over
    references: list[Any]  # mutable arrays that they close over, whose values are leaves of the carry
    carry_avals: list[Any]  # with weak types
    y_spec: Spec
    changes: Changes  # what the body does to NNX objects in the carry
    row_changes: Changes  # and to those in rows of xs
    rows: WrittenRows  # whose written arrays are the first ys
    messages: list[str]  # one for each flag: what went wrong where it is True
    names: core.Names


@dataclass(frozen=True)
class Finished:
    """The results of a loop on pytrees, NNX objects in them frozen."""

    num_steps: Any
    goes_on: Any
    carry: Any
    ys: Any
    checks: list[Check]
    hand_over: Callable[[Any], Any]  # from the carry to what the user gets; NNX objects in xs are changed too


def run(
    step: Step,
    loop_spec: LoopSpec,
    extras: Sequence[Any],
    init: Any,
    xs: Any,
    goes_on: Callable[[Any], Any] | None,
    references: ReferenceRows = NO_REFERENCES,
) -> Finished:
    """Run a loop; `goes_on(init)` says whether to take the first step (None: the loop has no condition).

    `references` are those whose values are among xs.
    """
    extent = loop_spec.extent
    fixed = extent.fixed and goes_on is None
    frozen = freeze(init)
    refuse_references_in(_INITIAL.get(loop_spec.name, f"{loop_spec.name}(init_val=...)"), frozen)
    step = references.step(step)
    storage = core.Asked.of(loop_spec.kind, extent.bound, fixed, extent.bound_is_loose)
    x_arrays, x_spec = pack(freeze(xs))
    traced, arrays, spec = _trace_promoting(step, extras, frozen, x_spec.rows(), goes_on is not None)
    refuse_lost_changes(step.where, init, traced.changes, xs, traced.row_changes)
    references.refuse_closed_over(step.where, traced.references)
    if extent.capacity is None and any(traced.rows.written):
        raise no_capacity(SCAN, "NNX objects in xs", "set up what they hold before the scan")
    first_flag = int(goes_on is not None) + len(arrays)
    flags = [zeros(aval) for aval in traced.body.out_avals[first_flag:][: len(traced.messages)]]
    start = []
    if goes_on is not None:
        first, arrays = first_condition(step, goes_on, spec, arrays)
        start = [vary_like(first, traced.body.out_avals[0])]
    loop = core.Loop(
        traced.body,
        num_consts=len(traced.closed_over) + len(extras),
        num_carry=len(start) + len(arrays) + len(flags) + len(traced.references),
        bound=extent.bound,
        reverse=loop_spec.reverse,
        predicated=goes_on is not None,
        unroll=loop_spec.unroll,
        storage=storage,
        stages=loop_spec.lanes.stages,
        reporting=loop_spec.reporter and core.Reporting(loop_spec.reporter),
        debug_info=core.DebugInfo(
            loop_spec.name, loop_spec.kind, loop_spec.lanes, fixed, extent.bound_is_loose, traced.names
        ),
    )
    consts = [*traced.closed_over, *extras]
    carry = [*start, *arrays, *flags, *(reference[...] for reference in traced.references)]
    run_loop = core.run_free if loop_spec.lanes.is_free else core.run
    rows = [x[: extent.bound] for x in x_arrays]

    def run_now() -> core.Outcome:
        return run_loop(loop, extent.low, extent.high, consts, carry, rows)

    out = loop_spec.reporter.watch(run_now) if loop_spec.reporter else run_now()
    last, carry, flags, values = split_list(out.carry, [len(start), len(arrays), len(flags)])
    for reference, value in zip(traced.references, values, strict=True):
        reference[...] = value
    checks = [Check(flag, message) for flag, message in zip(flags, traced.messages, strict=True)]
    ys = [_pad(y, extent.capacity or 0) for y in out.ys]
    rows, ys = split_list(ys, [sum(traced.rows.written)])
    walked = _walked(extent, loop_spec.reverse, out.num_steps)
    xs_after = traced.rows.xs_after(x_arrays, rows, walked)
    ys = traced.y_spec.unpack(restore_weak(ys, traced.y_spec.avals))

    def hand_over_all(carry: Any) -> Any:
        hand_over(step.where, xs, xs_after, traced.row_changes)
        return hand_over(step.where, init, carry, traced.changes)

    return Finished(
        out.num_steps,
        last[0] if last else None,
        spec.unpack(restore_weak(carry, traced.carry_avals)),
        references.write_back(ys, walked),
        checks,
        hand_over_all,
    )


def trace_step(step: Step, extras: Sequence[Any], init: Any, predicated: bool) -> Traced:
    """A step without rows of xs as `run` traces it, to describe it; `init` has the types that it has in the loop."""
    traced = _trace_promoting(step, extras, freeze(init), pack(None)[1].rows(), predicated)[0]
    refuse_closed_over(step.where, traced.references, "Pass its value through the carry")
    return traced


def _walked(extent: Extent, reverse: bool, num_steps: Any) -> jax.Array:
    """Which rows the loop has been at."""
    rows = jnp.arange(extent.capacity or 0, dtype=jnp.int32)
    return (rows < extent.high) & (rows >= extent.high - num_steps) if reverse else rows < num_steps


def first_condition(step: Step, goes_on: Callable[[Any], Any], spec: Spec, arrays: list[Any]) -> tuple[Any, list[Any]]:
    """Whether to take the first step, and the carry after asking: a condition may change NNX objects in it."""
    given = spec.unpack(arrays)
    carry, objects = thaw_numbered(given)
    first = goes_on(carry)
    if not objects:
        return first, arrays
    where = f"cond_fun, which is called before {step.where},"
    carry, _ = take_back(where, given, objects, carry)
    return first, match_carry(where, given, spec, carry)


def _pad(y: jax.Array, rows: int) -> jax.Array:
    """Zero rows for those beyond a static bound below the capacity."""
    missing = rows - y.shape[0]
    return jnp.pad(y, [(0, missing), *[(0, 0)] * (y.ndim - 1)]) if missing else y


def _trace_promoting(
    step: Step, extras: Sequence[Any], init: Any, x_rows: Spec, predicated: bool
) -> tuple[Traced, list[Any], Spec]:
    """Trace, and again with arrays for the Python numbers of modules where the body cannot do with numbers.

    A body may ask one of them for `.astype` or divide 1 by 0.0. If arrays do not help, the first error is the body's.
    """
    try:
        return _trace_until_it_fits(step, extras, init, x_rows, predicated)
    except Exception:
        if has_numbers(init):
            with suppress(Exception):
                return _trace_until_it_fits(step, extras, with_arrays(init), x_rows, predicated)
        raise


def _trace_until_it_fits(
    step: Step, extras: Sequence[Any], init: Any, x_rows: Spec, predicated: bool
) -> tuple[Traced, list[Any], Spec]:
    """Trace, and again from promoted leaves where the body's result asks for it."""
    changed: list[str] = []
    while True:
        arrays, spec = pack(init)
        try:
            return _trace(step, extras, init, spec, x_rows, predicated), arrays, spec
        except CarryMismatchError as mismatch:
            changed += mismatch.changed
            init = mismatch.restart(init)
        except Exception as error:
            if changed:
                error.add_note(_changed_note(step.where, changed))
            raise


def _changed_note(where: str, changed: Sequence[str]) -> str:
    """What to know about an error in a body whose Python values have become arrays."""
    return (
        f"Note of loopax: {where} does not return these Python values as it is given them, so they are arrays in the "
        "loop:\n" + "\n".join(changed) + "\nReturn them as they came, and they stay what they are."
    )


_cache: WeakKeyDictionary[Any, dict[Hashable, Traced]] = WeakKeyDictionary()


def _trace(step: Step, extras: Sequence[Any], init: Any, spec: Spec, x_rows: Spec, predicated: bool) -> Traced:
    """Trace a step, once for the same functions and types, as `jax.lax` does.

    Only functions are looked up that are equal to no other: some callables compare by value. NNX objects may have
    changed since.
    """
    if not all(map(_is_only_itself, step.functions)):
        return _trace_now(step, extras, init, spec, x_rows, predicated)
    key = (step.functions[1:], step.options, tuple(map(jax.typeof, extras)), spec, x_rows, predicated, trace_context())
    entries = _cache.setdefault(step.functions[0], {})
    try:
        if key in entries:
            return entries[key]
    except TypeError:  # a leaf that is not an array cannot be hashed
        return _trace_now(step, extras, init, spec, x_rows, predicated)
    traced = _trace_now(step, extras, init, spec, x_rows, predicated)
    closed_over = [*traced.closed_over, *traced.references]
    if keeps_closures(closed_over) and not any(isinstance(value, Tracer) for value in closed_over):
        entries[key] = traced
    return traced


def _is_only_itself(function: Any) -> bool:
    """Whether a function is the same as before only if it is the same object, and does not change."""
    kind = type(function)
    by_identity = kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__
    has_weak_references = kind.__weakrefoffset__ != 0  # negative where Python keeps them, from 3.12 on
    return isinstance(function, types.FunctionType) or (by_identity and has_weak_references and not is_object(function))


def _trace_now(step: Step, extras: Sequence[Any], init: Any, spec: Spec, x_rows: Spec, predicated: bool) -> Traced:
    found: dict[str, Any] = {}

    def flat(row: Any, *operands: Any) -> list[Any]:
        given, arrays, x = split_list(operands, [len(extras), len(spec.avals)])
        start = spec.unpack(arrays)
        leaves = jax.tree.leaves(start)  # before the body uses it up, as it does an `equinox.nn.State`
        x_start = x_rows.unpack(x)
        (carry, objects), (x, x_objects) = thaw_numbered(start), thaw_numbered(x_start)
        x_after = jax.tree.map(lambda leaf: leaf, x, is_leaf=is_object)  # the body may change containers
        with collecting() as checks:
            carry, y, goes_on = step.call(row, given, carry, x)
        flags = failures(checks)
        carry, found["changes"] = take_back(step.where, start, objects, carry)
        refuse_references_in(f"{step.where} returned carry", carry)
        matched = match_carry(step.where, init, spec, carry)
        carry = _as_they_came(arrays, spec, leaves, matched, carry)
        x, found["row_changes"] = take_back(step.where, x_start, x_objects, x_after, of_rows=True)
        rows, found["rows"] = written_rows(step.where, x_start, x_rows, x)
        y = freeze(y)
        refuse_references_in(f"{step.where} returned y", y)
        ys, found["y_spec"] = pack(_without_flags(y))
        found["carry_avals"] = list(map(jax.typeof, carry))
        found["messages"] = list(flags)
        go = [goes_on] if predicated else []
        return [*go, *carry, *flags.values(), *rows, *ys]

    _name_in_errors(flat, step.called, len(extras), spec, x_rows)
    with clear_errors(f"{step.where} changes"):
        raw = jax.make_jaxpr(flat)(INDEX, *map(jax.typeof, extras), *spec.avals, *x_rows.avals)
    open_body, closed_over = open_constants(raw)
    open_body, places = take_out_places(open_body)
    closed_over = [*places, *closed_over]
    refuse_other_types(step.where, closed_over)
    open_body = with_values(open_body) if uses_references(open_body) else open_body
    body = _as_body(open_body, closed_over, extras, spec.avals, x_rows.avals, len(found["messages"]), predicated)
    is_mutable = list(map(is_reference, closed_over))
    constants, references = reject(is_mutable, closed_over), select(is_mutable, closed_over)
    refuse_strays(step.where, init, body, 1 + len(constants) + len(extras), predicated)
    names = _names(body, spec, x_rows, found, predicated, len(references))
    return Traced(body, constants, references, **found, names=names)


def _name_in_errors(flat: Callable[..., Any], called: Called, num_extras: int, spec: Spec, x_rows: Spec) -> None:
    """Let JAX's errors about a value in the body name the user's body, and the path in what it is given."""
    carry, x = spec.names(called.name("carry")), x_rows.names(called.name("x"))
    called.name_in_errors(flat, [called.name("i"), *called.extras[:num_extras], *carry, *x])


def _names(
    body: ClosedJaxpr, spec: Spec, x_rows: Spec, found: dict[str, Any], predicated: bool, num_references: int
) -> core.Names:
    """What the operands and the rows of results are called in the user's pytrees."""

    def unnamed(count: int) -> tuple[str, ...]:
        return (core.UNNAMED,) * count

    carry = (*unnamed(predicated), *spec.names("carry"), *unnamed(len(found["messages"]) + num_references))
    xs, ys = x_rows.names("xs"), found["y_spec"].names("ys")
    consts = unnamed(len(body.in_avals) - 1 - len(carry) - len(xs))
    return core.Names(consts, carry, tuple(xs), (*unnamed(sum(found["rows"].written)), *ys))


def _as_they_came(given: list[Any], spec: Spec, start: list[Any], arrays: list[Any], end: Any) -> list[Any]:
    """The arrays of a carry with those that were given in place of those that only went through a PRNG key."""
    leaves = zip(spec.leaves, start, jax.tree.leaves(end), strict=True)
    same = [old is new for leaf, old, new in leaves if isinstance(leaf, Dynamic)]
    return [old if is_same else new for old, new, is_same in zip(given, arrays, same, strict=True)]


def _as_body(
    raw: ClosedJaxpr,
    closed_over: Sequence[Any],
    extras: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    num_flags: int,
    predicated: bool,
) -> ClosedJaxpr:
    """Give a traced step the core's form: the condition, the flags and the values of references join the carry."""
    function, num_go = chained(raw), int(predicated)
    go, flags = raw.out_avals[:num_go], raw.out_avals[num_go + len(carry) :][:num_flags]
    is_mutable, avals = list(map(is_reference, closed_over)), raw.in_avals[: len(closed_over)]
    constants, references = reject(is_mutable, avals), select(is_mutable, avals)
    sizes = [len(constants), len(extras), len(go), len(carry), num_flags, len(references)]

    def body(row: Any, *operands: Any) -> list[Any]:
        closed, given, _, arrays, flags, values, x = split_list(operands, sizes)
        out, _ = function(*merge_lists(is_mutable, closed, values), row, *given, *arrays, *x)
        new, new_flags, results = split_list(out, [len(go) + len(carry), num_flags])
        ys, values = split_list(results, [len(results) - len(references)])
        flags = [a | b for a, b in zip(flags, new_flags, strict=True)]
        return [strongly_typed(x) for x in (*new, *flags, *values, *ys)]

    return trace(body, [INDEX, *constants, *map(jax.typeof, extras), *go, *carry, *flags, *references, *xs])


def strongly_typed(x: Any) -> jax.Array:
    """An array, also from a constant of a jaxpr, without the weak types that only a user's results have."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype)


def _without_flags(y: Any) -> Any:
    """Python bools among a row of ys as arrays, which is what stacking rows makes of them outside of modules."""
    leaves, treedef = jax.tree.flatten(y)
    pairs = zip(leaves, in_modules(y), strict=True)
    return treedef.unflatten(
        jnp.asarray(leaf) if isinstance(leaf, bool) and not within else leaf for leaf, within in pairs
    )
