"""Types of arrays: weak or strong, varying over the axes of a `shard_map`, with tangents or without."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax, memory
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.lax import lax as _lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from loopax._src.jax_internals.tracing import runs_eagerly

# Memory spaces: whether an array is on the device or on the host. Only types say it, by a field that is not public.


def memory_space(x: Any) -> Any:
    """The memory in which an array is, or one of this type."""
    aval: Any = x if isinstance(x, core.AbstractValue) else jax.typeof(x)
    return aval.memory_space


def is_on_host(x: Any) -> bool:
    """Whether an array is in host memory, where nothing is computed: rows are read and written there."""
    return memory_space(x) is memory.Space.Host


def on_device(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, evaluated in device memory; the results are where the first of the arrays is.

    JAX refuses operations between arrays of both memories, such as the choice of a mask between rows on the host.
    """
    results = function(*map(to_device, arrays))
    return jax.tree.map(lambda x: moved_like(arrays[0], x), results)


def to_device(x: Any) -> Any:
    """An array in device memory."""
    return _moved(x, memory.Space.Device)


def moved_like(like: Any, x: Any) -> Any:
    """An array in the memory of another one."""
    return _moved(x, memory_space(like))


def _moved(x: Any, to: Any) -> Any:
    # Transposed, it moves back to `src`; JAX does not keep one that is the device's.
    space = memory_space(x)
    return x if space is to or memory.Space.Any in (space, to) else jax.device_put(x, to, src=space)


def where(pred: Any, a: Any, b: Any) -> jax.Array:
    """`jnp.where`, of arrays on the host, too."""
    return on_device(lambda a, b: jnp.where(pred, a, b), a, b)


AbstractValue = Any  # jax.core.AbstractValue promises no fields; ours have shape, dtype and sharding


def strong(aval: AbstractValue) -> AbstractValue:
    """Take JAX's "weak type" flag off a type (`strip_weak_type` is not a public method)."""
    return aval.strip_weak_type()


def to_weak(x: jax.Array) -> jax.Array:
    """Give an array a weak type again. Public JAX can only take weak types away."""
    return _lax._convert_element_type(x, x.dtype, weak_type=True)  # pyright: ignore[reportReturnType]


def convert(x: Any, dtype: Any) -> jax.Array:
    """A strongly typed array of this dtype. Public JAX makes 32 bits of 64 where `jax_enable_x64` is off."""
    return _lax._convert_element_type(x, dtype, weak_type=False)  # pyright: ignore[reportReturnType]


def zeros(aval: AbstractValue) -> jax.Array:
    """Zeros of exactly this type.

    They are in the same memory, sharded as it is, vary over the same `shard_map` axes, and have 64 bits if it has.
    Outside of `jax.jit` they are compiled, for JAX would move a zero to the device.
    """
    return (_compiled_zeros if runs_eagerly() else _zeros)(aval)


def _zeros(aval: AbstractValue) -> jax.Array:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return moved_like(aval, ad.instantiate_zeros(ad.Zero(on_mesh(strong(aval)))))
    array = lax.broadcast(zero(aval.dtype), aval.shape, out_sharding=_explicit_sharding(aval))
    return vary(moved_like(aval, array), varying_axes(aval))


_compiled_zeros = jax.jit(_zeros, static_argnums=0)


def unwritten(aval: AbstractValue) -> jax.Array:
    """Zeros of this type for rows that a loop of the same program writes: those on the host are never on the device."""
    if not (is_on_host(aval) and aval.size and is_number(aval.dtype)):
        return zeros(aval)
    # `lax.scan` begins rows on the host with such a zero, which a program has there from the start. Public JAX makes
    # none, and an array of zeros that is moved to the host would be made on the device first.
    start: Any = _lax.empty2(aval.dtype, memory_space=memory.Space.Host)
    if not isinstance(start, core.Tracer):  # outside of programs
        return zeros(aval)
    return vary(lax.broadcast(start, aval.shape, out_sharding=_explicit_sharding(aval)), varying_axes(aval))


def after(x: jax.Array, others: Sequence[Any]) -> jax.Array:
    """A number, or several, that XLA computes after arrays of numbers: it knows no order but that of operands."""
    never = lax.optimization_barrier(jnp.bool_(False))
    for other in others:
        first = lax.slice(other, (0,) * other.ndim, (1,) * other.ndim).reshape(())
        x = jnp.where(never, (first == 0).astype(x.dtype), x)
    return x


def unwritten_after(aval: AbstractValue, others: Sequence[Any]) -> jax.Array:
    """`unwritten`, which begins when other arrays are there: it can take the room of what they are made of.

    Of the others those count that are arrays of numbers, on the device, on as many of them as it is.
    """
    axes, is_plain = varying_axes(aval), lambda x: is_number(x.dtype) and not is_on_host(x) and not any(spec_of(x))
    counting = [x for x in others if is_plain(jax.typeof(x)) and x.size and varying_axes(x) <= axes]
    if not (is_plain(aval) and counting):
        return unwritten(aval)
    return vary(lax.broadcast(after(zero(aval.dtype), counting), aval.shape), axes)


# ---- extended dtypes, but for those of PRNG keys: zero, and how cotangents are added, are rules of theirs, not public


def is_number(dtype: Any) -> bool:
    """Whether this is the dtype of numbers, bools or PRNG keys, and no other extended dtype."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def zero(dtype: Any) -> jax.Array:
    """What adds nothing to a number of this dtype."""
    if not is_number(dtype):
        return dtype._rules.zero(dtype)
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)  # JAX's zero of a key is the tangent of one
    return lax.full((), 0, dtype) if is_key else zeros(core.ShapedArray((), dtype))


def added(a: Any, b: Any) -> jax.Array:
    """The sum of two cotangents."""
    return a + b if is_number(a.dtype) else ad.add_jaxvals(a, b)


def item_bytes(dtype: Any) -> int:
    """The size of a number of this dtype, or of what stands for it."""
    if is_number(dtype):
        return dtype.itemsize
    element = dtype._rules.physical_element_aval(dtype)
    return element.size * element.dtype.itemsize


def _explicit_sharding(aval: AbstractValue) -> Any:
    mesh = aval.sharding.mesh
    return aval.sharding if not mesh.empty and mesh._any_axis_explicit else None


def fits(expected: Sequence[AbstractValue], given: Sequence[AbstractValue]) -> bool:
    """Whether values of these types can be given where those are expected, weak types apart; as JAX compares them."""
    return len(expected) == len(given) and all(map(_core.typecompat, expected, given))


def of_weak_type(x: jax.Array, aval: AbstractValue) -> jax.Array:
    """The array, weakly typed if and only if this type is."""
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) == weak:
        return x
    return to_weak(x) if weak else convert(x, x.dtype)


def vary_like(x: jax.Array, aval: AbstractValue) -> jax.Array:
    """Mark `x` as varying over the `shard_map` axes over which `aval` varies."""
    return vary(x, varying_axes(aval) - varying_axes(x))


def spec_of(aval: AbstractValue) -> tuple[Any, ...]:
    """Along which `Explicit` mesh axes each axis of an array of this type is spread; None: along none."""
    return tuple(aval.sharding.spec)


def varying_axes(x: Any) -> frozenset[Any]:
    """The `shard_map` axes over which an array varies, or one of this type. `mat` has no public name."""
    aval: AbstractValue = x if isinstance(x, core.AbstractValue) else jax.typeof(x)
    return aval.mat.varying


def with_varying_axes(aval: AbstractValue, axes: frozenset[Any]) -> AbstractValue:
    """A type that varies over these axes and no others. It may have been made outside of the `shard_map`."""
    aval = on_mesh(aval) if axes else aval
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def on_mesh(aval: AbstractValue) -> AbstractValue:
    """A type that knows the mesh of the trace. The type of a constant knows none, and gets it here."""
    if not aval.sharding.mesh.empty:
        return aval
    mesh = jax.sharding.get_abstract_mesh()
    return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(aval.shape))))


def vary(x: jax.Array, axes: Any) -> jax.Array:
    """Mark an array as varying over these axes, over which it does not."""
    return lax.pcast(x, tuple(axes), to="varying") if axes else x  # pyright: ignore[reportReturnType]


def is_nonzero(tangent: Any) -> bool:
    """Whether a tangent is more than a symbolic zero (integers have tangents of dtype float0)."""
    return not isinstance(tangent, ad.Zero) and jax.typeof(tangent).dtype != _dtypes.float0


def no_tangent(x: Any) -> SymbolicZero:
    """The tangent of an array that has none, in the rule of a `jax.custom_jvp`; it varies as the array does."""
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def has_tangents(x: Any) -> bool:
    """Whether there can be a tangent of an array, or of one of this type, that is more than a symbolic zero."""
    aval: AbstractValue = x if isinstance(x, core.AbstractValue) else jax.typeof(x)
    return aval.to_tangent_aval().dtype != _dtypes.float0
