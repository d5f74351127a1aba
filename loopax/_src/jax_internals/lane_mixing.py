"""What JAX batches in such a way that a lane's results depend on the operands of other lanes.

Rules of PRNGs are fields of an object that is not public, as are the parameters of `custom_vmap`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax._src import core as _core
from jax._src import custom_batching as _batching
from jax.extend.core import ClosedJaxpr

from loopax._src.jax_internals.operations import is_elementwise_operation, is_product
from loopax._src.jax_internals.primitives import one_of

_PROBED_LANES = 2  # lanes for which the rule of a custom_vmap is traced

_draws = one_of("rng_bit_generator")
_is_custom_vmap = one_of("custom_vmap_call")
# Which functions of a PRNG an operation of random numbers calls.
_FUNCTIONS_OF = {
    "random_bits": ("random_bits",),
    "random_split": ("split",),
    "random_fold_in": ("fold_in",),
    "random_gamma": ("random_bits", "split"),
}


def draws_for_all_lanes(eqn: Any) -> bool:
    """Whether an equation draws random bits for a batch with the key of its first lane.

    `rng_bit_generator` does, by which keys of the PRNGs `rbg` and `unsafe_rbg` are drawn from; `unsafe_rbg` also splits
    keys by it.
    """
    if _draws(eqn):
        return True
    functions = _FUNCTIONS_OF.get(eqn.primitive.name, ())
    impl = getattr(eqn.invars[0].aval.dtype, "_impl", None) if functions else None
    return impl is not None and any(_calls_generator(impl, name) for name in functions)


@lru_cache
def _calls_generator(impl: Any, name: str) -> bool:
    """Whether this function of a PRNG calls `rng_bit_generator`."""
    key = jax.ShapeDtypeStruct(impl.key_shape, "uint32")
    calls = {
        "random_bits": lambda key: impl.random_bits(key, 32, (1,)),
        "split": lambda key: impl.split(key, (2,)),
        "fold_in": lambda key: impl.fold_in(key, key[0]),
    }
    return _contains(jax.make_jaxpr(calls[name])(key).jaxpr)


def _contains(jaxpr: Any) -> bool:
    return any(_draws(eqn) or any(map(_contains, _core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def custom_vmap_rule(eqn: Any) -> Callable[[], tuple[ClosedJaxpr, list[int | None], list[int | None]]] | None:
    """Traces what a `jax.custom_batching.custom_vmap` does for lanes, of which all its arguments are.

    It returns the program of the batch, and the axes of lanes of its operands and of its results. None if the equation
    calls no such function.
    """
    if not _is_custom_vmap(eqn):
        return None
    rule, in_tree = eqn.params["rule"], eqn.params["in_tree"]
    # What the function closes over comes first, and may not be batched. In a derivative JAX does not say what that is.
    closed_over = in_tree.children()[0].num_leaves if isinstance(rule, _batching.ClosedRule) else 0
    is_batched = [i >= closed_over for i in range(len(eqn.invars))]

    def trace() -> tuple[ClosedJaxpr, list[int | None], list[int | None]]:
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

    return trace


# ---- what keeps lanes apart: along which axis lanes stand in the results

_ALONG = ("axes", "axis", "dimension", "dimensions")  # parameters that say along which axes an operation works
_works_along = one_of(
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax"),
    *("argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "concatenate", "squeeze"),
)
_drops = one_of(
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax"),
    *("argmin", "squeeze"),
)
# Operations whose results have the axes of the operand in front, and perhaps others behind.
_appends = one_of("random_bits", "random_split", "random_wrap", "random_unwrap", "random_clone")
_is_broadcast = one_of("broadcast_in_dim")
_is_reshape = one_of("reshape")
_is_transpose = one_of("transpose")
_is_slice = one_of("slice")


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
    if _works_along(eqn):
        along = next(params[name] for name in _ALONG if name in params)
        along = along if isinstance(along, tuple) else (along,)
        return None if axis in along else axis - (sum(other < axis for other in along) if _drops(eqn) else 0)
    if _is_broadcast(eqn):
        return params["broadcast_dimensions"][axis]
    if _is_transpose(eqn):
        return params["permutation"].index(axis)
    if _is_reshape(eqn):
        stays = axis == 0 and eqn.outvars[0].aval.shape[:1] == first.shape[:1]
        return 0 if stays and params["dimensions"] is None else None
    if _is_slice(eqn):
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
