"""What the primitives do under every transformation: one block for each shows all of its rules.

Rules stand in the folders of their transformations. The linear parts of loops and sweeps, and small primitives, have
their blocks in their own files.
"""

from loopax._src.core.autodiff.jvp import loop_jvp
from loopax._src.core.autodiff.linearize import loop_linearize
from loopax._src.core.autodiff.partial_eval_rule import loop_partial_eval, loop_transpose
from loopax._src.core.autodiff.remat_dce import (
    evaluate_again,
    loop_dce,
    loop_partial_eval_custom,
    sweep_dce,
    sweep_partial_eval_custom,
)
from loopax._src.core.autodiff.sweep_jvp import sweep_jvp
from loopax._src.core.autodiff.sweep_linearize import sweep_linearize
from loopax._src.core.autodiff.sweep_partial_eval import sweep_partial_eval, sweep_transpose
from loopax._src.core.batching.compact.autodiff import (
    compact_vmap_dce,
    compact_vmap_jvp,
    compact_vmap_linearize,
    compact_vmap_partial_eval,
    compact_vmap_partial_eval_custom,
)
from loopax._src.core.batching.compact.primitive import (
    CompactVmap,
    compact_vmap_abstract_eval,
    compact_vmap_dependence,
    compact_vmap_p,
    compact_vmap_transpose,
    compact_vmap_typecheck,
    evaluate_batch,
    guard_compact_vmap,
    join_batches,
)
from loopax._src.core.batching.loop import batch_loop
from loopax._src.core.batching.sweep import batch_sweep
from loopax._src.core.effects.guard import guard_loop, guard_sweep, guards
from loopax._src.core.ir.loop import (
    Loop,
    loop_abstract_eval,
    loop_dependence,
    loop_mixed_operands,
    loop_p,
    loop_typecheck,
)
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    reverse_sweep_p,
    sweep_abstract_eval,
    sweep_dependence,
    sweep_mixed_operands,
    sweep_typecheck,
)
from loopax._src.core.ir.sparse_consts import loop_of_sparse, refuse_sparse, sweep_of_sparse
from loopax._src.core.jaxpr.dataflow import dependence_rules
from loopax._src.core.jaxpr.mapped_axis import batch_if_mapped
from loopax._src.core.jaxpr.mixed_lanes import mixed_inputs, mixed_operands
from loopax._src.core.jaxpr.own_primitives import jointly_linear, step_limits
from loopax._src.core.lowering.loop import evaluate_loop
from loopax._src.core.lowering.sweep import evaluate_sweep
from loopax._src.jax_internals import keep_bits_p, register, register_sparse

register(
    loop_p,
    meaning=evaluate_loop,
    params=Loop._fields,
    effectful_abstract_eval=loop_abstract_eval,
    typecheck=loop_typecheck,
    jvp=loop_jvp,
    linearize=loop_linearize,
    transpose=loop_transpose,
    partial_eval=loop_partial_eval,
    partial_eval_custom=loop_partial_eval_custom,
    rematerialize=evaluate_again(loop_p),
    dce=loop_dce,
    batch=batch_if_mapped(loop_p, batch_loop),
)
dependence_rules[loop_p] = loop_dependence
mixed_operands[loop_p] = loop_mixed_operands
guards[loop_p] = guard_loop
register_sparse(loop_p, loop_of_sparse)
step_limits[loop_p] = lambda eqn: (Loop(**eqn.params).bound, Loop(**eqn.params).predicated)

register(
    reverse_sweep_p,
    meaning=evaluate_sweep,
    params=ReverseSweep._fields,
    effectful_abstract_eval=sweep_abstract_eval,
    typecheck=sweep_typecheck,
    jvp=sweep_jvp,
    linearize=sweep_linearize,
    transpose=sweep_transpose,
    partial_eval=sweep_partial_eval,
    partial_eval_custom=sweep_partial_eval_custom,
    rematerialize=evaluate_again(reverse_sweep_p),
    dce=sweep_dce,
    batch=batch_if_mapped(reverse_sweep_p, batch_sweep),
)
dependence_rules[reverse_sweep_p] = sweep_dependence
mixed_operands[reverse_sweep_p] = sweep_mixed_operands
guards[reverse_sweep_p] = guard_sweep
register_sparse(reverse_sweep_p, sweep_of_sparse)
step_limits[reverse_sweep_p] = lambda eqn: (ReverseSweep(**eqn.params).bound, False)

register(
    compact_vmap_p,
    meaning=evaluate_batch,
    params=CompactVmap._fields,
    effectful_abstract_eval=compact_vmap_abstract_eval,
    typecheck=compact_vmap_typecheck,
    jvp=compact_vmap_jvp,
    linearize=compact_vmap_linearize,
    transpose=compact_vmap_transpose,
    partial_eval=compact_vmap_partial_eval,
    partial_eval_custom=compact_vmap_partial_eval_custom,
    rematerialize=evaluate_again(compact_vmap_p),
    dce=compact_vmap_dce,
    batch=batch_if_mapped(compact_vmap_p, join_batches),
)
dependence_rules[compact_vmap_p] = compact_vmap_dependence
mixed_operands[compact_vmap_p] = lambda eqn: mixed_inputs(CompactVmap(**eqn.params).program)
guards[compact_vmap_p] = guard_compact_vmap
register_sparse(compact_vmap_p, refuse_sparse)

jointly_linear.add(keep_bits_p)
