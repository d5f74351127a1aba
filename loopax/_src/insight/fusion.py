"""Which values of a program XLA writes to memory, and which only live inside of a fused operation."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from loopax._src.jax_internals import Literal

# What is computed by an operation of its own. Into some of these, XLA fuses the elementwise operations before them.
_TAKES_FUSED = {f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")}
_TAKES_FUSED |= {"argmax", "argmin", "dynamic_update_slice", "concatenate"}
_ALONE = {"dot_general", "conv_general_dilated", "while", "scan", "cond", "sort", "fft", "rng_bit_generator"}
_ALONE |= {"scatter", "scatter-add", "scatter_add", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
_ALONE |= {"cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "custom_linear_solve", "shard_map"}
_ALONE |= {"pure_callback", "io_callback", "debug_callback", "reduce_window_max", "reduce_window_sum"}
RENAMES = {"reshape", "squeeze", "expand_dims"}  # the same bytes by another name
MOVES = {"concatenate", "transpose", "rev", "gather", "dynamic_slice", "slice", "pad"}  # element by other element

# Computed once, where others are computed again in each operation that uses them.
_COSTLY = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "cbrt", "sqrt", "rsqrt", "div", "erf", "erf_inv"}
_COSTLY |= {"sin", "cos", "tan", "tanh", "lgamma", "digamma", "random_bits", "threefry2x32"}


def is_fusible(eqn: Any) -> bool:
    """Whether an equation may be computed inside of another."""
    return eqn.primitive.name not in _TAKES_FUSED | _ALONE | RENAMES


def fused_into(eqns: Sequence[Any], users: Mapping[Any, Sequence[int]], results: Container[Any]) -> list[set[int]]:
    """For each equation, the places of those inside of which it is computed; its own where its results are written.

    `users` are the places of the equations that use a variable, `results` those that the program returns.
    """
    found: list[set[int]] = [set() for _ in eqns]
    for place in reversed(range(len(eqns))):
        eqn = eqns[place]
        using = [other for variable in eqn.outvars for other in users.get(variable, ())]
        takers = [other for other in using if is_fusible(eqns[other]) or eqns[other].primitive.name in _TAKES_FUSED]
        into = set().union(*(found[other] for other in takers))
        is_written = (
            not is_fusible(eqn)
            or len(takers) < len(using)
            or any(variable in results for variable in eqn.outvars)
            or (len(into) > 1 and eqn.primitive.name in _COSTLY)
        )
        found[place] = {place} if is_written or not into else into
    return found


def variables(eqn: Any) -> list[Any]:
    """What an equation reads, constants apart."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]
