"""Arrays of 64 bits where `jax_enable_x64` is off: derivatives of operations that take elements out, or put them in."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad

from loopax._src.jax_internals.partial_eval import linear_transpose
from loopax._src.jax_internals.rules import new_primitive, register
from loopax._src.jax_internals.types import has_tangents, zeros


def keep_bits(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, which is linear in its real arrays together; its derivatives keep 64 bits.

    Where `jax_enable_x64` is off, the zeros in JAX's transposes of gathers, slices, pads and updates have 32 bits, and
    do not fit cotangents of 64. So there the function becomes one operation, whose rules are written down with the
    flag on.
    """
    if not any(map(_would_be_cut, arrays)):
        return function(*arrays)
    with jax.enable_x64(True):
        program, results = jax.make_jaxpr(function, return_shape=True)(*map(jax.typeof, arrays))
    return jax.tree.unflatten(jax.tree.structure(results), keep_bits_p.bind(*arrays, program=program))


def _would_be_cut(x: Any) -> bool:
    """Whether JAX makes no such real or complex numbers now."""
    dtype = jax.typeof(x).dtype
    return jnp.issubdtype(dtype, jnp.inexact) and jax.dtypes.canonicalize_dtype(dtype) != dtype


keep_bits_p = new_primitive("keep_bits")


def wide_program(eqn: Any) -> ClosedJaxpr | None:
    """The program of a function that keeps 64 bits; None for any other equation."""
    return eqn.params["program"] if eqn.primitive is keep_bits_p else None


def _evaluate(*arrays: Any, program: ClosedJaxpr) -> list[Any]:
    """The meaning of the primitive."""
    with jax.enable_x64(True):
        return jaxpr_as_fun(program)(*arrays)


def _transpose(cts: Sequence[Any], *arrays: Any, program: ClosedJaxpr) -> list[Any]:
    """The transpose in the arrays that are undefined primals, as an operation of the same kind."""
    linear = [ad.is_undefined_primal(x) for x in arrays]
    known = [x for x in arrays if not ad.is_undefined_primal(x)]
    types = [x.aval for x in arrays if ad.is_undefined_primal(x)]

    def transposed(*values: Any) -> Any:
        of_known = iter(values[len(cts) :])
        places = [None if is_linear else next(of_known) for is_linear in linear]

        def of_linear(*found: Any) -> list[Any]:
            rest = iter(found)
            return _evaluate(*(next(rest) if x is None else x for x in places), program=program)

        return linear_transpose(of_linear, *types)(values[: len(cts)])

    if all(isinstance(ct, ad.Zero) for ct in cts):
        found = iter([ad.Zero(aval) for aval in types])
    else:
        found = iter(keep_bits(transposed, *(zeros(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in cts), *known))
    return [next(found) if is_linear else None for is_linear in linear]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], program: ClosedJaxpr) -> Any:
    mapped = jax.vmap(jaxpr_as_fun(program), in_axes=[None if d is None else int(d) for d in dims])
    results = keep_bits(mapped, *arrays)
    return results, [0] * len(results)


register(
    keep_bits_p,
    meaning=_evaluate,
    params=["program"],
    abstract_eval=lambda *_, program: program.out_avals,
    linear_in=lambda arrays: [i for i, x in enumerate(arrays) if has_tangents(x)],
    transpose=_transpose,
    batch_without_axis=_batch,
)
