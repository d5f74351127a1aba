"""What is slow in a loop for a reason that its user can remove, and how."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core import BlocksThenResiduals
from loopax._src.core.autodiff.jvp import jvp_loop
from loopax._src.core.autodiff.partial_eval import partial_eval
from loopax._src.core.autodiff.planning import plan_of
from loopax._src.core.autodiff.transpose import sweep_of, transposed_step
from loopax._src.core.ir.lane_choice import chosen
from loopax._src.core.ir.lanes import (
    CPU_LANES,
    AutoLanes,
    Compact,
    Free,
    Lockstep,
    Sequential,
    fewest_lanes,
    group_sizes,
)
from loopax._src.core.ir.loop import Loop, LoopInputs
from loopax._src.core.ir.plan import Slots, with_known_length
from loopax._src.core.jaxpr.util import Mask, merge_lists, num_bytes, select
from loopax._src.core.lowering.sweep_bodies import recording_of
from loopax._src.core.masking import fill_inactive_p
from loopax._src.insight.find_loops import FoundLoop, source_of, without_calls
from loopax._src.insight.schedule_picture import evaluations_of, room_of
from loopax._src.jax_internals import ClosedJaxpr, Literal
from loopax._src.pytrees.leaves import type_in_words

# Sizes in words, and tables of text.


def in_bytes(size: float) -> str:
    """A number of bytes, with three digits."""
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if units[0] != "B" and size < 999.5 else f"{size:.0f} {units[0]}"


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int]) -> list[str]:
    """Rows of cells as lines of columns, of which these are of numbers; a row may end early."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()  # noqa: B905
        for row in rows
    ]


# What the gradient of a loop stores, and how often it evaluates the body.


# An online schedule of more steps is not followed step by step; it needs at most so many times the evaluations of one
# that knows its length (docs/kinds.md).
_COUNTED, _ONLINE = 100_000, 1.15


@dataclass(frozen=True)
class Stored:
    """What a gradient stores between the forward and the backward pass. Sizes are for one lane.

    Attributes
    ----------
    kind
        The kind in use, such as the one that `Auto` chose.
    reason
        Why `Auto` chose this kind.
    what
        What is stored: `"carries"`, or `"residuals"` (what the derivative of a step needs).
    carries
        The most carries or residuals that are stored, including those of a recomputed block.
    size
        The bytes of one carry, or of the residuals of one step.
    records
        Whether recomputed steps store their residuals in place of carries.
    walks_back
        Whether the inverse of the kind is evaluated once for each step.
    leaves
        Whether each leaf of the carry is stored.
    evaluations
        The most evaluations of the body, forward and gradient together, for as many steps as the bound. None: no bound.

    """

    kind: str
    reason: str
    what: str
    carries: int
    size: int
    records: bool
    walks_back: bool
    leaves: Mask
    evaluations: int | None


REFUSALS = (ValueError, TypeError, NotImplementedError)


def _of_one_lane(found: FoundLoop) -> Loop:
    """The loop of one of the lanes, whose kind chooses for all that take steps with it."""
    loop, lanes = found.loop, found.lanes
    if lanes < 2:
        return loop
    how, together = chosen(loop.lanes, loop.body, loop.num_consts, lanes), lanes
    if isinstance(how, Compact):
        together = max(size for _, size in group_sizes(how, lanes))
    elif isinstance(how, Sequential):
        together = 1
    return loop._replace(share=loop.share * together / lanes, lanes=Lockstep(), kind=loop.kind._for_lanes(together))


def stored_of(found: FoundLoop) -> tuple[Stored | None, str]:
    """What a gradient of a loop stores, if any is taken of it, or why none can be.

    Such as reverse mode that a kind does not have, or too little memory for `Auto`.
    """
    loop = _of_one_lane(found)
    bound, given = loop.bound, loop.inputs([value.perturbed for value in found.operands])
    if not any(map(any, given)):
        return None, ""
    try:
        pair, inputs, _ = jvp_loop(loop, LoopInputs(*map(tuple, given)))
        # Before: which inputs are perturbed. After: which of the loop on pairs are unknown: no primals, these tangents.
        groups = zip(inputs, given, strict=True)
        unknown = LoopInputs(*((*(False for _ in mask), *select(mask, of)) for mask, of in groups))
        plan = plan_of(pair, unknown, partial_eval)
        if plan.error:
            raise plan.error
        parts = partial_eval(pair, plan, unknown)
        # A loop with residuals of its last steps is made of two: the plan says what both of them store.
        records, linear = isinstance(plan, BlocksThenResiduals), parts.linear
        shown = plan if records else parts.known.saving
        if linear.saving is not None and not records:  # the sweep may leave out ys that have no cotangent
            step = transposed_step(linear, (True,) * len(linear.output_avals.ys))
            records = recording_of(sweep_of(linear, step)) is not None
    except REFUSALS as error:
        return None, str(error)
    # Rows of residuals are stored, unless a step draws for all lanes once more: it needs carries.
    if plan.stores_residuals and not parts.known.saving:
        what, carries, evaluations = "residuals", bound or 0, bound
        size = num_bytes(parts.stored)
    else:
        what, size = "carries", num_bytes(parts.states)
        if bound is None:
            carries, evaluations = room_of(shown, 0), None
        else:
            carries = -(-room_of(shown, bound, size) // max(size, 1))
            if isinstance(shown, Slots) and parts.states and not shown.length_known and bound > _COUNTED:
                evaluations = int(_ONLINE * evaluations_of(with_known_length(shown), bound, records=False))
            else:
                evaluations = evaluations_of(shown if parts.states else None, bound, records)
    # Known primal leaves of the carry may be stored; they stand in front of their tangents.
    unknown_carry = parts.unknown.carry
    leaves = merge_lists(unknown_carry, parts.used.carry, (False,) * sum(unknown_carry))[: loop.num_carry]
    back = linear.saving is not None and linear.saving.walks_back
    carries = carries if size else 0
    return Stored(plan.name, plan.reason, what, carries, size, records, back, tuple(leaves), evaluations), ""


# An array that is updated in place: from so many bytes on, and so many times what is written.
_LARGE, _MANY_ROWS = 4096, 8
# Residuals: from so many bytes in all on, and so many times the carry.
_MUCH, _TIMES = 2**20, 4


@dataclass(frozen=True)
class Advice:
    """Something that makes a loop slow, and how to change it.

    Attributes
    ----------
    name
        The name of the problem: `"rows-written-in-carry"`, `"trajectory-in-carry"`, `"dtype-round-trip"`,
        `"slowest-lane"`, `"branch-for-all-lanes"` or `"large-residuals"`.
    source
        The line to change, `"file.py:12 (function)"`. Empty if not known.
    message
        What happens on this line, and what to write instead.

    """

    name: str
    source: str
    message: str

    def __str__(self) -> str:
        """Return the advice as one line of text."""
        return f"{self.source or 'unknown line'}: {self.message} [{self.name}]"


def advice_for(found: FoundLoop, stored: Stored | None) -> list[Advice]:
    """All that there is to say of a loop."""
    return [*_of_carry(found, stored), *_slowest_lane(found), *_large_residuals(found, stored)]


def _of_carry(found: FoundLoop, stored: Stored | None) -> Iterator[Advice]:
    """What happens to the leaves of the carry in the body."""
    body = without_calls(found.loop.body)
    makers = {variable: eqn for eqn in body.eqns for variable in eqn.outvars}
    inputs = [body.invars[i] for i in found.loop.carry_range]
    kept = stored.leaves if stored and stored.what == "carries" else (False,) * len(inputs)
    for value, start, end, is_kept in zip(found.carry, inputs, body.outvars, kept, strict=False):
        leaf = f"{value.name or 'a leaf of the carry'} ({type_in_words(start.aval)}"
        if (write := _write_to(start, end, makers)) is not None:
            size, written = num_bytes([start.aval]), max(num_bytes([jaxi.update_of(write.eqn).aval]), 1)
            # A loop of loopax touches what is written, unless versions of the array are stored, or chosen from.
            is_in_place = found.library == "loopax" and not (is_kept or write.is_chosen)
            if is_in_place or size < max(_LARGE, _MANY_ROWS * written):
                continue
            what = f"{leaf}, {in_bytes(size)}) is carried, though a step writes {in_bytes(written)} of it"
            cost = "A step of a gradient then touches all of it"
            if _is_read(body, start):
                name = "rows-written-in-carry"
                way = "append to a `loopax.Buffer` in its place, or keep the last rows in a `loopax.History`"
            else:
                name, what = "trajectory-in-carry", f"{what} and never reads it"
                way = (
                    "return the rows as `ys` of `loopax.scan` in its place (or append to a `loopax.Buffer`, where not "
                    "every step writes one)"
                )
            if found.library == "lax":
                way += ". A loop of loopax with a bound touches what is written, and nothing else"
            elif is_kept and found.loop.bound is None:
                way += ". With a bound, such as `max_steps=`, no version of it is stored"
            yield Advice(name, source_of(write.eqn), f"{what}. {cost}: {way}.")
        elif (cast := _round_trip(start, end, makers)) is not None:
            yield Advice(
                "dtype-round-trip",
                source_of(cast),
                f"{leaf}) is returned through {cast.invars[0].aval.dtype}, so it changes, and is carried, stored and "
                "batched at every step. Cast a copy of it for the computation, and return the original as it came.",
            )


class _Write(NamedTuple):
    """How a part of a leaf is written."""

    eqn: Any  # the last write
    is_chosen: bool = False  # between the old array and the new one


def _write_to(start: Any, end: Any, makers: dict[Any, Any], write: _Write | None = None) -> _Write | None:
    """The equation that writes a part of a leaf, where `end` is this leaf with that part changed.

    `write` is a later one; other parts may be written before.
    """
    if end is start:
        return write
    eqn = None if isinstance(end, Literal) else makers.get(end)
    if eqn is None:
        return None
    if jaxi.updates(eqn):
        return _write_to(start, eqn.invars[0], makers, write or _Write(eqn))
    if eqn.primitive is fill_inactive_p and write:
        return _write_to(start, eqn.invars[2], makers, write._replace(is_chosen=True))
    # The old value or the new one: a write under a condition, or for lanes that have not finished.
    cases = eqn.invars[1:] if jaxi.is_select(eqn) else ()
    found = next(filter(None, (_write_to(start, case, makers, write) for case in cases)), None)
    return found and found._replace(is_chosen=True)


def _is_read(body: ClosedJaxpr, start: Any) -> bool:
    """Whether an array that is written in place is also used for something else."""
    versions = {start}
    for eqn in body.eqns:
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if not versions.intersection(operands):
            continue
        if jaxi.updates(eqn) and operands[0] in versions:
            if versions.intersection(operands[1:]):
                return True
            versions.add(eqn.outvars[0])
        elif eqn.primitive is fill_inactive_p or (
            jaxi.is_select(eqn) and all(eqn.invars[0] is not v for v in versions)
        ):
            versions.add(eqn.outvars[0])
        else:
            return True
    return False


def _round_trip(start: Any, end: Any, makers: dict[Any, Any]) -> Any:
    """The last cast, where a leaf comes back as it went but for casts."""
    cast, atom = None, end
    while not isinstance(atom, Literal) and atom is not start:
        eqn = makers.get(atom)
        if eqn is None or not jaxi.keeps_values(eqn):
            return None
        if jaxi.is_cast(eqn) and cast is None:
            cast = eqn
        atom = eqn.invars[0]
    return cast if atom is start else None


def _is_branch(found: FoundLoop) -> bool:
    return found.loop.debug_info is not None and bool(found.loop.debug_info.branch)


_TWICE = 2.0  # as good by an estimate, which is often wrong by half


def _slowest_lane(found: FoundLoop) -> Iterator[Advice]:
    lanes, debug_info = found.waiting, found.loop.debug_info
    chosen = found.loop.lanes if debug_info is None else debug_info.lanes
    # With these ways, a cheap step is for all.
    if lanes <= fewest_lanes(Compact(), CPU_LANES) or isinstance(chosen, Free | Compact | AutoLanes):
        return
    if debug_info is not None and debug_info.branch:  # evaluated for lanes that do not take it, if that costs something
        if found.inner or any(map(jaxi.stands_alone, without_calls(found.loop.body).eqns)):
            yield Advice(
                "branch-for-all-lanes",
                found.source,
                f"{debug_info.branch} is evaluated for all {lanes} lanes if one of them takes it. "
                f'Where few do, `{debug_info.function}(..., lanes="compact")` gathers these into smaller batches.',
            )
        return
    way = (
        'use `loopax.while_loop` with `lanes="compact"` (`loopax.rewrite_loops(f, lanes="compact")` for a loop that is '
        "not yours)."
        if found.library == "lax"
        else '`lanes="compact"` drops those that are done; `loopax.lane_report(info)` says how much that saves.'
    )
    expected = dict(debug_info.lanes_expected) if debug_info else {}
    together = expected.get(repr(Lockstep()), 0.0)
    best = min(expected, key=lambda name: expected[name], default="")
    if together >= _TWICE * expected.get(best, together or 1.0):
        name = best.removesuffix("()").lower()
        way = f'`lanes="{name}"` is expected to take {expected[best] / together:.0%} of the time. Or {way}'
    if any(inner.waiting > 1 and not _is_branch(inner) for inner in found.inner):
        free = '`loopax.rewrite_loops(f, lanes="free")`' if found.library == "lax" else '`lanes="free"`'
        way += f" With {free}, no lane waits in each step for the one that takes the most steps of a loop inside."
    here = f"{lanes} lanes run until the slowest of them is done, each step for all lanes"
    yield Advice("slowest-lane", found.source, f"{here}. Where their steps differ much, {way}")


def _large_residuals(found: FoundLoop, stored: Stored | None) -> Iterator[Advice]:
    loop = found.loop
    if stored is None or stored.what != "residuals" or stored.reason:  # what `Auto` takes has its reason
        return
    carry = num_bytes(aval for aval in loop.input_avals[1] if jaxi.has_tangents(aval))
    if stored.carries * stored.size < _MUCH or stored.size < _TIMES * carry:
        return
    way = "`loopax.scan` with " if found.library == "lax" else ""
    yield Advice(
        "large-residuals",
        found.source,
        f"a gradient stores {in_bytes(stored.size)} of residuals a step ({in_bytes(stored.carries * stored.size)} in "
        f'all), {stored.size / max(carry, 1):.0f} times the carry. {way}`kind="bounded"` stores the carries, and '
        'evaluates each step once more; `kind="auto"` takes what is faster.',
    )
