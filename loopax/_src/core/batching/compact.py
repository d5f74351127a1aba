"""A batch of lanes as one operation, until it is compiled or differentiated.

It stands for a program that runs the lanes in stages. A second `jax.vmap` does not map that program: its lanes and
those of the first are one batch of lanes, for which the program is written anew. Derivatives are those of the program,
but for the loops of `core/batching/compact_autodiff.py`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.batching.groups import GroupProgram, in_groups
from loopax._src.core.batching.lockstep import hull, lockstep_sweep, own_limits
from loopax._src.core.effects import guarded
from loopax._src.core.ir.annotations import strip_progress
from loopax._src.core.ir.lanes import Compact
from loopax._src.core.ir.reverse_sweep import ReverseSweep, SweepInputs, checkpoint_and_sweep
from loopax._src.core.jaxpr.dependence import dependence
from loopax._src.core.jaxpr.evaluate import jvp_expanded, linearize_expanded
from loopax._src.core.jaxpr.types import Axis, axes_of, check_count, check_types, is_batched, refuse_sharded_lanes
from loopax._src.core.jaxpr.util import (
    Mask,
    collective_over,
    flatten,
    merge_lists,
    num_bytes,
    of_selected,
    select,
    trace,
    unflatten,
    weakly_cached,
)
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    axis_arguments,
    batched_outputs,
    jaxpr_as_fun,
    linear_transpose,
    new_primitive,
)
from loopax._src.messages import collective_message

# Operands that only one of two vmaps maps are repeated for the lanes of the other one, if that is no more than this
# many bytes, or than what the lanes have already.
REPEATED_BYTES = 64 * 1024


class BatchRules(NamedTuple):
    """How a batch of something runs."""

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


compact_vmap_p = new_primitive("compact_vmap")


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
    if collective_over(inner.program, outer.name):
        raise NotImplementedError(collective_message(outer.name))
    if not _joins(inner, outer, operands, dims):
        return _map_program(axis_data, operands, dims, inner.program)
    refuse_sharded_lanes(outer)
    names = [_as_tuple(axis.spmd_name) for axis in (outer, inner.axis)]
    axis = Axis(outer.size * inner.axis.size, None, (names[0] + names[1]) or None)
    positions = inner.rules.operand_axes(inner.static)
    sizes = (outer.size, inner.axis.size)
    flat = [_flatten(*each, sizes) for each in zip(operands, positions, inner.mapped, dims, strict=True)]
    mapped = tuple(m or d is not None for m, d in zip(inner.mapped, dims, strict=True))
    results = compact_vmap(inner.rules, inner.static, axis, mapped, flat)
    result_axes = inner.rules.result_axes(inner.static)
    unflattened = [
        y.reshape(*y.shape[:at], *sizes, *y.shape[at + 1 :]) for y, at in zip(results, result_axes, strict=True)
    ]
    return unflattened, result_axes


def _as_tuple(name: Any) -> tuple[Any, ...]:
    if name is None:
        return ()
    return name if isinstance(name, tuple) else (name,)


def _joins(inner: CompactVmap, outer: Axis, operands: Sequence[Any], dims: Sequence[Any]) -> bool:
    """Whether one batch of all lanes is written, or the first one is mapped."""
    if not inner.rules.steps_differ(inner.static, is_batched(dims)):
        return False
    bodies = [part for part in inner.static if isinstance(part, ClosedJaxpr)]
    if not inner.program.effects and any(body.effects for body in bodies):
        return False  # steps that are recomputed, from which effects have been removed
    repeated = own = 0
    for x, mapped, dim in zip(operands, inner.mapped, dims, strict=True):
        size = num_bytes([jax.typeof(x)])
        own += size if mapped or dim is not None else 0
        if mapped != (dim is not None):
            repeated += size * ((outer.size if mapped else inner.axis.size) - 1)
    return repeated <= max(own, REPEATED_BYTES)


def _map_program(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], program: ClosedJaxpr) -> Any:
    """The program for all new lanes; what does not depend on them stays as it is."""
    out_axes = axes_of(batched_outputs(program, axis_data, is_batched(dims)))
    in_axes = [None if d is None else int(d) for d in dims]
    mapped = jax.vmap(jaxpr_as_fun(program), in_axes=in_axes, out_axes=out_axes, **axis_arguments(axis_data))
    return mapped(*operands), out_axes


def _flatten(x: Any, at: int, mapped: bool, dim: Any, sizes: tuple[int, int]) -> Any:
    """An operand with one axis for the lanes of both batches, those of the new one first."""
    if dim is None and not mapped:
        return x
    x = jnp.expand_dims(x, at) if dim is None else jnp.moveaxis(x, int(dim), at)
    x = x if mapped else jnp.expand_dims(x, at + 1)
    x = jnp.broadcast_to(x, (*x.shape[:at], *sizes, *x.shape[at + 2 :]))
    return x.reshape(*x.shape[:at], prod(sizes), *x.shape[at + 2 :])


def compact_vmap_transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """The transpose of the program, in the operands in which it is linear.

    Operands are those of the program; undefined primals are linear and get cotangents, the others are values and get
    None. Results without a cotangent may be no linear functions (primals, in the rule of a `jax.custom_jvp`), so only
    the others are transposed. Progress is not shown a second time.
    """
    linear = [ad.is_undefined_primal(x) for x in operands]
    wanted = [not isinstance(ct, ad.Zero) for ct in cts]
    program = jaxpr_as_fun(strip_progress(CompactVmap(**params).program))
    of_linear = of_selected(lambda *inputs: select(wanted, program(*inputs)), linear, operands)
    found = linear_transpose(of_linear, *(x.aval for x in select(linear, operands)))
    return merge_lists(linear, [None] * linear.count(False), found(select(wanted, cts)))


jvp_of_program = jvp_expanded(evaluate_batch)
linearize_program = linearize_expanded(evaluate_batch)


def compact_vmap_abstract_eval(*_: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the program's results, and its effects."""
    program = CompactVmap(**params).program
    return program.out_avals, program.effects


def compact_vmap_typecheck(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
    """The types of the results and the effects, if operands of these types fit the program."""
    inner = CompactVmap(**params)
    check_count("compact_vmap", len(inner.mapped), avals)
    check_types("compact_vmap", inner.program.in_avals, avals)
    return compact_vmap_abstract_eval(*avals, **params)


def compact_vmap_dependence(eqn: Any) -> list[int]:
    """Which operands each result depends on: those of the program."""
    return list(dependence(CompactVmap(**eqn.params).program))


def guard_compact_vmap(eqn: Any, active: Any, operands: list[Any]) -> Sequence[Any]:
    """The program with its effects where `active` is True only."""
    return guarded(CompactVmap(**eqn.params).program)(active, *operands)


# A batch of reverse sweeps that does not wait for the lane with the most rows.
#
# The windows of all lanes are known, for their loops have run, so lanes are sorted into groups of similar lengths.
# What their loops saved does not fit these groups: lanes that leave a batch early are in another place there. So each
# group walks forward again, saving.


def _run(sweep: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are `low, high, *consts, *init, *carry, *xs`."""
    assert isinstance(sweep.lanes, Compact)

    def run_group(lanes: int, operands: Sequence[Any]) -> list[Any]:
        return _in_lockstep(sweep, axis.resized(lanes, similar=lanes < axis.size), mapped, operands)

    low, high = operands[:2]
    operand_axes = [at if has_lanes else None for at, has_lanes in zip(_operand_axes(sweep), mapped, strict=True)]
    program = GroupProgram(run_group, operand_axes, _result_axes(sweep))
    return in_groups(program, sweep.lanes, jnp.broadcast_to(high - low, (axis.size,)), operands)


def _in_lockstep(sweep: ReverseSweep, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """Walk forward saving, then back."""
    low, high, *leaves = operands
    windows, has_lanes = mapped[:2], _inputs(sweep, mapped[2:])
    own = own_limits(windows, low, high)
    own_avals = tuple(map(jax.typeof, own))
    lanes = lockstep_sweep(sweep, axis, tuple(has_lanes.consts), tuple(has_lanes.xs), windows, own_avals)
    inputs = _inputs(sweep, leaves)
    inputs = inputs._replace(consts=[*own, *inputs.consts])
    return flatten(checkpoint_and_sweep(lanes, *hull(low, high), inputs))


def _inputs(sweep: ReverseSweep, leaves: Sequence[Any]) -> SweepInputs:
    """By name what stands for each operand behind `low` and `high`: the states are given by the first one, `init`."""
    return unflatten(sweep.backward_avals, leaves)


def _operand_axes(sweep: ReverseSweep) -> list[int]:
    consts, state, carry, xs = sweep.backward_avals
    return [0, 0, *(0 for _ in (*consts, *state, *carry)), *(1 for _ in xs)]


def _result_axes(sweep: ReverseSweep) -> list[int]:
    return [0] * sweep.num_carry + [1] * len(sweep.y_avals)


SWEEPS = BatchRules(_run, _operand_axes, _result_axes, lambda _, mapped: any(mapped[:2]))
