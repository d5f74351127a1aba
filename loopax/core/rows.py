"""Numbers of rows, typed as if all devices of a `shard_map` had the same.

The body of a loop is traced for a row whose type does not vary between devices. Where devices take different numbers of
steps, rows do vary, and JAX's check of such types would refuse the body. It has nothing to protect here: every device
runs a loop of its own, and nothing in a loop is communicated because of the type of a row.
"""

from typing import Any

from jax import core

from loopax._compat import Primitive, mlir

unvarying_p = Primitive("unvarying")


def unvarying(numbers: Any) -> Any:
    """The same numbers, of a type that does not vary; only where a loop is compiled."""
    return unvarying_p.bind(numbers)


unvarying_p.def_impl(lambda numbers: numbers)
unvarying_p.def_abstract_eval(lambda aval: core.ShapedArray(aval.shape, aval.dtype))
mlir.register_lowering(unvarying_p, lambda _, numbers: [numbers])
