"""Tracing a step: from a user's functions on pytrees to the body of a loop, once for the same functions and types."""

import sys
import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import core as core_types
from jax.core import Tracer

from loopax._src import core
from loopax._src import jax_internals as jaxi
from loopax._src.core.buffer_versions import chained
from loopax._src.core.finite import Finite
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.loop import NO_STOP
from loopax._src.core.jaxpr.util import INDEX, merge_lists, reject, select, split_list, take_out_places, trace
from loopax._src.frontend import references as refs
from loopax._src.frontend.finite import Watched, Watching
from loopax._src.frontend.key_reuse import KeyUse, key_use
from loopax._src.frontend.rows import refuse_strays
from loopax._src.frontend.run_time_checks import Flags, collecting
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.nnx import functional as nnx
from loopax._src.pytrees.leaves import Dynamic, Spec, in_modules, is_number, pack, with_arrays
from loopax._src.pytrees.match_carry import CarryMismatchError, match_carry
from loopax._src.pytrees.static import Called

T = TypeVar("T")

_BOOL = core_types.ShapedArray((), jnp.bool_)


@dataclass(frozen=True)
class StepBack:
    """What a kind brings to walk back. Carries are a sequence: the one after a step, or those before and after it."""

    functions: tuple[Any, ...]  # the user's
    inverse: Callable[..., Any]  # (row, extras, [carry after], x, *[a row of the tape]) -> carry before
    record: Callable[..., Any] | None = None  # (row, extras, [carry before, carry after], x) -> a row of the tape


@dataclass(frozen=True)
class Step:
    """One step of a loop in terms of the user's pytrees.

    `call(row, extras, carry, x)` returns the new carry, a row of ys, and whether to go on (None where
    the loop has no condition).
    """

    call: Callable[[Any, Sequence[Any], Any, Any], tuple[Any, Any, Any]]
    where: str  # the user's function in error messages
    called: Called  # the user's functions, and what JAX's errors name
    options: Hashable  # what else `call` depends on
    back: StepBack | None = None  # what the kind brings to walk back
    once: bool = False  # it is a branch, which is taken at most once
    own: tuple[Any, ...] = ()  # functions that are made for one call
    finite: Finite | None = None  # what breaks a step (`frontend/finite.py`)

    @property
    def functions(self) -> tuple[Any, ...]:
        """With the same functions and options, it is the same step."""
        return (*self.own, *self.called.functions, *(self.back.functions if self.back else ()))


@dataclass(frozen=True)
class Findings:
    """What a step does to the user's pytrees, besides their values."""

    y_spec: Spec
    changes: nnx.Changes  # what the body does to NNX objects in the carry

    def after(self, before: "Findings") -> "Findings":
        """What this step and those before it do together."""
        written = self.changes.written | before.changes.written
        return replace(self, changes=replace(self.changes, written=written))


class Taken(NamedTuple):
    """A step that has been taken, on arrays or on tracers."""

    goes_on: Any  # None where the loop has no condition
    carry: list[Any]
    ys: list[Any]  # its row of ys
    found: Findings


# Whether to take the first step: (extras, carry) -> bool[]. The functions and the options of a `Step` determine it.
FirstCondition = Callable[[Sequence[Any], Any], Any]


@dataclass(frozen=True)
class Traced:
    """A traced step."""

    # (row, *closed over, *extras, *allowed, [length], [goes on], *carry, *flags, *refs, *stop, *x)
    # -> ([goes on], *carry, *flags, *refs, *stop, *y, *row of the tape)
    body: ClosedJaxpr
    # With the inputs of the body and a row of the tape, and its carry: `core/ir/kind.py`
    inverse: ClosedJaxpr | None
    closed_over: list[Any]  # values that the user's functions close over
    references: list[Any]  # mutable arrays that they close over, whose values are leaves of the carry
    carry_avals: list[Any]  # with weak types
    found: Findings
    flags: Flags  # what the checks of inner loops say
    watches_back: bool  # whether a loop in the body looks at its cotangents
    watched: Watched | None  # what each step is looked at for; then the loop has a condition, and a `stop`
    names: core.Names
    key_use: KeyUse | None
    # The first condition, (*closed over, *extras, *carry) -> bool[], and what it closes over. None: there is none, or
    # `run` calls it itself.
    first: tuple[ClosedJaxpr, list[Any]] | None

    @property
    def num_watch(self) -> tuple[int, int]:
        """How many more constants and leaves of the carry there are for what is watched."""
        return (0, 0) if self.watched is None else (len(self.watched.starts) + 1, len(NO_STOP))


def trace_step(step: Step, extras: Sequence[Any], init: Any, goes_on: FirstCondition | None) -> Traced:
    """A step without rows of xs as `run` traces it, to describe it; `init` has the types that it has in the loop."""
    traced = trace_promoting(step, extras, nnx.freeze(init), pack(None)[1].rows(), goes_on)[0]
    refs.refuse_closed_over(step.where, traced.references, "Pass its value through the carry")
    return traced


def trace_promoting(
    step: Step, extras: Sequence[Any], init: Any, x_rows: Spec, goes_on: FirstCondition | None
) -> tuple[Traced, list[Any], Spec]:
    """Trace a step, and return with it the arrays of the first carry, of the types that they have in the loop."""
    own_key = step.options, step.finite, tuple(map(jax.typeof, extras)), goes_on is not None, jaxi.runs_eagerly()

    def trace_from(init: Any, arrays: list[Any], spec: Spec) -> tuple[Traced, list[Any], Spec]:
        now = partial(_trace_now, step, extras, init, spec, x_rows, goes_on)
        return traced_once(step.functions, (*own_key, spec, x_rows), now), arrays, spec

    return promoting(step.where, init, trace_from)


def promoting(where: str, carry: Any, function: Callable[[Any, list[Any], Spec], T]) -> T:
    """Call the function on a carry, its arrays and its spec, and again on promoted leaves where the body asks for it.

    A body may ask a Python number of a module for `.astype`, or divide 1 by 0.0. So if it fails, arrays are tried for
    them; if arrays do not help, the first error is the body's.
    """

    def until_it_fits(carry: Any) -> T:
        changed: list[str] = []
        while True:
            try:
                return function(carry, *pack(carry))
            except CarryMismatchError as mismatch:
                changed += mismatch.changed
                carry = mismatch.restart(carry)
            except Exception as error:
                if changed:
                    error.add_note(
                        f"Note of loopax: {where} does not return these Python values as it is given them, so they are "
                        "arrays in the loop:\n" + "\n".join(changed) + "\nReturn them as they came, and they stay what "
                        "they are."
                    )
                raise

    try:
        return until_it_fits(carry)
    except Exception:
        if any(within and is_number(x) for x, within in zip(jax.tree.leaves(carry), in_modules(carry), strict=True)):
            with suppress(Exception):
                return until_it_fits(with_arrays(carry))
        raise


_cache: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()


def traced_once(functions: Sequence[Any], key: Hashable, trace_now: Callable[[], tuple[T, Sequence[Any]]]) -> T:
    """What is traced, once for the same functions and key, as `jax.lax` does; and `trace_now` says what it closes over.

    Only functions are looked up that are equal to no other, and do not change: some callables compare by value, and NNX
    objects may have changed since.
    """

    def is_only_itself(function: Any) -> bool:
        kind = type(function)
        by_identity = kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__
        has_weak_references = kind.__weakrefoffset__ != 0  # negative where Python keeps them, from 3.12 on
        is_object_of_its_own = by_identity and has_weak_references and not nnx.is_object(function)
        return isinstance(function, types.FunctionType) or is_object_of_its_own

    if not all(map(is_only_itself, functions)):
        return trace_now()[0]
    entries, key = _cache.setdefault(functions[0], {}), (*functions[1:], key, jaxi.trace_context())
    try:
        if key in entries:
            return entries[key]
    except TypeError:  # a leaf that is not an array cannot be hashed
        return trace_now()[0]
    traced, closed_over = trace_now()
    # Where NNX is in use, a function may close over what Variables held, and over something else the next time.
    keeps_closures = not closed_over or "flax.nnx" not in sys.modules
    if keeps_closures and not any(isinstance(value, Tracer) for value in closed_over):
        entries[key] = traced
    return traced


def take_step(
    step: Step,
    row: Any,
    extras: Sequence[Any],
    init: Any,
    arrays: list[Any],
    spec: Spec,
    x_arrays: list[Any],
    x_rows: Spec,
    placed: Callable[[Any], Any] = lambda tree: tree,
) -> Taken:
    """Call a step on the user's pytrees: `arrays` are those of the carry, `init` is a carry as errors describe it.

    `placed` is told what the step is given, and may say of tracers where they were made.
    """
    start = placed(spec.unpack(arrays))
    carry, objects = nnx.thaw_numbered(start)
    carry, y, goes_on = step.call(row, placed(extras), carry, nnx.thaw(placed(x_rows.unpack(x_arrays))))
    carry, changes = nnx.take_back(step.where, start, objects, carry)
    refs.refuse_references_in(f"{step.where} returned carry", carry)
    matched = match_carry(step.where, init, spec, carry)
    # An array that only went through a PRNG key is the one that was given.
    both = zip(spec.leaves, jax.tree.leaves(start), jax.tree.leaves(carry), strict=True)
    same = [old is new for leaf, old, new in both if isinstance(leaf, Dynamic)]
    matched = [old if is_same else new for old, new, is_same in zip(arrays, matched, same, strict=True)]
    y = nnx.freeze(y)
    refs.refuse_references_in(f"{step.where} returned y", y)
    ys, y_spec = pack(without_flags(y))
    return Taken(goes_on, matched, ys, Findings(y_spec, changes))


def _trace_now(
    step: Step, extras: Sequence[Any], init: Any, spec: Spec, x_rows: Spec, goes_on: FirstCondition | None
) -> tuple[Traced, list[Any]]:
    """A traced step, and what it closes over."""
    found: dict[str, Any] = {}
    placed, num_conds = partial(jaxi.made_at, jaxi.source_here()), int(goes_on is not None)
    row_spec = pack(())[1]  # of a row of the tape

    def flat(row: Any, *operands: Any) -> list[Any]:
        nonlocal row_spec
        given, arrays, x_arrays = split_list(operands, [len(extras), len(spec.avals)])
        with collecting() as inner:
            taken = take_step(step, row, given, init, arrays, spec, x_arrays, x_rows, placed)
        found["flags"], flags = Flags.of(inner.checks, None if step.once else row)
        found.update(
            watches_back=bool(inner.watched), found=taken.found, carry_avals=list(map(jax.typeof, taken.carry))
        )
        results = [*[taken.goes_on] * num_conds, *taken.carry, *flags, *taken.ys]
        if step.back is not None and step.back.record is not None:
            x = nnx.thaw(x_rows.unpack(x_arrays))
            carries = [nnx.thaw(spec.unpack(carry)) for carry in (arrays, taken.carry)]
            with collecting():  # the body has the checks
                made = step.back.record(row, given, carries, x)
            made = nnx.freeze(made)
            refs.refuse_references_in(f"record of {step.where} returned", made)
            recorded, row_spec = pack(without_flags(made))
            results += recorded
        return results

    # What JAX's errors call the arguments: as the user's function does.
    called = step.called
    carry, x = spec.names(called.name("carry")), x_rows.names(called.name("x"))
    names = [called.name("i"), *called.extras[: len(extras)], *carry, *x]
    called.name_in_errors(flat, names)
    with nnx.clear_errors(f"{step.where} changes"):
        raw = jax.make_jaxpr(flat)(INDEX, *map(jax.typeof, extras), *spec.avals, *x_rows.avals)
    uses = key_use(step.where, raw, len(extras), spec, x_rows, num_conds, step.once)
    open_body, closed_over = _opened(step.where, raw)
    num_own, open_back, places = len(closed_over), None, []
    if step.back is not None:
        # Traced when the types of a row of the tape are known. It may close over more than the step does.
        open_back, more = _trace_back(step, extras, init, spec, x_rows, row_spec, names)
        closed_over = [*closed_over, *(x for x in more if not any(x is known for known in closed_over))]
        places = [next(i for i, known in enumerate(closed_over) if x is known) for x in more]

    # Before: (*closed over, row, *extras, *carry, *x) -> ([goes on], *carry, *flags, *y, *row of the tape, *references)
    # After: as of `Traced`
    flags, num_carry, num_results = found["flags"], len(spec.avals), len(open_body.out_avals)
    num_flags, watch = sum(flags.sizes), None
    if step.finite is not None:
        first = 1 + num_own + len(extras), num_conds
        watch = Watching.of(step.finite, open_body, first, spec, found["found"].y_spec, num_flags)
    function = chained(open_body if watch is None else watch.program)
    is_mutable = list(map(jaxi.is_reference, closed_over))
    avals = [*open_body.in_avals[:num_own], *map(jax.typeof, closed_over[num_own:])]
    constants, references = reject(is_mutable, avals), select(is_mutable, avals)
    may_be_broken = [f"finite= of {name}" for name in (watch.watched.names_of_starts if watch else ())]
    allowed = [_like(spec.avals[i], jnp.bool_) for i in (watch.watched.starts if watch else ())]
    length, stop = ([INDEX], [INDEX] * len(NO_STOP)) if watch else ([], [])
    num_go = max(num_conds, len(length))
    own_sizes = [len(constants), len(extras), len(allowed), len(length)]
    sizes = [*own_sizes, num_go, num_carry, num_flags, len(references), len(stop)]

    def in_core(row: Any, *operands: Any) -> list[Any]:
        closed, given, may, end, _, arrays, old_flags, values, stop, x = split_list(operands, sizes)
        out, _ = function(*merge_lists(is_mutable, closed, values)[:num_own], row, *given, *arrays, *x)
        go, new, new_flags, results, seen = split_list(
            out, [num_conds, num_carry, num_flags, num_results - num_conds - num_carry - num_flags]
        )
        ys, values = split_list(results, [len(results) - len(references)])
        if watch:
            is_whole, stop = watch.stop(row, may, new, seen, stop)
            go = [is_whole & (go[0] if go else row + 1 != end[0])]  # computed in any case, for the next row
        return [strongly_typed(x) for x in (*go, *new, *flags.after(old_flags, new_flags), *values, *stop, *ys)]

    flag_avals = open_body.out_avals[num_conds + num_carry :][:num_flags]
    given = [INDEX, *constants, *map(jax.typeof, extras), *allowed, *length]
    go = open_body.out_avals[:num_conds] or [_BOOL] * num_go
    body = trace(in_core, [*given, *go, *spec.avals, *flag_avals, *references, *stop, *x_rows.avals])
    inverse = None
    if open_back is not None:
        if references:
            raise NotImplementedError(
                f"{step.where} reads or writes a mutable array (a `jax.Ref`), which the inverse of its kind cannot "
                "walk back. Pass its value through the carry."
            )
        sizes = [*own_sizes[:2], sum(own_sizes[2:]), num_go, num_carry, num_flags + len(stop)]
        inverse = _as_inverse(open_back, [*body.in_avals, *map(jaxi.strong, row_spec.avals)], sizes, places)
    refuse_strays(step.where, init, body, len(given), num_go > 0)
    names = core.Names(
        (*[core.UNNAMED] * sum(own_sizes[:2]), *may_be_broken, *[core.UNNAMED] * len(length)),
        (*[core.UNNAMED] * num_go, *spec.names("carry"), *[core.UNNAMED] * sum(sizes[6:])),
        tuple(x_rows.names("xs")),
        tuple(found["found"].y_spec.names("ys")),
    )
    first = _trace_first(goes_on, extras, spec) if goes_on is not None and jaxi.runs_eagerly() else None
    values = reject(is_mutable, closed_over), select(is_mutable, closed_over)
    body, inverse = jaxi.recognised(body), inverse and jaxi.recognised(inverse)
    watched = watch and watch.watched
    traced = Traced(body, inverse, *values, **found, watched=watched, names=names, key_use=uses, first=first)
    return traced, [*closed_over, *(first[1] if first else [])]


def _trace_first(goes_on: FirstCondition, extras: Sequence[Any], spec: Spec) -> tuple[ClosedJaxpr, list[Any]] | None:
    """The first condition; None where it may change objects or mutable arrays, or where loops in it hand on checks."""
    is_pure = False

    def flat(*operands: Any) -> Any:
        nonlocal is_pure
        given, arrays = split_list(operands, [len(extras)])
        carry, objects = nnx.thaw_numbered(spec.unpack(arrays))
        with collecting() as inner:
            go = goes_on(given, carry)
        is_pure = not objects and not inner.checks
        return go

    first, closed_over = jaxi.open_constants(jax.make_jaxpr(flat)(*map(jax.typeof, extras), *spec.avals))
    return (jaxi.recognised(first), closed_over) if is_pure and not any(map(jaxi.is_reference, closed_over)) else None


def _trace_back(
    step: Step, extras: Sequence[Any], init: Any, spec: Spec, x_rows: Spec, row_spec: Spec, names: Sequence[str]
) -> tuple[ClosedJaxpr, list[Any]]:
    """The inverse as a program (*closed over, row, *extras, *carry, *x, *row of the tape) -> carry before the step."""
    back, here = step.back, jaxi.source_here()
    assert back is not None

    def flat(row: Any, *operands: Any) -> list[Any]:
        given, arrays, x_arrays, recorded = split_list(operands, [len(extras), len(spec.avals), len(x_rows.avals)])
        after = jaxi.made_at(here, spec.unpack(arrays))
        (carry, objects), (x, _) = nnx.thaw_numbered(after), nnx.thaw_numbered(x_rows.unpack(x_arrays))
        with collecting():  # the body has the checks
            carry = back.inverse(row, given, [carry], x, *([row_spec.unpack(recorded)] if back.record else []))
        where = f"the inverse of {step.where}"
        carry, _ = nnx.take_back(where, after, objects, carry)
        return match_carry(where, init, spec, carry)

    step.called.name_in_errors(flat, [*names, *row_spec.names("recorded")])
    avals = [*map(jax.typeof, extras), *spec.avals, *x_rows.avals, *map(jaxi.strong, row_spec.avals)]
    with nnx.clear_errors(f"{step.where} changes"):
        return _opened(step.where, jax.make_jaxpr(flat)(INDEX, *avals))


def _opened(where: str, closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """A program (*closed over, ...) of values in place of mutable arrays, and what it closes over."""
    opened, closed_over = jaxi.open_constants(closed)
    opened, places = take_out_places(opened)
    refs.refuse_other_types(where, closed_over)
    return jaxi.with_values(opened) if jaxi.uses_references(opened) else opened, [*places, *closed_over]


def _as_inverse(raw: ClosedJaxpr, avals: Sequence[Any], sizes: Sequence[int], places: Sequence[int]) -> ClosedJaxpr:
    """Give a traced inverse the core's form. `sizes`: constants, extras, what is watched, condition, carry and flags.

    `places` are those of the constants that it closes over. A step that was taken had a condition that held. Flags are
    returned as they come: no derivative reads them.
    """
    function = chained(jaxi.dce(without_effects(raw), [True] * len(raw.out_avals), True)[0])

    def inverse(row: Any, *operands: Any) -> list[Any]:
        constants, extras, _, go, after, flags, x = split_list(operands, sizes)
        before, _ = function(*(constants[i] for i in places), row, *extras, *after, *x)
        return [*(jnp.ones_like(flag) for flag in go), *map(strongly_typed, before), *flags]

    return trace(inverse, avals)


def _like(aval: Any, dtype: Any) -> Any:
    """The type of a mask of an array, which is on the device."""
    if jaxi.is_on_host(aval):
        return jax.typeof(jnp.zeros(aval.shape, dtype))
    return aval.update(dtype=jnp.dtype(dtype), weak_type=False)


def strongly_typed(x: Any) -> jax.Array:
    """An array, also from a constant of a jaxpr, without the weak types that only a user's results have."""
    x = jnp.asarray(x)
    return jaxi.convert(x, x.dtype)


def without_flags(y: Any) -> Any:
    """Python bools among a row of ys as arrays, which is what stacking rows makes of them outside of modules."""
    leaves, treedef = jax.tree.flatten(y)
    pairs = zip(leaves, in_modules(y), strict=True)
    return treedef.unflatten(
        jnp.asarray(leaf) if isinstance(leaf, bool) and not within else leaf for leaf, within in pairs
    )
