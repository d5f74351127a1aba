"""Forward mode: the same loop on pairs of primals and tangents, for what has a tangent at all."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import Loop, LoopInputs, LoopOutputs, Outcome, run
from loopax._src.core.jaxpr.dependence import dependence_fixpoint, tangent_dependence
from loopax._src.core.jaxpr.types import nan_if
from loopax._src.core.jaxpr.util import (
    MOST_STEPS,
    append_each,
    fill_each,
    flatten,
    map_leaves,
    of_selected,
    select,
    split_list,
    trace,
    weakly_cached,
)
from loopax._src.core.masking import filled_in_derivatives
from loopax._src.jax_internals import ClosedJaxpr, ad, jaxpr_as_fun


def tangents_or_zeros(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of the marked operands, symbolic zeros written out."""
    pairs = zip(select(mask, primals), select(mask, tangents), strict=True)
    return [t if jaxi.is_nonzero(t) else jaxi.zeros(jax.typeof(p)) for p, t in pairs]


def fill_tangents(mask: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """One tangent per primal: the given ones where marked, symbolic zeros elsewhere."""
    given = iter(tangents)
    return [next(given) if m else ad.Zero(jax.typeof(p).to_tangent_aval()) for m, p in zip(mask, primals, strict=True)]


def jvp_body(body: ClosedJaxpr, perturbed: Sequence[Sequence[bool]], wanted: Sequence[Sequence[bool]]) -> ClosedJaxpr:
    """The body on primals and tangents: its inputs are groups `g1, ġ1, g2, ġ2, ...` behind the row, its outputs too.

    `perturbed` has a group of flags for each group of inputs, and says which of them have a tangent; `wanted` says
    the same of the outputs.
    """
    function, mask = jaxpr_as_fun(filled_in_derivatives(body)), [False, *flatten(perturbed)]
    (row_aval,), *avals, _ = split_list(body.in_avals, [1, *map(len, perturbed)])
    pairs = [group for avals, flags in zip(avals, perturbed, strict=True) for group in (avals, select(flags, avals))]

    def both(row: Any, *operands: Any) -> list[Any]:
        *groups, _ = split_list(operands, list(map(len, pairs)))
        primals, tangents = [row, *flatten(groups[::2])], flatten(groups[1::2])
        of_perturbed = of_selected(function, mask, primals)
        out = jax.jvp(of_perturbed, tuple(select(mask, primals)), tuple(tangents))
        *out_groups, _ = split_list(zip(*out, strict=True), list(map(len, wanted)))
        # Before: pairs of a primal and its tangent -> After: of each group the primals, then the tangents that are kept
        return [
            x
            for group, keep in zip(out_groups, wanted, strict=True)
            for x in (*(primal for primal, _ in group), *(tangent for _, tangent in select(keep, group)))
        ]

    return trace(both, [row_aval, *flatten(pairs)])


def perturbed_outputs(loop: Loop, perturbed: LoopInputs) -> LoopOutputs:
    """Which outputs may have a tangent after any number of steps, if these inputs have one."""
    inputs = (False, *flatten(perturbed))
    flags = dependence_fixpoint(loop.body, inputs, loop.carry_range, loop.inverse, tangent_dependence)
    return LoopOutputs(*map(tuple, loop.outputs(flags)))


@weakly_cached
def jvp_loop(loop: Loop, perturbed: LoopInputs) -> tuple[Loop, LoopInputs, LoopOutputs]:
    """The loop on pairs, and which of its inputs (at the fixed point) and outputs are perturbed.

    Find which carry leaves and ys are perturbed, as a least fixed point. Dependence analysis gives an upper bound;
    tracing the JVP tightens it, since a dependence may have an identically zero derivative.
    """
    bound = perturbed_outputs(loop, perturbed)
    inputs = perturbed._replace(carry=bound.carry)
    pair = _jvp_loop(loop, inputs, bound)
    # Of the inputs of the body on pairs, the tangents are marked, of the carry those that are not zero at the start.
    consts, _, xs = ((*(False for _ in group), *(True for flag in group if flag)) for group in inputs)
    start = (*(False for _ in bound.carry), *select(bound.carry, perturbed.carry))
    flags = pair.outputs(dependence_fixpoint(pair.body, (False, *consts, *start, *xs), pair.carry_range))
    dots = LoopOutputs(flags.carry[loop.num_carry :], flags.ys[len(bound.ys) :])
    exact = map_leaves(bool, fill_each(bound, False, dots))
    if exact != bound:
        inputs = perturbed._replace(carry=exact.carry)
        pair = _jvp_loop(loop, inputs, exact)
    return pair, inputs, exact


def _jvp_loop(loop: Loop, inputs: LoopInputs, outputs: LoopOutputs) -> Loop:
    return loop._replace(
        body=jvp_body(loop.body, inputs, outputs),
        inverse=loop.inverse and jvp_body(loop.inverse, inputs, [inputs.carry]),
        num_consts=loop.num_consts + sum(inputs.consts),
        num_carry=loop.num_carry + sum(inputs.carry),
        saved=loop.saved and (*loop.saved, *select(inputs.carry, loop.saved)),
        debug_info=loop.debug_info and loop.debug_info.renamed(loop.names.with_tangents(*inputs, outputs.ys)),
    )


def nan_if_uncounted(loop: Loop, row: Any, tangent: Any) -> Any:
    """NaN after more steps than can be counted: reverse mode cannot know how many of them to walk back."""
    if loop.bound is not None or not loop.predicated or not jaxi.is_nonzero(tangent):
        return tangent
    return nan_if(row >= MOST_STEPS, tangent)


def refuse_effects(body: ClosedJaxpr) -> None:
    """Raise if the body has an effect that cannot be differentiated."""
    if refused := jaxi.undifferentiable_effects(body):
        names = ", ".join(sorted({type(effect).__name__ for effect in refused}))
        raise NotImplementedError(
            f"a loop is differentiated whose body has effects that a derivative may neither repeat nor drop: {names}. "
            "Ordered effects and `io_callback` are refused, because reverse mode evaluates steps again. "
            "Use `jax.debug.print` or `jax.debug.callback` without `ordered=True`, or `jax.pure_callback`, "
            "or keep the loop out of the differentiated part with `jax.lax.stop_gradient` on all its inputs."
        )


class _Pairs(NamedTuple):
    """The results of a loop on pairs, taken apart: the loop's own results, and the tangents of some of them."""

    results: Outcome
    carry: list[Any]
    ys: list[Any]
    saved: list[Any]


def split_pairs(loop: Loop, perturbed: LoopOutputs, out: Outcome) -> _Pairs:
    """Part the results on pairs; `perturbed` says which outputs have a tangent."""
    mask = loop.results_from(False, perturbed, False)
    (carry, carry_dots), (ys, y_dots), (saved, saved_dots) = (
        (group[: len(flags)], group[len(flags) :]) for group, flags in zip(out[1:4], mask[1:4], strict=True)
    )
    return _Pairs(out._replace(carry=carry, ys=ys, saved=saved), carry_dots, y_dots, saved_dots)


def tangents_of_results(loop: Loop, perturbed: LoopOutputs, low: Any, pairs: _Pairs) -> list[Any]:
    """One tangent for each result of the loop."""
    mask = loop.results_from(False, perturbed, False)
    carry = [nan_if_uncounted(loop, low + pairs.results.num_steps, dot) for dot in pairs.carry]
    return fill_tangents(mask.leaves, pairs.results.leaves, [*carry, *pairs.ys, *pairs.saved])


def jvp_of_results(
    loop: Loop, run: Callable[..., Outcome], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a loop, or of a batch of it, and their tangents; `run` runs the loop on pairs."""
    refuse_effects(loop.body)
    low, high, *operands = primals
    inputs, dots = loop.inputs(operands), loop.inputs(tangents[2:])
    pair, perturbed, outputs = jvp_loop(loop, map_leaves(jaxi.is_nonzero, dots))
    tangent_operands = LoopInputs(*map(tangents_or_zeros, perturbed, inputs, dots))
    pairs = split_pairs(loop, outputs, run(pair, low, high, *append_each(inputs, tangent_operands)))
    return pairs.results.leaves, tangents_of_results(loop, outputs, low, pairs)


def loop_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    """Run the loop on pairs: a leaf that has a tangent in some step is paired with it, the others stay alone.

    Operands are `low, high, *consts, *carry, *xs`: xs have `bound` rows, consts and carry have none. Results are
    `num_steps, *carry, *ys, *saved, checkpoint_rows`: ys have `bound` rows, saved leaves one for each checkpoint.
    `low`, `high`, `num_steps` and `checkpoint_rows` are integers, so they have no tangents.

    The derivative of a composition is the composition of the derivatives. The predicate is a primal, so the loop on
    pairs stops after the same step, and its primals are those of the loop. A loop without a bound gives NaN tangents if
    it takes more steps than can be counted: reverse mode could not walk them back.
    """
    return jvp_of_results(Loop(**params), run, primals, tangents)
