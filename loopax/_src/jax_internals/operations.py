"""Families of JAX's operations: what they do to values, and what XLA makes of them."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core as _core
from jax._src import custom_batching as _batching
from jax.extend.core import ClosedJaxpr, Primitive

from loopax._src.jax_internals.not_yet_made import Form, may_be_updated
from loopax._src.jax_internals.primitives import one_of
from loopax._src.jax_internals.types import after

# ---- what they compute

is_sum = one_of("add", "add_any")  # `add_any` adds cotangents
is_addition = one_of("add")
is_less_than = one_of("lt")
is_and = one_of("and")
is_or = one_of("or")
is_not = one_of("not")
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


# The one operand, as the result: a bool, or what Equinox marks as the same for all lanes.
_hands_on = one_of("convert_element_type", "nonbatchable")


def hands_on(eqn: Any) -> bool:
    """Whether the result is the operand, which is a bool."""
    return _hands_on(eqn) and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype == bool


def order_of(eqn: Any, holds: bool) -> tuple[Any, Any, bool] | None:
    """The smaller and the larger operand where this comparison holds, or where it does not; whether they may be equal.

    None: it is no comparison.
    """
    if eqn.primitive.name not in ("lt", "le", "gt", "ge"):
        return None
    a, b = eqn.invars if (eqn.primitive.name in ("lt", "le")) == holds else eqn.invars[::-1]
    return a, b, (eqn.primitive.name in ("le", "ge")) == holds


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
    *("split", "stack", "tile", "transpose", "unstack", "random_split"),
)

# Where an operand is not finite, the result is not; where all are, it is, unless it overflows.
keeps_finite = one_of(
    *("add", "add_any", "sub", "mul", "neg", "dot_general", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
    *("expand_dims", "convert_element_type", "copy", "pvary"),
)

# ---- what is written in place

_SCATTERS = ("scatter", *(f"scatter{sign}{kind}" for kind in ("add", "sub", "mul", "min", "max") for sign in "-_"))

updates = one_of("dynamic_update_slice", *_SCATTERS)

_replaces = one_of("dynamic_update_slice", "scatter")


def replaces(eqn: Any) -> bool:
    """Whether one of `updates` writes what it is given, whatever was there."""
    return _replaces(eqn) and eqn.params.get("update_jaxpr") is None


def update_of(eqn: Any) -> Any:
    """What one of `updates` writes into its first operand."""
    return eqn.invars[1 if eqn.primitive.name == "dynamic_update_slice" else 2]


def can_write_nothing(eqn: Any) -> bool:
    """Whether one of `updates` writes at places that may be beyond the array, where nothing is written."""
    return updates(eqn) and may_be_updated(eqn.invars[0].aval) and bool(_numbers_of(eqn).scatter_dims_to_operand_dims)


def _numbers_of(eqn: Any) -> lax.ScatterDimensionNumbers:
    """Of one of `updates`, as a scatter."""
    if eqn.primitive.name != "dynamic_update_slice":
        return eqn.params["dimension_numbers"]
    axes = tuple(range(eqn.invars[0].aval.ndim))
    return lax.ScatterDimensionNumbers(axes, (), axes)


def written_where(is_written: Any, eqn: Any, operands: Sequence[Any]) -> Any:
    """The result of `can_write_nothing` where `is_written` is True, and its first operand where it is not."""
    array, *rest = operands
    numbers, primitive, params = _numbers_of(eqn), eqn.primitive, eqn.params
    if eqn.primitive.name == "dynamic_update_slice":
        value, *starts = rest
        places = jnp.stack([jnp.asarray(start) for start in starts])
        primitive, mode = lax.scatter_p, lax.GatherScatterMode.CLIP
        params = {"update_jaxpr": None, "update_consts": (), "dimension_numbers": numbers, "unique_indices": True}
    else:
        (places, value), mode = rest, params["mode"]
    axes = numbers.scatter_dims_to_operand_dims
    if mode == lax.GatherScatterMode.CLIP:
        windows = Form(array.shape, numbers, mode, False, False).windows
        sizes = [value.shape[windows[axis]] if axis in windows else 1 for axis in axes]
        last = [array.shape[axis] - size for axis, size in zip(axes, sizes, strict=True)]
        places = jnp.clip(places, 0, jnp.array(last, places.dtype))
    places = places.astype(jnp.promote_types(places.dtype, jnp.int32))
    places = jnp.where(is_written, places, jnp.array([array.shape[axis] for axis in axes], places.dtype))
    params = {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return primitive.bind(array, places, value, **params)


_of_one_block = one_of("dynamic_slice", "dynamic_update_slice")


def num_places(eqn: Any) -> int:
    """The places at which an operation reads or writes blocks."""
    return 1 if _of_one_block(eqn) else prod(eqn.invars[1].aval.shape[:-1])


# ---- what is read beside it

_SMALL = 16  # numbers, of an operand that waits for others

_is_gather = one_of("gather")
_reads = one_of("gather", "dynamic_slice")


def adds_at_places(eqn: Any, lanes: int = 1) -> bool:
    """Whether the transpose, of so many lanes, adds to an array at several places that are computed."""
    return _reads(eqn) and (lanes > 1 or num_places(eqn) > 1)


def reads_blocks(eqn: Any) -> bool:
    """Whether a small part of the first operand is read, at places that are computed."""
    return _reads(eqn) and 0 < 4 * prod(eqn.outvars[0].aval.shape) <= prod(eqn.invars[0].aval.shape)


def read_twice(eqn: Any, operands: Sequence[Any]) -> Any:
    """What one of `reads_blocks` gives, if it is one block: of two at the same place, the first."""
    array, *places = operands
    if _is_gather(eqn):
        numbers, sizes, mode = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "mode"))
        fill, (place,) = eqn.params["fill_value"], places
    else:
        sizes, mode, fill = eqn.params["slice_sizes"], lax.GatherScatterMode.CLIP, None
        axes = tuple(range(array.ndim))
        numbers = lax.GatherDimensionNumbers(axes, (), axes)
        place = jnp.stack([jnp.asarray(start) for start in places])
    if prod(place.shape[:-1]) != 1 or numbers.operand_batching_dims:
        return eqn.primitive.bind(*operands, **eqn.params)
    kept = len(sizes) - len(numbers.collapsed_slice_dims)
    numbers = numbers._replace(offset_dims=tuple(range(1, 1 + kept)))
    twice = jnp.broadcast_to(place.reshape(1, -1), (2, place.shape[-1]))
    blocks = lax.gather(array, twice, numbers, sizes, mode=mode, fill_value=fill)
    return blocks[0].reshape(eqn.outvars[0].aval.shape)


def written_after(eqn: Any, operands: Sequence[Any], read: Sequence[Any]) -> list[Any]:
    """The operands of what writes, of which what was read is a part: no write comes before that.

    What writes is one of `updates`, or a branch or a loop that does. It stays as it is if all it is given is large.
    """
    which = {"dynamic_update_slice": 2}.get(eqn.primitive.name, 1)
    if not updates(eqn):
        small = [
            i
            for i, x in enumerate(operands)
            if jnp.size(x) <= _SMALL and jnp.issubdtype(jnp.result_type(x), jnp.number)
        ]
        if not small:
            return list(operands)
        which = small[0]
    operands = list(operands)
    operands[which] = after(jnp.asarray(operands[which]), read)
    return operands


# A part of the first operand, as it is.
takes_part = one_of("gather", "dynamic_slice", "slice", "squeeze", "reshape", "expand_dims", "transpose", "rev")

# ---- what they cost (`core/jaxpr/cost.py`)

is_free = one_of(
    *("reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "stop_gradient", "copy", "iota"),
    *("expand_dims", "slice", "transpose"),
    "pvary",  # changes a type of the devices of a `shard_map`
)
# A CPU takes some instructions for each element, or many.
is_function = one_of(*("exp", "exp2", "log", "log2", "logistic", "tanh", "erf", "erfc", "sqrt", "rsqrt"))
is_slow_function = one_of(
    *("expm1", "log1p"),
    *("pow", "cbrt", "erf_inv", "lgamma", "digamma", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "random_bits", "threefry2x32", "bessel_i0e", "bessel_i1e"),
)

# What LAPACK takes for an element of each operand, in times of a slow function: measured on one CPU for matrices of 3
# to 64 rows, within a factor of two. That of "eig" is a guess.
_OF_LAPACK = {
    "cholesky": (1.0,),
    "lu": (1.5,),
    "qr": (2.5,),
    "geqrf": (1.25,),
    "householder_product": (1.25,),
    "triangular_solve": (0.3, 1.2),
    "eigh": (9.0,),
    "svd": (15.0,),
    "eig": (30.0,),
}


def lapack_weights(eqn: Any) -> tuple[float, ...]:
    """What LAPACK takes for an element of each of the first operands, in times of a slow function; () for others."""
    return _OF_LAPACK.get(eqn.primitive.name, ())


_REDUCTIONS = (
    *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")),
    *("argmax", "argmin", "sort"),
)
# What they cost goes by the size of their operand.
reads_more_than_it_returns = one_of(*_REDUCTIONS)
# Worth a place in memory, if a loop would compute it in each step.
is_kept_for_steps = one_of(
    *(*_REDUCTIONS, "dot_general", "conv_general_dilated"),
    *("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "fft"),
)

# ---- what XLA fuses on a CPU

# Computed by an operation of its own, into which XLA fuses the elementwise operations before it.
takes_fused = one_of(
    *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")),
    *("argmax", "argmin", "dynamic_update_slice", "concatenate", "stack"),
)
# Computed by an operation of its own, into which nothing is fused.
stands_alone = one_of(
    *("dot_general", "conv_general_dilated", "while", "scan", "cond", "sort", "fft", "rng_bit_generator"),
    *(*_SCATTERS, "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "custom_linear_solve", "shard_map"),
    *("pure_callback", "io_callback", "debug_callback", "reduce_window_max", "reduce_window_sum"),
)


# What JAX batches in such a way that a lane's results depend on the operands of other lanes.
#
# Rules of PRNGs are fields of an object that is not public, as are the parameters of `custom_vmap`.

_PROBED_LANES = 2  # lanes for which the rule of a custom_vmap is traced

_draws = one_of("rng_bit_generator")
# Which functions of a PRNG an operation of random numbers calls, of an implementation and the array behind a key.
_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "random_bits": lambda impl, key: impl.random_bits(key, 32, (1,)),
    "random_split": lambda impl, key: impl.split(key, (2,)),
    "random_fold_in": lambda impl, key: impl.fold_in(key, key[0]),
    "random_gamma": lambda impl, key: (impl.random_bits(key, 32, (1,)), impl.split(key, (2,))),
}


def draws_for_all_lanes(eqn: Any) -> bool:
    """Whether an equation draws random bits for a batch with the key of its first lane.

    `rng_bit_generator` does, by which keys of the PRNGs `rbg` and `unsafe_rbg` are drawn from; `unsafe_rbg` also splits
    keys by it.
    """
    name = eqn.primitive.name
    impl = getattr(eqn.invars[0].aval.dtype, "_impl", None) if name in _CALLS else None
    return _draws(eqn) or (impl is not None and _calls_generator(impl, name))


@lru_cache
def _calls_generator(impl: Any, name: str) -> bool:
    """Whether what this operation calls of a PRNG calls `rng_bit_generator`."""

    def contains(jaxpr: Any) -> bool:
        return any(_draws(eqn) or any(map(contains, _core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)

    return contains(jax.make_jaxpr(partial(_CALLS[name], impl))(jax.ShapeDtypeStruct(impl.key_shape, "uint32")))


def custom_vmap_of_lanes(eqn: Any) -> tuple[ClosedJaxpr, list[int | None], list[int | None]] | None:
    """What a `jax.custom_batching.custom_vmap` does for lanes, of which all its arguments are.

    Returns the program of the batch, and the axes of lanes of its operands and of its results. None if the equation
    calls no such function.
    """
    if eqn.primitive.name != "custom_vmap_call":
        return None
    rule, in_tree = eqn.params["rule"], eqn.params["in_tree"]
    # What the function closes over comes first, and may not be batched. In a derivative JAX does not say what that is.
    closed_over = in_tree.children()[0].num_leaves if isinstance(rule, _batching.ClosedRule) else 0
    is_batched = [i >= closed_over for i in range(len(eqn.invars))]
    batched: list[bool] = []

    def of_lanes(*flat: Any) -> list[Any]:
        args = in_tree.unflatten(flat)
        results, mask = _batching.call_rule(rule, _PROBED_LANES, in_tree.unflatten(is_batched), args)
        batched[:] = jax.tree.leaves(mask)
        return jax.tree.leaves(results)

    atoms = zip(eqn.invars, is_batched, strict=True)
    avals = [_core.unmapped_aval(_PROBED_LANES, 0, x.aval) if lanes else x.aval for x, lanes in atoms]
    program = jax.make_jaxpr(of_lanes)(*avals)
    inputs, results = ([0 if lanes else None for lanes in mask] for mask in (is_batched, batched))
    return program, inputs, results


# ---- what keeps lanes apart: along which axis lanes stand in the results

_drops = one_of(
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax"),
    *("argmin", "squeeze"),
)
_works_along = one_of("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "concatenate")
# Operations whose results have the axes of the operand in front, and perhaps others behind.
_appends = one_of("random_bits", "random_split", "random_wrap", "random_unwrap", "random_clone")


def axis_after(eqn: Any, axes: Any) -> int | None:
    """The axis of lanes of an equation's results, from those of its operands; None: it may mix lanes.

    An operand whose axis is None is the same for all lanes; another one has lanes.
    """
    lanes = [(atom.aval, axis) for atom, axis in zip(eqn.invars, axes, strict=True) if axis is not None]
    (first, axis), params = lanes[0], eqn.params
    if is_product(eqn):
        return _axis_of_product(params["dimension_numbers"], *(a.aval.ndim for a in eqn.invars), *axes)
    if any(other != axis or aval.ndim != first.ndim for aval, other in lanes):
        return None
    if _drops(eqn) or _works_along(eqn):
        along = next(params[name] for name in ("axes", "axis", "dimension", "dimensions") if name in params)
        along = along if isinstance(along, tuple) else (along,)
        return None if axis in along else axis - (sum(other < axis for other in along) if _drops(eqn) else 0)
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][axis]
        case "transpose":
            return params["permutation"].index(axis)
        case "reshape":
            stays = axis == 0 and eqn.outvars[0].aval.shape[:1] == first.shape[:1]
            return 0 if stays and params["dimensions"] is None else None
        case "slice":
            whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == first.shape[axis]
            return axis if whole and params["strides"] is None else None
    return axis if is_elementwise_operation(eqn) or _appends(eqn) else None


def _axis_of_product(numbers: Any, left_ndim: int, right_ndim: int, left: int | None, right: int | None) -> int | None:
    """Of a `dot_general`: batch axes come first, then the other axes of the left operand, then of the right one."""
    (left_summed, right_summed), (left_batch, right_batch) = numbers
    if left is not None and right is not None:
        pairs = list(zip(left_batch, right_batch, strict=True))
        return pairs.index((left, right)) if (left, right) in pairs else None
    if left in left_summed or right in right_summed or left in left_batch or right in right_batch:
        return None
    left_free = [axis for axis in range(left_ndim) if axis not in (*left_summed, *left_batch)]
    right_free = [axis for axis in range(right_ndim) if axis not in (*right_summed, *right_batch)]
    if left is not None:
        return len(left_batch) + left_free.index(left)
    assert right is not None
    return len(left_batch) + len(left_free) + right_free.index(right)
