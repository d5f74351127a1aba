"""Mutable arrays (`jax.new_ref`): what uses them, and programs that carry their values in place of them."""

from typing import Any

import jax
from jax import core
from jax._src.state import discharge as _discharge
from jax.extend.core import ClosedJaxpr

_EFFECTS = ("ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect")


def is_reference(x: Any) -> bool:
    """Whether this is a mutable array, or a type of one; the class is not public."""
    aval = x if isinstance(x, core.AbstractValue) else getattr(x, "aval", None)
    return "Ref" in type(aval).__name__


def uses_references(closed: ClosedJaxpr) -> bool:
    """Whether a program takes mutable arrays, or makes some."""
    takes = any(map(is_reference, closed.in_avals))
    return takes or any(type(effect).__name__ in _EFFECTS for effect in closed.effects)


def with_values(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with values in place of mutable arrays: it takes them, and their last values are its last results.

    JAX calls it "discharging state", which has no public name. A program must have no constants.
    """
    if jax.__version_info__ < (0, 10, 1):
        jaxpr, consts = _discharge.discharge_state(closed.jaxpr, closed.consts)  # pyright: ignore
        return ClosedJaxpr(jaxpr, consts)
    # Functions of `jnp` that are objects stay what they are: they have derivatives of their own.
    return _discharge.discharge_state(closed, lower=False)
