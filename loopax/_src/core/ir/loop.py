"""The loop primitive: a scan whose number of steps is decided when it runs.

Meaning, for a loop that walks forward (`reverse` walks the same rows from the last to the first)::

    ys = zeros(bound, ...)
    row = low
    while row < high and (carry[0] if predicated else True):
        carry, ys[row] = body(row, consts, carry, xs[row])
        row += 1
    return row - low, carry, ys

Operands are `low, high, *consts, *carry, *xs`, results `num_steps, *carry, *ys`.

A loop that saves also returns `*saved, checkpoint_rows`. Saved are checkpoints: the carry before some of the steps,
from which reverse mode recomputes the others. `checkpoint_rows` are the rows of these steps, the first one's first,
`EMPTY_SLOT` where there were fewer; where checkpoints are not in the order of their steps, they are followed by the
slots; the last number is that of the rows. For two-level checkpoints, they are the row of the first step alone.

A condition is a bool leaf of the carry, so that every rule has one jaxpr to deal with.

A loop may end before a step that *breaks* (`core/finite.py`). Three leaves of its carry, its `stop`, say which step
that is: `NO_STOP` at the start. A step that breaks returns them with its row, and False as its condition. The loop then
ends before this step, as if it had known the row from the start, and the leaves say so: the results are those of the
steps before, so no derivative meets the broken one. (It runs twice: `core/lowering/loop.py`.)
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import core

from loopax._src.core.ir.annotations import DebugInfo, Names, Reporting
from loopax._src.core.ir.lanes import Lanes, Lockstep
from loopax._src.core.ir.plan import Saving
from loopax._src.core.jaxpr.accumulate import Carried
from loopax._src.core.jaxpr.dependence import (
    Dependence,
    close_over_carry,
    dependence,
    mixed_inputs_of_steps,
    union,
)
from loopax._src.core.jaxpr.types import (
    Axes,
    Expected,
    differing,
    localized,
    marked_before,
    numbers_expected,
    rows_expected,
    varying,
)
from loopax._src.core.jaxpr.util import (
    INDEX,
    Mask,
    flatten,
    forwarded_from,
    grouped,
    invert,
    map_leaves,
    merge_lists,
    reject,
    select,
    stacked,
    weakly_cached,
)
from loopax._src.jax_internals import ClosedJaxpr, dce, know_sparse, new_primitive, replace_jaxpr, with_varying_axes

EMPTY_SLOT = -1  # in `checkpoint_rows`: nothing was saved there
NO_STOP = -1, -1, -1  # a `stop`: the row of the step that broke, and where in it; each is int32[*lanes]
NOT_STARTED = -2  # in the place of the row, while a batch runs: the lane takes no step


class LoopInputs(NamedTuple):
    """What stands for each input of a loop behind `low` and `high`, or of its body behind the row.

    An array, a type, a name, a tangent, a mapped axis, or whether it is known.
    """

    consts: Sequence[Any]
    carry: Sequence[Any]
    xs: Sequence[Any]


class LoopOutputs(NamedTuple):
    """What stands for each output of a body: the new carry, and a row of ys."""

    carry: Sequence[Any]
    ys: Sequence[Any]


class Loop(NamedTuple):
    """The static description of a loop: the parameters of the primitive."""

    body: ClosedJaxpr  # (row, *consts, *carry, *x) -> (*carry, *y)
    num_consts: int
    num_carry: int
    bound: int | None  # rows of xs and ys, and the most steps; None: no rows, any number of steps
    reverse: bool
    predicated: bool  # carry[0] is a bool scalar: go on while it is True
    unroll: int
    kind: Any  # a `Kind`: it is asked what reverse mode stores (`core/ir/kind.py`)
    is_fixed: bool = False  # these four are for the kind, as in `LoopFacts`
    bound_is_loose: bool = False
    is_batch: bool = False
    share: float = 1.0
    derivative: Any = None  # a `Derivative` that runs the loop; None: that of the steps
    saving: Saving | None = None  # a loop that saves: which carries
    saved: Mask = ()  # a loop that saves: which leaves of the carry
    lanes: Lanes = Lockstep()  # how a batch runs
    reporting: Reporting | None = None  # how it shows how far it is; None: not
    debug_info: DebugInfo | None = None  # what a user called; None: the loop is our own
    inverse: ClosedJaxpr | None = None  # (row, *consts, *carry after a step, *x) -> carry before it (`core/ir/kind.py`)
    may_discard: bool = False  # the one step of a loop is computed in any case, and dropped if it is not taken
    idles: bool = False  # a step whose predicate is False evaluates nothing, and returns the carry as it came
    stop: int | None = None  # where the three leaves of its `stop` begin in the carry; None: no step breaks
    watch: Any = None  # (results, whether it broke, step) -> results or an error: who looks at cotangents; None: nobody

    def is_before_stop(self, row: Any, carry: Sequence[Any], or_at: bool = False) -> Any:
        """Whether the row of a step is before that of the one that breaks, or at it: bool for each lane, or True.

        Where a lane is a batch itself, that of any of its own lanes.
        """
        if self.stop is None:
            return True
        stop = carry[self.stop]
        is_before = (stop >= 0) & (row > stop) if self.reverse else row < stop
        is_before |= (stop == NO_STOP[0]) | (or_at and row == stop)
        num_own = self.output_avals.carry[self.stop].ndim
        return jnp.any(is_before, axis=tuple(range(stop.ndim - num_own, stop.ndim))) if num_own else is_before

    def kept(self, carry: Sequence[bool]) -> dict[str, Any]:
        """What is said of the carry by number, where only these leaves of it are kept."""
        saved = tuple(select(carry, self.saved)) if self.saved else ()
        return {"num_carry": sum(carry), "saved": saved, "stop": self.stop and sum(carry[: self.stop])}

    @property
    def stops(self) -> range:
        """Which leaves of the carry are its `stop`."""
        return range(0) if self.stop is None else range(self.stop, self.stop + len(NO_STOP))

    @property
    def always_carried(self) -> list[int]:
        """Which leaves of the carry a loop keeps for itself, whoever else needs them."""
        counts = [] if self.active_count_index is None else [self.active_count_index]
        return [*counts, *self.stops]

    @property
    def active_count_index(self) -> int | None:
        """Which leaf of the carry is the number of lanes that go on; None where there are none to count."""
        return int(self.predicated) if self.reporting is not None and self.reporting.counts_lanes else None

    @property
    def carry_range(self) -> range:
        """Where the carry stands among the body's inputs."""
        return range(1 + self.num_consts, 1 + self.num_consts + self.num_carry)

    def inputs(self, leaves: Sequence[Any]) -> LoopInputs:
        """By name what stands for each input behind `low` and `high`, or behind the row."""
        return grouped(LoopInputs, leaves, self.num_consts, self.num_carry)

    def outputs(self, leaves: Sequence[Any]) -> LoopOutputs:
        """By name what stands for each leaf of the carry and each of the ys."""
        return grouped(LoopOutputs, leaves, self.num_carry)

    def results(self, leaves: Sequence[Any]) -> "Outcome":
        """By name what stands for each result."""
        out = grouped(Outcome, leaves, 1, self.num_carry, len(self.output_avals.ys), sum(self.saved_mask))
        return out._replace(num_steps=out.num_steps[0])

    def results_from(self, num_steps: Any, outputs: LoopOutputs, checkpoint_rows: Any) -> "Outcome":
        """By name, from the outputs of the body: what is so of a leaf of the carry is so of its saved ones."""
        carry, ys = map(list, outputs)
        return Outcome(num_steps, carry, ys, self.saved_of(carry), [checkpoint_rows] if self.saving else [])

    @property
    def input_avals(self) -> LoopInputs:
        """The types of consts, carry and rows of xs."""
        return self.inputs(self.body.in_avals[1:])

    @property
    def output_avals(self) -> LoopOutputs:
        """The types of carry and rows of ys."""
        return self.outputs(self.body.out_avals)

    @property
    def names(self) -> Names:
        """The names of consts, carry, xs and ys."""
        consts, carry, xs = self.input_avals
        names = self.debug_info.names if self.debug_info else Names((), (), (), ())
        return names.fit([len(consts), len(carry), len(xs), len(self.output_avals[1])])

    @property
    def saved_mask(self) -> Mask:
        """`saved`, spelled out also where nothing is."""
        return self.saved or (False,) * self.num_carry

    def saved_of(self, carry: Iterable[Any]) -> list[Any]:
        """Of what stands for each leaf of the carry, that for the leaves that the loop saves."""
        return select(self.saved_mask, carry)

    @property
    def saved_rows(self) -> int:
        """The most carries that are saved."""
        return self.saving.rows(self.bound) if self.saving else 0


_TRAVERSAL = ("bound", "reverse", "unroll", "lanes", "may_discard")


def traversal(static: Any) -> dict[str, Any]:
    """The fields that loops, sweeps and their linear parts share: how rows are walked."""
    return {field: getattr(static, field) for field in _TRAVERSAL}


def asked_as(loop: Loop) -> dict[str, Any]:
    """The fields from which a kind makes its plan, for another loop that is to store what this one would."""
    return {field: getattr(loop, field) for field in ("kind", "is_fixed", "bound_is_loose", "share")}


class Outcome(NamedTuple):
    """The results of a loop, as flat lists of arrays.

    Attributes
    ----------
    num_steps : int32[]
        The steps that the loop took.
    carry
        The last carry.
    ys
        The rows of outputs.
    saved, checkpoint_rows
        The carries that the loop saved for its gradient, and their rows.

    """

    num_steps: Any
    carry: list[Any]
    ys: list[Any]
    saved: list[Any]
    checkpoint_rows: list[Any]

    @property
    def leaves(self) -> list[Any]:
        """All results as one flat list, in the order of the primitive's outputs."""
        return [self.num_steps, *self.carry, *self.ys, *self.saved, *self.checkpoint_rows]


loop_p = new_primitive("loop")


def run(loop: Loop, low: Any, high: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Outcome:
    """Bind the primitive, with the loop as it is best bound (`BoundLoop`)."""
    know_sparse()
    inputs = LoopInputs(consts, carry, xs)
    bound = BoundLoop.of(loop, low, high, inputs)
    operands = flatten(bound.inputs(inputs))
    return bound.outcome(bound.loop.results(loop_p.bind(low, high, *operands, **bound.loop._asdict())), carry)


class BoundLoop(NamedTuple):
    """A loop as it is bound.

    Leaves of the carry that the body returns unchanged are constants. Where devices take different numbers of steps,
    the loop is one in which they do not communicate. Where they take the same, what they share is marked before it.
    """

    loop: Loop
    fixed: Mask  # which leaves of the carry have become constants
    marked: LoopInputs  # which operands are marked as varying
    axes: Axes  # over which

    @classmethod
    def of(cls, loop: Loop, low: Any, high: Any, inputs: LoopInputs) -> "BoundLoop":
        """For these operands."""
        fixed = unchanged(loop)
        slim = _hoisted(loop, fixed) if any(fixed) else loop
        groups = _with_fixed_as_consts(inputs, fixed)
        if axes := _differing(slim, low, high, flatten(groups)):
            return cls(_localized(slim, axes) or slim, fixed, map_leaves(lambda _: True, groups), axes)
        found = None if slim.inverse else marked_before(slim.body, slim.carry_range)
        body, marked, axes = found or (slim.body, [False] * len(slim.body.in_avals[1:]), frozenset())
        return cls(slim._replace(body=body) if found else slim, fixed, slim.inputs(marked), axes)

    def inputs(self, inputs: LoopInputs) -> LoopInputs:
        """Its operands from those of the loop."""
        groups = _with_fixed_as_consts(inputs, self.fixed)
        if not self.axes:
            return groups
        mark = lambda x, is_marked: varying([x], self.axes)[0] if is_marked else x  # noqa: E731
        return LoopInputs(*(list(map(mark, *pair)) for pair in zip(groups, self.marked, strict=True)))

    def masks(self, masks: LoopInputs) -> LoopInputs:
        """A flag for each of its operands, from a flag for each of those of the loop."""
        return map_leaves(bool, _with_fixed_as_consts(masks, self.fixed))

    def outcome(self, out: "Outcome", carry: Sequence[Any]) -> "Outcome":
        """The results of the loop from its own, and from the carry that the loop starts with."""
        return out._replace(carry=merge_lists(self.fixed, out.carry, select(self.fixed, carry)))


def _differing(loop: Loop, low: Any, high: Any, operands: Sequence[Any]) -> Axes:
    """The mesh axes along which devices take different numbers of steps; of operands or their types."""
    return differing([low, high, *([operands[loop.num_consts]] if loop.predicated else [])])


@weakly_cached
def _localized(loop: Loop, axes: Axes) -> Loop | None:
    """The loop for such devices; None: it is one."""
    body = localized(loop.body, axes)
    inverse = loop.inverse and (localized(loop.inverse, axes) or loop.inverse)
    return body and loop._replace(body=body, inverse=inverse)


@weakly_cached
def unchanged(loop: Loop) -> Mask:
    """Which leaves of the carry the body returns as they came."""
    inputs = [loop.body.invars[i] for i in loop.carry_range]
    outputs = [forwarded_from(loop.body, variable) for variable in loop.body.outvars[: loop.num_carry]]
    same = [a is b and not saved for a, b, saved in zip(inputs, outputs, loop.saved_mask, strict=True)]
    if loop.predicated:
        same[0] = False
    for i in loop.always_carried:
        same[i] = False
    return tuple(same)


@weakly_cached
def _hoisted(loop: Loop, fixed: Mask) -> Loop:
    """The loop with the fixed leaves among its constants (behind the others)."""

    def hoisted_body(body: ClosedJaxpr) -> ClosedJaxpr:
        row, *inputs = body.invars
        outputs = loop.outputs(body.outvars)
        operands = flatten(_with_fixed_as_consts(loop.inputs(inputs), fixed))
        return replace_jaxpr(body, [row, *operands], flatten(outputs._replace(carry=reject(fixed, outputs.carry))))

    names = loop.names
    consts, carry, xs = _with_fixed_as_consts(LoopInputs(names.consts, names.carry, names.xs), fixed)
    hoisted = Names(tuple(consts), tuple(carry), tuple(xs), names.ys)
    return loop._replace(
        body=hoisted_body(loop.body),
        inverse=loop.inverse and hoisted_body(loop.inverse),
        debug_info=loop.debug_info and loop.debug_info.renamed(hoisted),
        num_consts=loop.num_consts + sum(fixed),
        **loop.kept(invert(fixed)),
    )


def _with_fixed_as_consts(inputs: LoopInputs, fixed: Mask) -> LoopInputs:
    """The inputs with the fixed leaves of the carry behind the constants."""
    return LoopInputs([*inputs.consts, *select(fixed, inputs.carry)], reject(fixed, inputs.carry), inputs.xs)


def result_avals(loop: Loop, axes: Axes = frozenset()) -> Outcome:
    """The types of the results. The number of steps and `checkpoint_rows` may vary over the axes of a `shard_map`."""
    index = with_varying_axes(core.ShapedArray(INDEX.shape, INDEX.dtype), axes)
    num_rows = loop.saving.num_checkpoint_rows() if loop.saving else 0
    types = loop.results_from(index, loop.output_avals, stacked(index, num_rows))
    return types._replace(
        ys=[stacked(aval, loop.bound or 0) for aval in types.ys],
        saved=[stacked(aval, loop.saved_rows) for aval in types.saved],
    )


def loop_abstract_eval(low: Any, high: Any, *operands: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results, and the effects of the body. Operands are `low, high, *consts, *carry, *xs`.

    Results are `num_steps, *carry, *ys, *saved, checkpoint_rows`: the carry typed as the body returns it, ys with
    `bound` rows, saved with a row for each checkpoint.
    """
    loop = Loop(**params)
    return result_avals(loop, _differing(loop, low, high, operands)).leaves, loop.body.effects


def loop_dependence(eqn: Any, of_program: Dependence) -> list[int]:
    """Which operands each result depends on: exact, so that the primal part of an inner loop stays known.

    All results depend on low and high, and on the predicate where there is one: these decide on the number of steps.
    """
    loop = Loop(**eqn.params)
    low, high, *leaves = (1 << i for i in range(len(eqn.invars)))
    inputs, needed = loop.inputs(leaves), loop.outputs(of_program(loop.body))
    carry = close_over_carry(needed.carry, loop.carry_range, [0, *leaves])
    ends = [0, *flatten(inputs._replace(carry=carry))]
    everywhere = low | high | (carry[0] if loop.predicated else 0)
    ys = [union(ends, bits) for bits in needed.ys]
    return [everywhere | bits for bits in loop.results_from(0, LoopOutputs(carry, ys), 0).leaves]


def deciding_operands(loop: Loop) -> list[int]:
    """Which of `low, high, *consts, *carry, *xs` decide how many steps are taken; behind the first two, the predicate.

    In a batch, lanes may take different steps if they have one of these of their own.
    """
    if not loop.predicated:
        return [0, 1]
    needed, first = dependence(loop.body), loop.carry_range.start
    found, new = set[int](), {first}  # inputs of the body
    while new:
        found |= new
        bits = [needed[i - first] for i in new if i in loop.carry_range]
        new = {i for i in range(1, len(loop.body.in_avals)) if any(of >> i & 1 for of in bits)} - found
    return [0, 1, first + 1, *(i + 1 for i in sorted(found - {first}))]


def loop_mixed_operands(eqn: Any) -> list[bool]:
    """Which operands flow into what mixes lanes in the body."""
    loop = Loop(**eqn.params)
    deciding = [loop.predicated and i == 0 for i in range(loop.num_carry)]
    mixed = mixed_inputs_of_steps(loop.body, loop.carry_range, deciding=deciding)
    decides = any(mixed[i] for i in loop.carry_range)
    return [decides, decides, *mixed[1:]]


def loop_expected(*avals: Any, **params: Any) -> Expected:
    """The types of `low, high, *consts, *carry, *xs` that the body takes.

    The body's carry must fit itself: a loop is a fixed point of types.
    """
    loop = Loop(**params)
    low, high, *leaves = avals
    given, expected = loop.inputs(leaves), loop.input_avals
    yield from numbers_expected("low and high", [low, high])
    yield "consts", expected.consts, given.consts
    yield "carry", expected.carry, given.carry
    yield "carry that the body returns", expected.carry, loop.output_avals.carry
    yield from rows_expected("xs", expected.xs, given.xs, loop.bound)


def checkpoints_expected(
    expected: Sequence[Any], given: Sequence[Any], numbers: Any, saving: Saving, bound: int | None
) -> Expected:
    """The types of the states that were saved, and of the numbers of their rows."""
    yield from rows_expected("saved", expected, given, saving.rows(bound))
    yield from numbers_expected("checkpoint_rows", [numbers], (saving.num_checkpoint_rows(),))


def carried_by_loop(eqn: Any) -> Iterator[Carried]:
    """The leaves that a loop carries and does not save."""
    loop = Loop(**eqn.params)
    for k, (i, is_saved) in enumerate(zip(loop.carry_range, loop.saved_mask, strict=True)):
        if not is_saved:
            yield Carried(1 + i, 1 + k, loop.body, i, k)


# The inverse of a step: a body that walks back, (row, *consts, *carry after the step, *x) -> carry before it.
#
# A kind may bring one (`Kind.inverse`). The inverse has the inputs of the body, and each rule rewrites both. A rule
# marks the leaves of the carry that have tangents, have lanes, or are unknown. If the body or the inverse needs the
# mark of a leaf, the leaf has it. So a part of a loop holds all that its inverse reads.
#
# The inverse of a loop that is not yet bound may have more inputs: a row of a tape (`core/buffer_versions.py`).


def num_recorded(body: ClosedJaxpr, inverse: ClosedJaxpr | None) -> int:
    """Of how many arrays a row of the tape is, which the body returns as its last ys; 0 where there is no tape."""
    return 0 if inverse is None else len(inverse.in_avals) - len(body.in_avals)


def needed_by_inverse(inverse: ClosedJaxpr, carry: Sequence[bool]) -> list[bool]:
    """Which inputs behind the row it takes to walk these leaves of the carry back."""
    return dce(inverse, carry, False)[1][1:]


def may_have_tape(inverse: ClosedJaxpr | None, **_: Any) -> bool:
    """Whether a tape may be in the carry, which nobody reads where no derivative is taken."""
    return inverse is not None


def part_of_inverse(inverse: ClosedJaxpr | None, inputs: Sequence[bool], carry: Sequence[bool]) -> ClosedJaxpr | None:
    """The inverse for these leaves of the carry alone. It has these inputs behind the row, and needs no others."""
    if inverse is None:
        return None
    keep = [True, *inputs]
    part, used = dce(inverse, carry, keep)
    assert used == keep
    return part
