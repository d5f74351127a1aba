"""A batch of lanes as one operation, until it is compiled or differentiated.

It stands for a program that runs the lanes in stages. A second `jax.vmap` does not map that program: its lanes and
those of the first are one batch of lanes, for which the program is written anew. Derivatives are those of the program,
but for the loops of `core/batching/compact_autodiff.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.batching.groups import in_groups
from loopax._src.core.batching.lockstep import hull, lockstep_sweep
from loopax._src.core.ir.annotations import strip_progress
from loopax._src.core.ir.lane_choice import OneStage
from loopax._src.core.ir.lanes import Compact
from loopax._src.core.ir.reverse_sweep import ReverseSweep, checkpoint_and_sweep
from loopax._src.core.jaxpr.types import (
    Axis,
    Expected,
    axes_of,
    is_batched,
    refuse_gathering,
)
from loopax._src.core.jaxpr.util import (
    Mask,
    either,
    flatten,
    num_bytes,
    of_selected,
    refuse_collectives,
    select,
    trace,
    unflatten,
    weakly_cached,
)
from loopax._src.jax_internals import ClosedJaxpr, ad, jaxpr_as_fun

# Operands that only one of two vmaps maps are repeated for the lanes of the other one, if that is no more than this
# many bytes, or than what the lanes have already.
REPEATED_BYTES = 64 * 1024
SHRINK_OF_PROGRAMS = 3.0  # of each stage, where a program is mapped as it is


# The primitive has three roles, one for each kind of rule:
# - the program, which is compiled, differentiated and asked for effects, as any function is;
# - the static thing that there is a batch of (a loop, a sweep), from which derivatives and dead-code elimination make
#   another one, and a batch of that;
# - the table of rules for such a thing, which writes the program anew for another number of lanes.


class BatchRules(NamedTuple):
    """How a batch of something runs: of loops, `LOOPS` (`core/batching/compact_stages.py`), and of sweeps, `SWEEPS`."""

    run: Callable[..., list[Any]]  # (static, axis, mapped, operands) -> results
    operand_axes: Callable[[Any], list[int]]  # where each operand has its axis of lanes, if it has one
    result_axes: Callable[[Any], list[int]]  # where each result has it
    steps_differ: Callable[[Any, Mask], bool]  # whether mapping these operands makes numbers of steps differ


class CompactVmap(NamedTuple):
    """The parameters of the primitive."""

    program: ClosedJaxpr  # operands -> results
    rules: BatchRules
    static: Any  # what there is a batch of
    axis: Axis
    mapped: Mask  # which operands have an axis of lanes


compact_vmap_p = jaxi.new_primitive("compact_vmap")


@weakly_cached
def _program(static: Any, rules: BatchRules, axis: Axis, mapped: Mask, avals: tuple[Any, ...]) -> ClosedJaxpr:
    return trace(lambda *operands: rules.run(static, axis, mapped, operands), avals)


def compact_vmap_of(rules: BatchRules, static: Any, axis: Axis, mapped: Mask, avals: Sequence[Any]) -> CompactVmap:
    """The batch for operands of these types; every one that is mapped has its lanes where the rules say."""
    return CompactVmap(_program(static, rules, axis, mapped, tuple(avals)), rules, static, axis, mapped)


def compact_vmap(rules: BatchRules, static: Any, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Bind the primitive."""
    return compact_vmap_p.bind(
        *operands, **compact_vmap_of(rules, static, axis, mapped, list(map(jax.typeof, operands)))._asdict()
    )


def evaluate_batch(*operands: Any, **params: Any) -> list[Any]:
    """The meaning of the primitive as a function of JAX: its program."""
    return jaxpr_as_fun(CompactVmap(**params).program)(*operands)


def join_batches(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Join two batches into one flat batch, or map the first one as it is.

    Operands are those of the loop or sweep; `mapped` says which have an axis of lanes, `rules.operand_axes` at which
    position; `dims` says where each has its new axis of lanes. Lanes do not depend on each other, so a batch of n
    batches of m lanes is a batch of n m lanes. Results are reshaped to (n, m), new lanes first.

    The first batch is mapped as it is if all new lanes take the same steps, if too much would be copied, or if it
    recomputes steps, which have lost their effects (`_joins`).
    """
    inner, outer = CompactVmap(**params), Axis.of(axis_data)
    refuse_collectives(inner.program, outer.name)
    mapped, sizes = is_batched(dims), (outer.size, inner.axis.size)
    is_spread = outer.mesh_axis is not None or not isinstance(outer.size, int)
    if (is_spread and isinstance(inner.static.lanes, OneStage)) or not _joins(inner, mapped, sizes, operands):
        # What does not depend on the new lanes stays as it is. Derivatives are those of the mapped program.
        program = program_with_derivatives(inner)
        out_axes = axes_of(jaxi.batched_outputs(program, axis_data, mapped))
        in_axes = [None if d is None else int(d) for d in dims]
        function = jax.vmap(jaxpr_as_fun(program), in_axes, out_axes, **jaxi.axis_arguments(axis_data))
        return function(*operands), out_axes
    refuse_gathering(outer)
    flat = []
    for x, at, has_lanes, dim in zip(operands, inner.rules.operand_axes(inner.static), inner.mapped, dims, strict=True):
        if dim is not None or has_lanes:
            # Before: new lanes at `dim`, and lanes at `at` without them; one of them may be missing
            # After: [..., new lanes x lanes, ...] at `at`
            x = jnp.expand_dims(x, at) if dim is None else jnp.moveaxis(x, int(dim), at)
            x = x if has_lanes else jnp.expand_dims(x, at + 1)
            x = jnp.broadcast_to(x, (*x.shape[:at], *sizes, *x.shape[at + 2 :]))
            x = x.reshape(*x.shape[:at], prod(sizes), *x.shape[at + 2 :])
        flat.append(x)
    names = (outer.spmd_name, inner.axis.spmd_name)
    spmd_names = tuple(name for each in names if each for name in (each if isinstance(each, tuple) else (each,)))
    joint = Axis(prod(sizes), None, spmd_names or None)
    results = compact_vmap(inner.rules, inner.static, joint, either(inner.mapped, mapped), flat)
    result_axes = inner.rules.result_axes(inner.static)
    # Before: [..., new lanes x lanes, ...] -> After: [..., new lanes, lanes, ...]
    pairs = zip(results, result_axes, strict=True)
    return [y.reshape(*y.shape[:at], *sizes, *y.shape[at + 1 :]) for y, at in pairs], result_axes


def program_with_derivatives(inner: CompactVmap) -> ClosedJaxpr:
    """The program of a batch that has a reverse mode itself. A stage that is refilled has none: it has no bound."""
    static = inner.static
    is_bounded = static.lanes.shrink is not None or isinstance(static.lanes, OneStage)
    if is_bounded or not getattr(static, "predicated", False):
        return inner.program
    static = static._replace(lanes=replace(static.lanes, shrink=SHRINK_OF_PROGRAMS))
    return _program(static, inner.rules, inner.axis, inner.mapped, tuple(inner.program.in_avals))


def _joins(inner: CompactVmap, newly_mapped: Mask, sizes: tuple[int, int], operands: Sequence[Any]) -> bool:
    """Whether one batch of all lanes is written, or the first one is mapped."""
    if not inner.rules.steps_differ(inner.static, newly_mapped):
        return False
    bodies = [part for part in inner.static if isinstance(part, ClosedJaxpr)]
    if not inner.program.effects and any(body.effects for body in bodies):
        return False  # steps that are recomputed, from which effects have been removed
    repeated = own = 0
    for x, has_lanes, has_new in zip(operands, inner.mapped, newly_mapped, strict=True):
        size = num_bytes([jax.typeof(x)])
        own += size if has_lanes or has_new else 0
        if has_lanes != has_new:
            repeated += size * ((sizes[0] if has_lanes else sizes[1]) - 1)
    return repeated <= max(own, REPEATED_BYTES)


def compact_vmap_transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """The transpose of the program, in the operands in which it is linear.

    Operands are those of the program; undefined primals are linear and get cotangents, the others are values and get
    None. Results without a cotangent may be no linear functions (primals, in the rule of a `jax.custom_jvp`), so only
    the others are transposed. Progress is not shown a second time.
    """
    program = jaxpr_as_fun(strip_progress(CompactVmap(**params).program))
    is_linear = [ad.is_undefined_primal(x) for x in operands]

    def results_with_cts(*inputs: Any) -> list[Any]:
        return [y for y, ct in zip(program(*inputs), cts, strict=True) if not isinstance(ct, ad.Zero)]

    of_linear = of_selected(results_with_cts, is_linear, operands)
    transposed = jaxi.linear_transpose(of_linear, *(x.aval for x in operands if ad.is_undefined_primal(x)))
    found = iter(transposed([ct for ct in cts if not isinstance(ct, ad.Zero)]))
    return [next(found) if linear else None for linear in is_linear]


def compact_vmap_abstract_eval(*_: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the program's results, and its effects."""
    program = CompactVmap(**params).program
    return program.out_avals, program.effects


def compact_vmap_expected(*avals: Any, **params: Any) -> Expected:
    """The types that the program takes."""
    inner = CompactVmap(**params)
    yield "operands", inner.program.in_avals[: len(inner.mapped)], avals


# A batch of reverse sweeps that does not wait for the lane with the most rows.
#
# The limits of all lanes are known, for their loops have run, so lanes are sorted into groups of similar lengths.
# What their loops saved does not fit these groups: lanes that leave a batch early are in another place there. So each
# group walks forward again, saving.


def _run(sweep: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are `low, high, *consts, *init, *carry, *xs`."""
    assert isinstance(sweep.lanes, Compact)
    has_limits, has_lanes = mapped[:2], unflatten(sweep.backward_avals, mapped[2:])

    def run_group(lanes: int, operands: Sequence[Any]) -> list[Any]:
        low, high, *leaves = operands
        own, inputs = select(has_limits, (low, high)), unflatten(sweep.backward_avals, leaves)
        of_group, own_avals = axis.resized(lanes, similar=lanes < axis.size), tuple(map(jax.typeof, own))
        lockstep = lockstep_sweep(sweep, of_group, tuple(has_lanes.consts), tuple(has_lanes.xs), has_limits, own_avals)
        inputs = inputs._replace(consts=[*own, *inputs.consts])
        return flatten(checkpoint_and_sweep(lockstep, *hull(low, high), inputs))

    axes = [at if has_lanes else None for at, has_lanes in zip(SWEEPS.operand_axes(sweep), mapped, strict=True)]
    low, high = operands[:2]
    num_steps = jnp.broadcast_to(high - low, (axis.size,))
    return in_groups(run_group, sweep.lanes, num_steps, operands, axes, SWEEPS.result_axes(sweep))


SWEEPS = BatchRules(
    run=_run,
    operand_axes=lambda sweep: [0] * (1 + sweep.xs_range.start) + [1] * len(sweep.xs_range),
    result_axes=lambda sweep: [0] * sweep.num_carry + [1] * len(sweep.y_avals),
    steps_differ=lambda _, mapped: any(mapped[:2]),
)
