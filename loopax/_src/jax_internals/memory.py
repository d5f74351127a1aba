"""Memory spaces: whether an array is on the device or on the host. Only types say it, by a field that is not public."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, memory
from jax._src.lax import lax as _lax


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
    """An array in another memory. Transposed, it moves back to `src`; JAX does not keep one that is the device's."""
    space = memory_space(x)
    return x if space is to or memory.Space.Any in (space, to) else jax.device_put(x, to, src=space)


def where(pred: Any, a: Any, b: Any) -> jax.Array:
    """`jnp.where`, of arrays on the host, too."""
    return on_device(lambda a, b: jnp.where(pred, a, b), a, b)


def zero_on_host(dtype: Any) -> jax.Array | None:
    """A zero that a program has on the host from the start, as `lax.scan` begins rows there; None outside of programs.

    An array of zeros that is moved to the host would be made on the device first. Public JAX makes no such zero.
    """
    zero = _lax.empty2(dtype, memory_space=memory.Space.Host)
    return zero if isinstance(zero, core.Tracer) else None
