"""What the primitives do under every transformation: one block for each shows all of its rules.

Each rule is named with the file in which it stands. The linear parts of loops and sweeps, and small primitives, have
their blocks in their own files.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopax._src import jax_internals as jaxi
from loopax._src.core.autodiff import dce, jvp, partial_eval, sweep
from loopax._src.core.batching import compact_autodiff, compact_primitive
from loopax._src.core.batching.compact_primitive import CompactVmap, compact_vmap_p
from loopax._src.core.batching.loop import batch_loop, batch_sweep
from loopax._src.core.ir import loop as ir_loop
from loopax._src.core.ir import reverse_sweep as ir_sweep
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr import dependence
from loopax._src.core.jaxpr.accumulate import carried_by
from loopax._src.core.jaxpr.types import batch_if_mapped
from loopax._src.core.jaxpr.util import trace
from loopax._src.core.lane_effects import guarded, guards
from loopax._src.core.lowering.loop import evaluate_loop
from loopax._src.core.lowering.sweep import evaluate_sweep
from loopax._src.core.own_arrays import Walk, walks
from loopax._src.jax_internals import ClosedJaxpr, Primitive, jaxpr_as_fun

# Sparse matrices that the body of a loop closes over, under `jax.experimental.sparse.sparsify`.
#
# The arrays of which a matrix consists become constants in its place. Carries and rows stay dense.


def _dense(values: Sequence[Any]) -> Sequence[Any]:
    if any(map(jaxi.is_sparse, values)):
        raise NotImplementedError(
            "jax.experimental.sparse.sparsify: a sparse matrix is in the carry, the rows or the results of a loop, "
            "which hold dense arrays. Let the body close over the matrix, or return it as it came; or convert it "
            "before the loop, or in the body: `jax.experimental.sparse.todense(x)`."
        )
    return values


def of_sparse(primitive: Primitive, steps: Any, body: str, num_limits: int) -> Callable[..., Sequence[Any]]:
    """The rule for a loop or a sweep: operands are `*limits, *consts, *others`, and `body` is the name of its body."""

    def rule(operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        loop = steps(**params)
        end = num_limits + loop.num_consts
        parts, treedef = jax.tree.flatten(list(operands[num_limits:end]))

        # Before: (row, *consts, *others) -> results
        # After: (row, *arrays of which the consts consist, *others) -> results
        def taking_parts(body: ClosedJaxpr) -> ClosedJaxpr:
            function = jaxi.on_sparse(jaxpr_as_fun(body))

            def on_parts(row: Any, *inputs: Any) -> Sequence[Any]:
                consts = treedef.unflatten(inputs[: len(parts)])
                return _dense(function(row, *consts, *inputs[len(parts) :]))

            row, *avals = body.in_avals
            return trace(on_parts, [row, *map(jax.typeof, parts), *avals[loop.num_consts :]])

        bodies = {body: taking_parts(getattr(loop, body)), "inverse": loop.inverse and taking_parts(loop.inverse)}
        given = [*_dense(operands[:num_limits]), *parts, *_dense(operands[end:])]
        return primitive.bind(*given, **loop._replace(**bodies, num_consts=len(parts))._asdict())

    return rule


def refuse_sparse(_: Sequence[Any], __: dict[str, Any]) -> Sequence[Any]:
    """What holds loops in another form takes no sparse matrix."""
    raise NotImplementedError(
        "jax.experimental.sparse.sparsify: the body of a loop with compact lanes closes over a sparse matrix, and the "
        "loop is batched already. Take `jax.vmap` outside: `jax.vmap(sparsify(f))`, or leave lanes='lockstep'."
    )


jaxi.register(
    loop_p,
    meaning=evaluate_loop,
    params=Loop._fields,
    has_unused=ir_loop.may_have_tape,
    effectful_abstract_eval=ir_loop.loop_abstract_eval,
    expected=ir_loop.loop_expected,
    jvp=jvp.loop_jvp,
    linearize=partial_eval.loop_linearize,
    transpose=partial_eval.loop_transpose,
    partial_eval=partial_eval.loop_partial_eval,
    partial_eval_custom=dce.loop_partial_eval_custom,
    rematerialize=dce.evaluate_again(loop_p),
    dce=dce.loop_dce,
    batch=batch_if_mapped(loop_p, batch_loop),
    sparse=of_sparse(loop_p, Loop, "body", 2),
)
dependence.dependence_rules[loop_p] = ir_loop.loop_dependence
dependence.mixed_operands[loop_p] = ir_loop.loop_mixed_operands
walks[loop_p] = Walk(Loop, "body", 2, inverse_is_alike=True)
dependence.step_limits[loop_p] = lambda eqn: (Loop(**eqn.params).bound, Loop(**eqn.params).predicated)
carried_by[loop_p] = ir_loop.carried_by_loop

jaxi.register(
    reverse_sweep_p,
    meaning=evaluate_sweep,
    params=ReverseSweep._fields,
    effectful_abstract_eval=ir_sweep.sweep_abstract_eval,
    expected=ir_sweep.sweep_expected,
    jvp=sweep.sweep_jvp,
    linearize=sweep.sweep_linearize,
    transpose=sweep.sweep_transpose,
    partial_eval=sweep.sweep_partial_eval,
    partial_eval_custom=dce.sweep_partial_eval_custom,
    rematerialize=dce.evaluate_again(reverse_sweep_p),
    dce=dce.sweep_dce,
    batch=batch_if_mapped(reverse_sweep_p, batch_sweep),
    sparse=of_sparse(reverse_sweep_p, ReverseSweep, "step", 3),
)
dependence.dependence_rules[reverse_sweep_p] = ir_sweep.sweep_dependence
dependence.mixed_operands[reverse_sweep_p] = ir_sweep.sweep_mixed_operands
walks[reverse_sweep_p] = Walk(ReverseSweep, "step", 3, inverse_is_alike=False)
dependence.step_limits[reverse_sweep_p] = lambda eqn: (ReverseSweep(**eqn.params).bound, False)
carried_by[reverse_sweep_p] = ir_sweep.carried_by_sweep

jaxi.register(
    compact_vmap_p,
    meaning=compact_primitive.evaluate_batch,
    params=CompactVmap._fields,
    effectful_abstract_eval=compact_primitive.compact_vmap_abstract_eval,
    expected=compact_primitive.compact_vmap_expected,
    jvp=compact_autodiff.compact_vmap_jvp,
    linearize=compact_autodiff.compact_vmap_linearize,
    transpose=compact_primitive.compact_vmap_transpose,
    partial_eval=compact_autodiff.compact_vmap_partial_eval,
    partial_eval_custom=compact_autodiff.compact_vmap_partial_eval_custom,
    rematerialize=dce.evaluate_again(compact_vmap_p),
    dce=compact_autodiff.compact_vmap_dce,
    batch=batch_if_mapped(compact_vmap_p, compact_primitive.join_batches),
    sparse=refuse_sparse,
)
dependence.dependence_rules[compact_vmap_p] = lambda eqn, of: list(of(CompactVmap(**eqn.params).program))
dependence.mixed_operands[compact_vmap_p] = lambda eqn: dependence.mixed_inputs(CompactVmap(**eqn.params).program)
guards[compact_vmap_p] = lambda guard, operands: guarded(CompactVmap(**guard.eqn.params).program, when=guard.when)(
    guard.active, *operands
)
