"""Families of JAX's operations: what they do to values, and what XLA makes of them."""

from collections.abc import Sequence
from typing import Any

from jax._src.interpreters import ad as _ad
from jax.extend.core import Primitive

from loopax._src.jax_internals.primitives import one_of

# ---- what they compute

is_sum = one_of("add", "add_any")  # `add_any` adds cotangents
is_addition = one_of("add")
is_less_than = one_of("lt")
is_select = one_of("select_n")
is_cast = one_of("convert_element_type")
is_product = one_of("dot_general")
is_convolution = one_of("conv_general_dilated")

# The results are the operands, whatever else the operation asks of compilers and derivatives.
_is_identity = one_of(
    *("stop_gradient", "copy", "copy_p", "name", "device_put", "optimization_barrier"),
    *("sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"),
)


def is_identity(eqn: Any) -> bool:
    """Whether the results are the operands."""
    if is_cast(eqn):
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return _is_identity(eqn)


_adds_up = one_of(
    *("add", "add_any", "sub", "concatenate", "stack", "pad", "complex", "select_n"),
    *("dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "custom_lin"),
)
_is_division = one_of("div")


def can_transpose(eqn: Any, linear: Sequence[bool]) -> bool:
    """Whether JAX can transpose an operation in these of its operands: it has a rule, and this is not a product.

    JAX has two tables of rules, of which one is private.
    """
    if eqn.primitive not in _ad.primitive_transposes and eqn.primitive not in _ad.fancy_transposes:
        return False
    return _adds_up(eqn) or (sum(linear) == 1 and not (_is_division(eqn) and linear[1]))


def only_shows(primitive: Primitive) -> bool:
    """Whether a primitive only shows values to somebody (`jax.debug`)."""
    return primitive.name in ("debug_callback", "debug_print")


# The same numbers, rounded perhaps, in another form.
keeps_values = one_of(
    *("convert_element_type", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "optimization_barrier")
)

# Each element of the result from the same element of each operand, in a time that no value makes longer.
is_elementwise_operation = one_of(
    *("abs", "add", "add_any", "and", "bitcast_convert_type", "ceil", "clamp", "clz", "complex", "conj", "div"),
    *("convert_element_type", "copy", "copy_p", "eq", "eq_to", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag"),
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("erf", "erf_inv", "erfc", "lgamma", "digamma", "log", "log1p", "log2", "logistic", "pow", "integer_pow", "rsqrt"),
    *("bessel_i0e", "bessel_i1e", "one_minus_square", "polynomial", "sqrt"),
    *("is_finite", "le", "le_to", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not", "or"),
    *("population_count", "real", "reduce_precision", "rem", "round", "select_n", "sign", "square", "sub", "xor"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "stop_gradient", "name"),
    *("broadcast_in_dim", "expand_dims", "iota", "reshape", "squeeze", "pvary", "pcast"),
    *("random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in", "threefry2x32"),
)
# Elements of the result from several elements of an operand, in such a time, too.
is_reduction_or_move = one_of(
    *("argmax", "argmin", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod"),
    *("cumsum", "dot_general", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "rev", "slice", "sort"),
    *(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")),
    *("scatter", "scatter-add", "scatter_add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
    *("split", "stack", "transpose", "unstack", "random_split"),
)

# ---- what is written in place

_is_slice_update = one_of("dynamic_update_slice")
updates = one_of("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")


def update_of(eqn: Any) -> Any:
    """What one of `updates` writes into its first operand."""
    return eqn.invars[1] if _is_slice_update(eqn) else eqn.invars[2]


# ---- what they cost (`core/jaxpr/cost.py`)

is_free = one_of(
    *("reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "stop_gradient", "copy", "iota"),
    "pvary",  # changes a type of the devices of a `shard_map`
)
# A CPU takes some instructions for each element, or many.
is_function = one_of(
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "tanh", "erf", "erfc", "div", "rem", "sqrt", "rsqrt"),
)
is_slow_function = one_of(
    *("pow", "cbrt", "erf_inv", "lgamma", "digamma", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "random_bits", "threefry2x32", "bessel_i0e", "bessel_i1e"),
)

# ---- what XLA fuses on a CPU (`insight/fusion.py`)

# Computed by an operation of its own, into which XLA fuses the elementwise operations before it.
takes_fused = one_of(
    *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")),
    *("argmax", "argmin", "dynamic_update_slice", "concatenate"),
)
# Computed by an operation of its own, into which nothing is fused.
stands_alone = one_of(
    *("dot_general", "conv_general_dilated", "while", "scan", "cond", "sort", "fft", "rng_bit_generator"),
    *("scatter", "scatter-add", "scatter_add", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "custom_linear_solve", "shard_map"),
    *("pure_callback", "io_callback", "debug_callback", "reduce_window_max", "reduce_window_sum"),
)
renames = one_of("reshape", "squeeze", "expand_dims")  # the same bytes by another name
moves = one_of("concatenate", "transpose", "rev", "gather", "dynamic_slice", "slice", "pad")  # element by other element
# Computed once, where others are computed again in each operation that uses them.
is_costly = one_of(
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "cbrt", "sqrt", "rsqrt", "div", "erf", "erf_inv"),
    *("sin", "cos", "tan", "tanh", "lgamma", "digamma", "random_bits", "threefry2x32"),
)
