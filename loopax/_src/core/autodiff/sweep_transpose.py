"""Reverse mode through a reverse sweep: second derivatives by reverse over reverse.

A sweep is evaluated partially as a loop is: there is a known sweep, and its linear part. With states s (walked
forward), carry l (walked backward) and their tangents ds and dl, the linear part computes::

    forward:   ds' = F(s) ds            backward:   dl = G(s) dl' + H(s, l') ds

Its transpose has cotangents p of dl (walked forward) and m of ds (walked backward)::

    forward:   p' = G(s)^T p            backward:   m = F(s)^T m' + H(s, l')^T p

This is a loop on (s, p) that saves, and then a reverse sweep with the states (s, p) and the carry (l, m). G may depend
on l as well: in a `custom_vjp` whose backward function is not linear, say, which clips gradients. Only then are the
values of l stored for every step.
"""

from collections.abc import Mapping, Sequence
from operator import not_
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from loopax._src import jax_internals as jaxi
from loopax._src.core.autodiff.transpose import (
    consts_in_part,
    cotangents_of_linear,
    of_a_step,
    starts_of_sums,
    type_of_linear,
)
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.lanes import Lanes, Lockstep
from loopax._src.core.ir.loop import LoopOutputs, part_of_inverse, run, traversal
from loopax._src.core.ir.plan import Blocks, Plan, Saving, with_known_length
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    SweepInputs,
    SweepOutputs,
    checkpoint_and_sweep,
    checkpointing_loop,
    run_sweep,
    step_expected,
)
from loopax._src.core.jaxpr.dependence import dependence, step_limits, to_bits
from loopax._src.core.jaxpr.evaluate import batch_expanded, jvp_expanded
from loopax._src.core.jaxpr.types import Expected, batch_if_mapped
from loopax._src.core.jaxpr.util import (
    Mask,
    flatten,
    map_leaves,
    merge_each,
    num_bytes,
    reject_each,
    select,
    select_each,
    split_list,
    stacked,
    trace,
    unflatten,
    weakly_cached,
    written_out,
)
from loopax._src.core.masking import filled_always
from loopax._src.jax_internals import ClosedJaxpr, ad, jaxpr_as_fun


class LinearSweep(NamedTuple):
    """The static description of the linear part of a reverse sweep."""

    step: ClosedJaxpr  # (row, *consts, *carry, *state, *x) -> (*carry, *state, *y), ys all linear
    linear_consts: Mask
    linear_state: Mask
    linear_carry: Mask
    linear_xs: Mask
    num_forward_xs: int
    bound: int | None
    saving: Saving
    reverse: bool
    unroll: int
    plan: Plan
    lanes: Lanes = Lockstep()  # as in `Loop`
    inverse: ClosedJaxpr | None = None  # of the whole sweep, as in `ReverseSweep`
    may_discard: bool = False  # as in `Loop`

    @property
    def masks(self) -> SweepInputs:
        """Which consts, states, leaves of the carry and xs are linear."""
        return SweepInputs(self.linear_consts, self.linear_state, self.linear_carry, self.linear_xs)

    @property
    def whole(self) -> ReverseSweep:
        """The whole sweep, known part included."""
        return ReverseSweep(
            self.step,
            num_consts=len(self.linear_consts),
            num_state=len(self.linear_state),
            num_carry=len(self.linear_carry),
            num_forward_xs=self.num_forward_xs,
            plan=self.plan,
            saving=self.saving,
            inverse=self.inverse,
            **traversal(self),
        )

    @property
    def output_avals(self) -> LoopOutputs:
        """The types of the linear carry and of rows of ys, which are all linear."""
        carry, _, ys = self.whole.step_outputs(self.step.out_avals)
        return LoopOutputs(select(self.linear_carry, carry), ys)

    @property
    def known(self) -> "LinearSweep":
        """The known part: the same step without what is linear."""
        keep = map_leaves(not_, self.masks)
        outputs = [*keep.carry, *keep.state, *(False for _ in self.output_avals.ys)]
        step = jaxi.dce(self.step, outputs, [True, *self.whole.backward_inputs(keep)])[0]
        consts, state, carry, xs = ((False,) * sum(mask) for mask in keep)
        return self._replace(
            step=step,
            linear_consts=consts,
            linear_state=state,
            linear_carry=carry,
            linear_xs=xs,
            num_forward_xs=sum(keep.xs[: self.num_forward_xs]),
            inverse=part_of_inverse(self.inverse, self.whole.forward_inputs(keep), keep.state),
        )


class LinearSweepOperands(NamedTuple):
    """The operands of a linear sweep by name; those of states are their start."""

    low: Any
    high: Any
    known: SweepInputs
    linear: SweepInputs

    @classmethod
    def of(cls, sweep: LinearSweep, operands: Sequence[Any]) -> "LinearSweepOperands":
        """From the flat list."""
        low, high, *rest = operands
        sizes = [mask.count(False) for mask in sweep.masks] + [sum(mask) for mask in sweep.masks]
        *groups, _ = split_list(rest, sizes)
        return cls(low, high, SweepInputs(*groups[:4]), SweepInputs(*groups[4:]))

    @property
    def leaves(self) -> list[Any]:
        """The flat list."""
        return [self.low, self.high, *flatten(self.known), *flatten(self.linear)]


linear_sweep_p = jaxi.new_primitive("linear_sweep")


def _whole(*flat: Any, **params: Any) -> list[Any]:
    """The whole sweep, known part included; returns what is linear of its results."""
    sweep = LinearSweep(**params)
    given = LinearSweepOperands.of(sweep, flat)
    inputs = merge_each(sweep.masks, given.known, given.linear)
    carry, rows = checkpoint_and_sweep(sweep.whole, given.low, given.high, inputs)
    return [*select(sweep.linear_carry, carry), *rows]


def _abstract(*_: Any, **params: Any) -> list[Any]:
    """The types of the linear carry and of the ys."""
    sweep = LinearSweep(**params)
    carry, ys = sweep.output_avals
    return [*carry, *(stacked(aval, sweep.bound or 0) for aval in ys)]


def _expected(*avals: Any, **params: Any) -> Expected:
    """The types that the whole sweep takes."""
    sweep = LinearSweep(**params)
    given = LinearSweepOperands.of(sweep, avals)
    yield "operands", given.leaves, avals
    yield from step_expected(sweep.whole, [given.low, given.high], merge_each(sweep.masks, given.known, given.linear))


class _SweepStepInputs(NamedTuple):
    """What stands for each input of a transposed step behind the row. It reads the known ones."""

    consts: Sequence[Any]
    state: Sequence[Any]
    carry: Sequence[Any]
    xs: Sequence[Any]
    ct_state: Sequence[Any]
    ct_carry: Sequence[Any]
    ct_ys: Sequence[Any]

    @property
    def known(self) -> SweepInputs:
        """Of both bodies."""
        return SweepInputs(self.consts, self.state, self.carry, self.xs)


def _step_avals(sweep: LinearSweep, nonzero_ys: Mask) -> _SweepStepInputs:
    """The types of the inputs of a transposed step."""
    known, linear = (each(sweep.masks, sweep.whole.backward_avals) for each in (reject_each, select_each))
    return _SweepStepInputs(*known, linear.state, linear.carry, select(nonzero_ys, sweep.output_avals.ys))


@weakly_cached
def _transposed_step(sweep: LinearSweep, nonzero_ys: Mask) -> ClosedJaxpr:
    """One step, transposed.

    (row, *known consts, *states, *carry, *x, *ct states, *ct carry, *ct y)
    -> (*ct consts, *ct states, *ct carry, *ct x).
    """
    function, whole = jaxpr_as_fun(sweep.step), sweep.whole
    avals, linear = (
        _step_avals(sweep, nonzero_ys),
        map_leaves(jaxi.strong, select_each(sweep.masks, sweep.whole.backward_avals)),
    )
    wanted = SweepOutputs(sweep.linear_carry, sweep.linear_state, nonzero_ys)

    def step(row: Any, *operands: Any) -> list[Any]:
        given = unflatten(avals, operands)

        def linear_part(dots: SweepInputs) -> SweepOutputs:
            values = merge_each(sweep.masks, given.known, dots)
            return select_each(wanted, whole.step_outputs(function(row, *whole.backward_inputs(values))))

        cts = SweepOutputs(given.ct_carry, given.ct_state, given.ct_ys)
        (found,) = jaxi.linear_transpose(linear_part, linear)(cts)
        return flatten(found)

    with of_a_step():
        return trace(step, [sweep.step.in_avals[0], *flatten(avals)])


@weakly_cached
def _transposed_carry(sweep: LinearSweep, nonzero_ys: Mask) -> ClosedJaxpr:
    """The part of `_transposed_step` that gives ct carry, transposed by itself: other results are zeros.

    JAX lets the branches of a `cond` share what they hand to the transposed one, by type. So a value that only the
    cotangents of other inputs need can look like one that this part needs, until the other inputs are gone.
    """
    backward, whole = jaxpr_as_fun(sweep.whole.backward), sweep.whole
    avals, linear = _step_avals(sweep, nonzero_ys), select_each(sweep.masks, sweep.whole.backward_avals)

    def step(row: Any, *operands: Any) -> list[Any]:
        given, dots = unflatten(avals, operands), map_leaves(jaxi.zeros, linear)

        def outputs(carry: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            values = merge_each(sweep.masks, given.known, dots._replace(carry=carry))
            new_carry, y = whole.outputs(backward(row, *whole.backward_inputs(values)))
            return select(sweep.linear_carry, new_carry), select(nonzero_ys, y)

        def linear_part(carry: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            return jax.jvp(outputs, (dots.carry,), (carry,))[1]

        (found,) = jaxi.linear_transpose(linear_part, map_leaves(jaxi.strong, linear).carry)(
            (given.ct_carry, given.ct_ys)
        )
        return flatten(dots._replace(carry=found))

    with of_a_step():
        return trace(step, [sweep.step.in_avals[0], *flatten(avals)])


@weakly_cached
def _cotangents_of_carry(sweep: LinearSweep, nonzero_ys: Mask) -> tuple[ClosedJaxpr, bool]:
    """One step of p: (row, *known consts, *states, [*carry], *x, *p, *ct y) -> p, and whether it reads l.

    Effects are those of the step that goes back.
    """
    avals, cts = _step_avals(sweep, nonzero_ys), select_each(sweep.masks, sweep.whole.backward_avals)
    nothing = map_leaves(lambda _: False, avals)
    wanted = flatten(map_leaves(lambda _: False, cts)._replace(carry=[True] * len(cts.carry)))
    of_carry = to_bits([False, *flatten(nothing._replace(carry=[True] * len(avals.carry)))])

    def reads_carry(step: ClosedJaxpr) -> bool:
        return any(bits & of_carry for bits in select(wanted, dependence(step)))

    step = _transposed_step(sweep, nonzero_ys)
    if reads_carry(step):
        step = _transposed_carry(sweep, nonzero_ys)
    reads = reads_carry(step)
    keep = map_leaves(lambda _: True, avals)._replace(carry=[reads] * len(avals.carry), ct_state=nothing.ct_state)
    return jaxi.dce(without_effects(step), wanted, [True, *flatten(keep)])[0], reads


class _PairInputs(NamedTuple):
    """What stands for each input of the step of the transposed sweep behind the row."""

    consts: Sequence[Any]
    carry: Sequence[Any]  # l
    m: Sequence[Any]
    ct_consts: Sequence[Any]
    state: Sequence[Any]
    p: Sequence[Any]
    xs: Sequence[Any]
    ct_ys: Sequence[Any]
    carry_rows: Sequence[Any]  # l as rows, where p depends on it


@weakly_cached
def _pair_step(sweep: LinearSweep, nonzero_ys: Mask) -> ClosedJaxpr:
    """The step of the transposed sweep, with states (s, p) and the carry (l, m, ct consts).

    (row, *known consts, *l, *m, *ct consts, *s, *p, *x, *ct y, [*l as rows])
    -> (*l, *m, *ct consts, *s, *p, *ct x)
    """
    known, linear = sweep.known, select_each(sweep.masks, sweep.whole.backward_avals)
    known_step, transposed = jaxpr_as_fun(known.step), jaxpr_as_fun(_transposed_step(sweep, nonzero_ys))
    of_p, reads_carry = _cotangents_of_carry(sweep, nonzero_ys)
    consts, state, carry, xs, m, p, ct_ys = _step_avals(sweep, nonzero_ys)
    avals = _PairInputs(consts, carry, m, linear.consts, state, p, xs, ct_ys, carry if reads_carry else [])

    def step(row: Any, *operands: Any) -> list[Any]:
        given = unflatten(avals, operands)
        consts, carry, m, ct_consts, state, p, xs, ct_ys, carry_rows = given
        new_p = jaxpr_as_fun(of_p)(row, *consts, *state, *carry_rows, *xs, *p, *ct_ys)
        new = known.whole.step_outputs(known_step(row, *consts, *carry, *state, *xs))
        cts = unflatten(linear, transposed(row, *consts, *state, *carry, *xs, *m, *p, *ct_ys))
        sums = (jaxi.added(old, new) for old, new in zip(ct_consts, cts.consts, strict=True))
        return [*new.carry, *cts.state, *sums, *new.state, *new_p, *cts.xs]

    return filled_always(trace(step, [sweep.step.in_avals[0], *flatten(avals)]))


def transpose_linear_sweep(
    cts: LoopOutputs, sweep: LinearSweep, given: LinearSweepOperands, begun: Sequence[Any] | None = None
) -> SweepInputs:
    """Cotangents of the linear inputs, and of the first linear state, from those of the linear carry and of ys.

    Those of consts begin with `begun`, or with zeros.
    """
    nonzero_ys = tuple(not isinstance(ct, ad.Zero) for ct in cts.ys)
    consts, init, carry, xs = given.known
    rows = [*xs, *select(nonzero_ys, cts.ys)]
    if _cotangents_of_carry(sweep, nonzero_ys)[1]:
        # Before: (...) -> (*carry, *states, *ys). After: the same, and the known carry before the step as more ys.
        if sweep.bound is None:
            raise ValueError(
                "reverse mode is taken twice through a loop that has no bound, and whose body calls a `jax.custom_vjp` "
                "function. Its backward function is not linear in the cotangent (it clips it, say). So the second "
                "derivative needs the cotangents of all steps, and memory for a static number of them. Give "
                "`max_steps=`, or take forward mode of the gradient, which needs no bound: "
                "`jax.jvp(jax.grad(f), ...)`, `jax.jacfwd(jax.grad(f))`."
            )
        known = sweep.known
        inputs, first = known.step.invars, 1 + len(known.linear_consts)
        carried = inputs[first : first + len(known.linear_carry)]
        step = jaxi.replace_jaxpr(known.step, inputs, [*known.step.outvars, *carried])
        rows += checkpoint_and_sweep(known._replace(step=step).whole, given.low, given.high, given.known).ys
    states = [*init, *map(written_out, cts.carry)]

    # An inverse walks s back and not p, so such a sweep saves checkpoints of (s, p).
    saving = sweep.saving
    if sweep.inverse is not None:
        facts = {"bound": sweep.bound, "carry_bytes": num_bytes(map(jax.typeof, states))}
        saving = sweep.plan._saving(**facts, length_known=True, has_inverse=False) or Blocks(1)

    avals = select_each(sweep.masks, sweep.whole.backward_avals)
    start = [*carry, *map(jaxi.zeros, avals.state), *(begun or map(jaxi.zeros, avals.consts))]
    back = sweep.whole._replace(
        step=_pair_step(sweep, nonzero_ys),
        num_consts=len(consts),
        num_state=len(states),
        num_carry=len(start),
        num_forward_xs=len(rows),
        saving=with_known_length(saving),
        inverse=None,
    )
    loop = checkpointing_loop(back)
    out = run(loop, given.low, given.high, consts, states, rows)
    (checkpoint_rows,) = out.checkpoint_rows
    final, ct_xs = run_sweep(back, given.low, given.high, checkpoint_rows, consts, states, out.saved, start, rows)
    _, ct_init, ct_consts = split_list(final, [len(carry), len(avals.state)])
    return SweepInputs(ct_consts, ct_init, out.carry[len(init) :], ct_xs)


def _transpose(
    cts: Sequence[Any], *flat: Any, begun: Mapping[int, Any] = MappingProxyType({}), **params: Any
) -> list[Any]:
    """Transpose the linear part of a sweep: cotangents of its linear inputs from those of its results.

    Operands are `low, high`, then consts, init, carry and xs that are known, then the linear ones in the same order.
    Known ones are values and get None. The linear ones are undefined primals: the rule uses only their types. `cts` are
    the cotangents of the linear carry and of ys (`bound` rows each).

    Linear states are walked forward, so their cotangents m are walked backward; the linear carry is walked backward, so
    its cotangents p are walked forward. A loop on (states, p) runs first and saves, and a sweep with the carry (carry,
    m) follows.
    """
    sweep = LinearSweep(**params)
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(flat)
    given = LinearSweepOperands.of(sweep, flat)
    numbers, avals = LinearSweepOperands.of(sweep, range(len(flat))).linear.consts, given.linear.consts
    starts = starts_of_sums(begun, numbers, list(map(type_of_linear, avals)))
    found = transpose_linear_sweep(unflatten(sweep.output_avals, cts), sweep, given, starts)
    return cotangents_of_linear(flat, given.linear, found)


def _adds_in_place(*operands: Any, **params: Any) -> list[int]:
    sweep = LinearSweep(**params)
    numbers = LinearSweepOperands.of(sweep, range(len(operands))).linear.consts
    return consts_in_part(sweep.step, sweep.linear_consts, numbers)


jaxi.register(
    linear_sweep_p,
    meaning=_whole,
    params=LinearSweep._fields,
    abstract_eval=_abstract,
    expected=_expected,
    jvp=jvp_expanded(_whole),
    transpose=_transpose,
    adds_in_place=_adds_in_place,
    batch=batch_if_mapped(linear_sweep_p, batch_expanded(_whole)),
)
step_limits[linear_sweep_p] = lambda eqn: (LinearSweep(**eqn.params).bound, False)
