"""Every use of private or version-dependent JAX, each with its reason: one file for each question.

The rest of loopax imports these names from here, so that a new JAX version is a change to this folder alone. Tested on
JAX 0.10.0 and 0.10.2 (Python 3.11) and JAX 0.12.0.1 (Python 3.12) by `make test-all`.

May import: nothing of loopax.
"""

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun, mapped_aval, unmapped_aval
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from loopax._src.jax_internals.axes import axis_arguments, batched_outputs, communicates_over, mesh_axis, names_axis
from loopax._src.jax_internals.effects import happens, undifferentiable_effects
from loopax._src.jax_internals.jaxprs import dce, open_constants, replace_jaxpr
from loopax._src.jax_internals.partial_eval import (
    evaluate_partially,
    is_known,
    known_value,
    partial_eval_jaxpr,
    stage_unknown,
)
from loopax._src.jax_internals.primitives import bind_checkpoint, bind_shard_map, scan_sizes
from loopax._src.jax_internals.rules import call_dce_rule, new_primitive
from loopax._src.jax_internals.source import (
    argument_names,
    calling_lines,
    equation_context,
    is_of_jax,
    name_in_errors,
    user_lines,
)
from loopax._src.jax_internals.tracing import is_for_export, is_tracing, trace_context, trace_state, without_folding
from loopax._src.jax_internals.types import (
    AbstractValue,
    is_nonzero,
    is_reference,
    of_weak_type,
    on_mesh,
    strong,
    to_weak,
    vary,
    vary_like,
    varying_axes,
    with_varying_axes,
    zeros,
)

__all__ = [
    "AbstractValue",
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "Primitive",
    "ad",
    "argument_names",
    "axis_arguments",
    "batched_outputs",
    "batching",
    "bind_checkpoint",
    "bind_shard_map",
    "call_dce_rule",
    "calling_lines",
    "communicates_over",
    "dce",
    "equation_context",
    "evaluate_partially",
    "happens",
    "is_for_export",
    "is_known",
    "is_nonzero",
    "is_of_jax",
    "is_reference",
    "is_tracing",
    "jaxpr_as_fun",
    "known_value",
    "mapped_aval",
    "mesh_axis",
    "mlir",
    "name_in_errors",
    "names_axis",
    "new_primitive",
    "of_weak_type",
    "on_mesh",
    "open_constants",
    "partial_eval_jaxpr",
    "pe",
    "replace_jaxpr",
    "scan_sizes",
    "stage_unknown",
    "strong",
    "to_weak",
    "trace_context",
    "trace_state",
    "undifferentiable_effects",
    "unmapped_aval",
    "user_lines",
    "vary",
    "vary_like",
    "varying_axes",
    "with_varying_axes",
    "without_folding",
    "zeros",
]
