"""Reverse mode through a reverse sweep: second derivatives by reverse over reverse.

A sweep is divided as a loop is: a known sweep, and the linear rest. With states s (walked forward),
carry l (walked backward) and their tangents ds and dl, the rest computes::

    forward:   ds' = F(s) ds            backward:   dl = G(s) dl' + H(s, l') ds

Its transpose has cotangents p of dl (walked forward) and m of ds (walked backward)::

    forward:   p' = G(s)^T p            backward:   m = F(s)^T m' + H(s, l')^T p

which is a loop on (s, p) that saves, and then a replay of (s, p) with the carry (l, m). Only where
G depends on l as well (a `custom_vjp` whose backward function is not linear, say, which clips
gradients) are the values of l stored for every step.
"""

from collections.abc import Sequence
from operator import not_
from typing import Any, NamedTuple

import jax

from loopax._src.core.ir.kind import Storage
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import LoopOutputs, run
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    checkpoint_and_sweep,
    checkpointing_loop,
    run_sweep,
)
from loopax._src.core.ir.typecheck import check_count, check_sweep
from loopax._src.core.jaxpr.cost import step_limits
from loopax._src.core.jaxpr.dataflow import dependence, to_bits
from loopax._src.core.jaxpr.expand import batch_expanded, jvp_expanded
from loopax._src.core.jaxpr.groups import flatten, map_leaves, merge_each, reject_each, select_each
from loopax._src.core.jaxpr.util import (
    Mask,
    select,
    split_list,
    stacked,
    trace,
    weakly_cached,
    written_out,
)
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    dce,
    jaxpr_as_fun,
    new_primitive,
    register,
    replace_jaxpr,
    strong,
    zeros,
)
from loopax._src.schedule.saving import Saving


class LinearSweep(NamedTuple):
    """The static description of the linear part of a reverse sweep."""

    forward: ClosedJaxpr  # (row, *consts, *state, *forward x) -> state
    backward: ClosedJaxpr  # (row, *consts, *carry, *state, *x) -> (*carry, *y), ys all linear
    linear_consts: Mask
    linear_state: Mask
    linear_carry: Mask
    linear_xs: Mask
    num_forward_xs: int
    bound: int | None
    saving: Saving
    reverse: bool
    unroll: int
    storage: Storage
    stages: Stages | None = None  # as in `Loop`

    @property
    def masks(self) -> SweepInputs:
        """Which consts, states, leaves of the carry and xs are linear."""
        return SweepInputs(self.linear_consts, self.linear_state, self.linear_carry, self.linear_xs)

    @property
    def avals(self) -> SweepInputs:
        """The types of consts, states, carry and rows of xs."""
        return self.whole.of_backward(self.backward.in_avals[1:])

    @property
    def y_avals(self) -> list[Any]:
        """The types of rows of ys."""
        return self.backward.out_avals[len(self.linear_carry) :]

    @property
    def whole(self) -> ReverseSweep:
        """The whole sweep, known part included."""
        return ReverseSweep(
            self.forward,
            self.backward,
            num_consts=len(self.linear_consts),
            num_state=len(self.linear_state),
            num_carry=len(self.linear_carry),
            num_forward_xs=self.num_forward_xs,
            bound=self.bound,
            saving=self.saving,
            reverse=self.reverse,
            unroll=self.unroll,
            storage=self.storage,
            stages=self.stages,
        )

    @property
    def known(self) -> "LinearSweep":
        """The known part: the same bodies without what is linear."""
        keep, whole = map_leaves(not_, self.masks), self.whole
        forward = dce(self.forward, keep.state, [True, *whole.forward_inputs(keep)])[0]
        outputs = [*keep.carry, *(False for _ in self.y_avals)]
        backward = dce(self.backward, outputs, [True, *whole.backward_inputs(keep)])[0]
        consts, state, carry, xs = ((False,) * sum(mask) for mask in keep)
        return self._replace(
            forward=forward,
            backward=backward,
            linear_consts=consts,
            linear_state=state,
            linear_carry=carry,
            linear_xs=xs,
            num_forward_xs=sum(keep.xs[: self.num_forward_xs]),
        )


class LinearSweepOperands(NamedTuple):
    """The operands of a linear sweep by name; those of states are their start."""

    low: Any
    high: Any
    known: SweepInputs
    linear: SweepInputs

    @classmethod
    def of(cls, static: LinearSweep, operands: Sequence[Any]) -> "LinearSweepOperands":
        """From the flat list."""
        low, high, *rest = operands
        sizes = [mask.count(False) for mask in static.masks] + [sum(mask) for mask in static.masks]
        *groups, _ = split_list(rest, sizes)
        return cls(low, high, SweepInputs(*groups[:4]), SweepInputs(*groups[4:]))

    @property
    def leaves(self) -> list[Any]:
        """The flat list."""
        return [self.low, self.high, *flatten(self.known), *flatten(self.linear)]


linear_sweep_p = new_primitive("linear_sweep")


def _whole(*flat: Any, **params: Any) -> list[Any]:
    """The linear sweep as the sweep that it is the rest of."""
    static = LinearSweep(**params)
    given = LinearSweepOperands.of(static, flat)
    inputs = merge_each(static.masks, given.known, given.linear)
    carry, rows = checkpoint_and_sweep(static.whole, given.low, given.high, inputs)
    return [*select(static.linear_carry, carry), *rows]


def _abstract(*_: Any, **params: Any) -> list[Any]:
    static = LinearSweep(**params)
    ys = [stacked(aval, static.bound or 0) for aval in static.y_avals]
    return [*select(static.linear_carry, static.avals.carry), *ys]


def _typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results, if operands fit the whole sweep."""
    static = LinearSweep(**params)
    check_count("linear_sweep", 2 + sum(map(len, static.masks)), avals)
    given = LinearSweepOperands.of(static, avals)
    inputs = merge_each(static.masks, given.known, given.linear)
    check_sweep("linear_sweep", static.whole, [given.low, given.high], *map(list, inputs))
    return _abstract(*avals, **params), frozenset()


@weakly_cached
def _transposed_step(static: LinearSweep, nonzero_ys: Mask) -> ClosedJaxpr:
    """One step of both bodies, transposed.

    (row, *known consts, *states, *carry, *x, *ct states, *ct carry, *ct y)
    -> (*ct consts, *ct states, *ct carry, *ct x).
    """
    forward, backward, whole = jaxpr_as_fun(static.forward), jaxpr_as_fun(static.backward), static.whole
    known, linear = (each(static.masks, static.avals) for each in (reject_each, select_each))
    inputs = [*known, linear.state, linear.carry, select(nonzero_ys, static.y_avals)]

    def step(row: Any, *operands: Any) -> list[Any]:
        groups = split_list(operands, [len(group) for group in inputs])[:-1]
        given, (ct_state, ct_carry, ct_y) = SweepInputs(*groups[:4]), groups[4:]

        def linear_part(*dots: list[Any]) -> tuple[list[Any], ...]:
            values = merge_each(static.masks, given, SweepInputs(*dots))
            new_state = forward(row, *whole.forward_inputs(values))
            new_carry, y = whole.outputs(backward(row, *whole.backward_inputs(values)))
            return (
                select(static.linear_state, new_state),
                select(static.linear_carry, new_carry),
                select(nonzero_ys, y),
            )

        arguments = [[strong(aval) for aval in group] for group in linear]
        return flatten(jax.linear_transpose(linear_part, *arguments)((ct_state, ct_carry, ct_y)))

    return trace(step, [static.forward.in_avals[0], *flatten(inputs)])


@weakly_cached
def _cotangents_of_carry(static: LinearSweep, nonzero_ys: Mask) -> tuple[ClosedJaxpr, bool]:
    """One step of p: (row, *known consts, *states, [*carry], *x, *p, *ct y) -> p, and whether it reads l."""
    step = _transposed_step(static, nonzero_ys)
    sizes = [sum(mask) for mask in static.masks]
    wanted = [group == 2 for group, size in enumerate(sizes) for _ in range(size)]
    consts, state, carry, xs = (mask.count(False) for mask in static.masks)
    first = 1 + consts + state
    of_carry = to_bits([first <= i < first + carry for i in range(len(step.in_avals))])
    reads_carry = any(bits & of_carry for bits, keep in zip(dependence(step), wanted, strict=True) if keep)
    keep = [True] * (1 + consts + state) + [reads_carry] * carry + [True] * xs
    keep += [False] * sizes[1] + [True] * (len(step.in_avals) - len(keep) - sizes[1])
    return dce(step, wanted, keep)[0], reads_carry


@weakly_cached
def _forward_pair(static: LinearSweep, nonzero_ys: Mask) -> ClosedJaxpr:
    """The loop on (s, p): (row, *known consts, *s, *p, *x, *ct y, [*l]) -> (*s, *p)."""
    known = static.known
    step, reads_carry = _cotangents_of_carry(static, nonzero_ys)
    consts, state, carry, xs = known.avals
    p = select(static.linear_carry, static.avals.carry)
    inputs = [consts, state, p, xs, select(nonzero_ys, static.y_avals), carry if reads_carry else []]

    def body(row: Any, *operands: Any) -> list[Any]:
        consts, state, p, xs, ct_y, carry = split_list(operands, [len(group) for group in inputs])[:-1]
        new_state = jaxpr_as_fun(known.forward)(row, *consts, *state, *xs[: known.num_forward_xs])
        return [*new_state, *jaxpr_as_fun(step)(row, *consts, *state, *carry, *xs, *p, *ct_y)]

    return trace(body, [static.forward.in_avals[0], *flatten(inputs)])


@weakly_cached
def _backward_pair(static: LinearSweep, nonzero_ys: Mask, num_extra_xs: int) -> ClosedJaxpr:
    """The carry (l, m, ct consts) reading (s, p): also returns cotangents of rows of linear xs."""
    known = static.known
    step = jaxpr_as_fun(_transposed_step(static, nonzero_ys))
    consts, state, carry, xs = known.avals
    linear_consts, m, p, _ = select_each(static.masks, static.avals)
    extra = carry if num_extra_xs else []
    ct_y = select(nonzero_ys, static.y_avals)
    inputs = [consts, carry, m, linear_consts, state, p, xs, ct_y, extra]

    def body(row: Any, *operands: Any) -> list[Any]:
        consts, carry, m, ct_consts, state, p, xs, ct_y, _ = split_list(operands, [len(group) for group in inputs])[:-1]
        new_carry = jaxpr_as_fun(known.backward)(row, *consts, *carry, *state, *xs)
        found = step(row, *consts, *state, *carry, *xs, *m, *p, *ct_y)
        more_consts, m, _, ct_xs = split_list(found, [len(linear_consts), len(m), len(p)])
        return [*new_carry, *m, *(a + b for a, b in zip(ct_consts, more_consts, strict=True)), *ct_xs]

    return trace(body, [static.forward.in_avals[0], *flatten(inputs)])


def transpose_linear_sweep(cts: LoopOutputs, static: LinearSweep, given: LinearSweepOperands) -> SweepInputs:
    """Cotangents of the linear inputs (of the states: of their start), from those of the linear carry and of ys."""
    nonzero_ys = tuple(not isinstance(ct, ad.Zero) for ct in cts.ys)
    consts, init, carry, xs = given.known
    extra = _every_carry(static, given) if _cotangents_of_carry(static, nonzero_ys)[1] else []
    rows = [*xs, *select(nonzero_ys, cts.ys), *extra]
    states = [*init, *map(written_out, cts.carry)]

    forward = _forward_pair(static, nonzero_ys)
    loop = checkpointing_loop(static.whole, forward, len(consts), len(states))
    out = run(loop, given.low, given.high, consts, states, rows)

    avals = select_each(static.masks, static.avals)
    start = [*carry, *map(zeros, avals.state), *map(zeros, avals.consts)]
    back = static.whole._replace(
        forward=forward,
        backward=_backward_pair(static, nonzero_ys, len(extra)),
        num_consts=len(consts),
        num_state=len(states),
        num_carry=len(start),
        num_forward_xs=len(rows),
    )
    (checkpoint_rows,) = out.checkpoint_rows
    final, ct_xs = run_sweep(back, given.low, given.high, checkpoint_rows, consts, states, out.saved, start, rows)
    _, ct_init, ct_consts = split_list(final, [len(carry), len(avals.state)])
    return SweepInputs(ct_consts, ct_init, out.carry[len(init) :], ct_xs)


def _every_carry(static: LinearSweep, given: LinearSweepOperands) -> list[Any]:
    """The known carry before every backward step, as rows."""
    known = static.known
    inputs, outputs = known.backward.jaxpr.invars, known.backward.jaxpr.outvars
    first = 1 + len(known.linear_consts)
    body = replace_jaxpr(known.backward, inputs, [*outputs, *inputs[first : first + len(known.linear_carry)]])
    whole = known._replace(backward=body).whole
    return checkpoint_and_sweep(whole, given.low, given.high, given.known)[1]


def _transpose(cts: Sequence[Any], *flat: Any, **params: Any) -> list[Any]:
    """Operands are those of `LinearSweepOperands`; only linear ones have cotangents."""
    static = LinearSweep(**params)
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(flat)
    given = LinearSweepOperands.of(static, flat)
    linear_cts = LoopOutputs(*split_list(cts, [sum(static.linear_carry)]))
    found, operands = flatten(transpose_linear_sweep(linear_cts, static, given)), flatten(given.linear)
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(found, operands, strict=True)]
    return [None] * (len(flat) - len(operands)) + wanted


register(
    linear_sweep_p,
    meaning=_whole,
    params=LinearSweep._fields,
    abstract_eval=_abstract,
    typecheck=_typecheck,
    jvp=jvp_expanded(_whole),
    transpose=_transpose,
    batch=batch_expanded(linear_sweep_p, _whole),
)
step_limits[linear_sweep_p] = lambda eqn: (LinearSweep(**eqn.params).bound, False)
