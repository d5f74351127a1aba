"""What gradients store, as compiled for a GPU, beside what their kinds promise.

A TPU keeps arrays of this size in its vector memory, which XLA's analysis leaves out.
"""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx
from benchmarks.accelerators.compilers import TARGETS, compiled
from benchmarks.accelerators.counted import CHECKPOINTS, STEPS, products, while_loss

_UNITS, _MIB = 512, 2**20
_H, _W = jnp.ones((_UNITS, _UNITS)), 0.01 * jnp.ones((_UNITS, _UNITS))  # a carry of one MiB
Loss = Callable[[Array, Array], Array]


def _fori_loop(kind: lx.Kind) -> Loss:
    return lambda h, w: lx.fori_loop(0, STEPS, lambda i, h: products(h, w), h, kind=kind).sum()


def _leapfrog(c: Any, w: Array) -> Any:
    p = c[1] - 0.1 * jnp.sin(w @ c[0])
    return c[0] + 0.1 * p, p


def _leapfrogs(h: Array, w: Array) -> Array:
    """Two carries of a MiB."""

    def back(i: Any, c: Any) -> Any:
        q = c[0] - 0.1 * c[1]
        return q, c[1] + 0.1 * jnp.sin(w @ q)

    kind = lx.Reversible(back, rtol=None)
    return lx.fori_loop(0, STEPS, lambda i, c: _leapfrog(c, w), (h, h), kind=kind)[0].sum()


def _contraction(c: Any, w: Array) -> Any:
    return 0.1 * products(c[0], w) + 0.1, c[0]


def _fixed_point(h: Array, w: Array) -> Array:
    moves = lambda c: jnp.abs(c[0] - c[1]).sum() > 1e-5
    derivative = lx.Implicit(unsolved="nan")
    return lx.while_loop(moves, lambda c: _contraction(c, w), (h, h + 1), derivative=derivative)[0].sum()


# By name: a loss, one of its steps, its carry, and the MiB that are promised.
CASES: dict[str, tuple[Loss, Callable[..., Any], Any, float]] = {
    f"Checkpointed({CHECKPOINTS})": (_fori_loop(lx.Checkpointed(CHECKPOINTS)), products, _H, CHECKPOINTS),
    "Checkpointed(40)": (_fori_loop(lx.Checkpointed(40)), products, _H, 40),
    "Auto(memory=16 MiB)": (_fori_loop(lx.Auto(memory=16 * _MIB)), products, _H, 16),
    f"while_loop, Checkpointed({CHECKPOINTS})": (
        while_loss(lx.while_loop, kind=lx.Checkpointed(CHECKPOINTS))(products),
        products,
        _H,
        CHECKPOINTS,
    ),
    f"while_loop, Equinox, {CHECKPOINTS} checkpoints": (
        while_loss(eqxi.while_loop, kind="checkpointed", checkpoints=CHECKPOINTS)(products),
        products,
        _H,
        CHECKPOINTS,
    ),
    "Reversible": (_leapfrogs, _leapfrog, (_H, _H), 2),
    "Implicit": (_fixed_point, _contraction, (_H, _H), 2),
}


def row(name: str) -> dict[str, Any]:
    """MiB of a gradient for an H100, and of the derivative of one step, with the cotangent that it is given."""
    loss, step, carry, promised = CASES[name]
    of_all = compiled(TARGETS["h100"], jax.grad(loss, (0, 1)), _H, _W).temporary / _MIB

    def derivative(carry: Any, w: Array, cotangent: Any) -> Any:
        return jax.vjp(step, carry, w)[1](cotangent)

    cotangent = sum(x.nbytes for x in jax.tree.leaves(carry))
    of_step = (compiled(TARGETS["h100"], derivative, carry, _W, carry).temporary + cotangent) / _MIB
    return {
        "gradient": name,
        "promised, MiB": promised,
        "temporary, MiB": round(of_all, 1),
        "of one step, MiB": round(of_step, 1),
        "less one step / promised": round((of_all - of_step) / promised, 2),
    }


def rows() -> list[dict[str, Any]]:
    """Of all."""
    return [row(name) for name in CASES]
