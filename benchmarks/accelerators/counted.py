"""Loops of `jax.lax`, of Equinox and of loopax side by side, as they are compiled for each device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array, lax

import loopax as lx
from benchmarks.accelerators.compilers import Compiled, Target, compiled, steps_taken
from benchmarks.accelerators.counting import While, kernels_started, loops
from benchmarks.accelerators.foretold import DEVICES, milliseconds

LANES, UNITS, STEPS = 64, 64, 200
CHECKPOINTS = 10


def products(h: Array, w: Array) -> Array:
    """Two products and a function."""
    return jnp.tanh((h @ w) @ w)


def elementwise(h: Array, w: Array) -> Array:
    """A few functions of each number."""
    return h + 0.01 * (jnp.sin(h) * w - h)


BODIES: dict[str, tuple[Callable[..., Array], Array, Array]] = {
    "two products and tanh": (products, jnp.ones((LANES, UNITS)), 1.05 * jnp.eye(UNITS)),
    "elementwise": (elementwise, jnp.ones(4096), jnp.full(4096, 0.9)),
}


class Contender(NamedTuple):
    """A loop of a library."""

    program: str  # those of one program are compared
    name: str
    of: Callable[[Callable[..., Array]], Callable[..., Any]]  # a step -> function of a state and weights
    counts_steps: bool = True  # `vmap` of `lax.while_loop` takes no callback, by which steps are counted


def _scan(scan: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def of(step: Callable[..., Array]) -> Callable[..., Any]:
        def loss(h: Array, w: Array) -> Array:
            xs = jnp.linspace(0.0, 1.0, STEPS)
            h, ys = scan(lambda h, x: (step(h, w) + 0.01 * x, h.mean()), h, xs, **options)
            return h.sum() + ys.sum()

        return loss

    return of


def while_loss(while_loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step -> a loss of a state and weights, of as many steps as follow from the state: no compiler knows them."""

    def of(step: Callable[..., Array]) -> Callable[..., Any]:
        goes_on = lambda c: c[0] < STEPS + 0 * c[1].sum()
        take = lambda w: lambda c: (c[0] + 1.0, step(c[1], w))
        return lambda h, w: while_loop(goes_on, take(w), (jnp.zeros(()), h), **options)[1].sum()

    return of


def batch_loss(while_loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """So many lanes, each of as many steps as it says, in lockstep."""

    def of(step: Callable[..., Array]) -> Callable[..., Any]:
        def lane(length: Array, h: Array, w: Array) -> Array:
            goes_on, take = lambda c: c[0] < length, lambda c: (c[0] + 1.0, step(c[1], w))
            return while_loop(goes_on, take, (jnp.zeros(()), h), **options)[1].sum()

        def loss(h: Array, w: Array) -> Array:
            lengths, shared = STEPS - 1.0 * jnp.arange(LANES), w.ndim > 1
            w = w if shared else w.reshape(LANES, -1)
            return jax.vmap(lane, (0, 0, None if shared else 0))(lengths, h.reshape(LANES, -1), w).sum()

        return loss

    return of


def by_hand_loss(while_loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """So many lanes as one loop on larger arrays, which masks nothing: each takes as many steps."""

    def of(step: Callable[..., Array]) -> Callable[..., Any]:
        def loss(h: Array, w: Array) -> Array:
            shared = w.ndim > 1
            of_lanes, w = jax.vmap(step, (0, None if shared else 0)), w if shared else w.reshape(LANES, -1)
            goes_on, take = lambda c: c[0] < STEPS + 0 * c[1].sum(), lambda c: (c[0] + 1.0, of_lanes(c[1], w))
            return while_loop(goes_on, take, (jnp.zeros(()), h.reshape(LANES, -1)), **options)[1].sum()

        return loss

    return of


def _lax_while_loop(*given: Any) -> Any:
    return lax.while_loop(*given)  # which numbers itself where it is called


def gradient_of(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda step: jax.grad(of(step), (0, 1))


_EQUINOX = {"kind": "checkpointed", "checkpoints": CHECKPOINTS}
_FEW = lx.Checkpointed(CHECKPOINTS)
CONTENDERS = [
    Contender("scan", "lax", _scan(lax.scan)),
    Contender("scan", "loopax", _scan(lx.scan)),
    Contender("while_loop", "lax", while_loss(_lax_while_loop)),
    Contender("while_loop", "loopax", while_loss(lx.while_loop)),
    Contender("while_loop", "loopax, max_steps", while_loss(lx.while_loop, max_steps=2 * STEPS)),
    Contender("batch of while loops", "lax", batch_loss(_lax_while_loop), False),
    Contender("batch of while loops", "loopax", batch_loss(lx.while_loop), False),
    Contender("batch of while loops", "loopax, max_steps", batch_loss(lx.while_loop, max_steps=2 * STEPS), False),
    Contender("gradient of a scan", "lax", gradient_of(_scan(lax.scan))),
    Contender("gradient of a scan", "loopax", gradient_of(_scan(lx.scan))),
    *(
        Contender("gradient of a scan", f"loopax {kind!r}", gradient_of(_scan(lx.scan, kind=kind)))
        for kind in (lx.Residuals(), lx.Bounded(), lx.Checkpointed(), lx.Checkpointed(CHECKPOINTS))
    ),
    Contender("gradient of a scan", f"Equinox, {CHECKPOINTS} checkpoints", gradient_of(_scan(eqxi.scan, **_EQUINOX))),
    Contender("gradient of a while_loop", "loopax", gradient_of(while_loss(lx.while_loop))),
    Contender("gradient of a while_loop", f"loopax {_FEW!r}", gradient_of(while_loss(lx.while_loop, kind=_FEW))),
    Contender(
        "gradient of a while_loop",
        f"Equinox, {CHECKPOINTS} checkpoints",
        gradient_of(while_loss(eqxi.while_loop, **_EQUINOX)),
    ),
    Contender("gradient of a batch", f"loopax {_FEW!r}", gradient_of(batch_loss(lx.while_loop, kind=_FEW)), False),
    Contender("gradient of a batch", f"by hand, {_FEW!r}", gradient_of(by_hand_loss(lx.while_loop, kind=_FEW)), False),
    Contender(
        "gradient of a batch",
        f"Equinox, {CHECKPOINTS} checkpoints",
        gradient_of(batch_loss(eqxi.while_loop, **_EQUINOX)),
        False,
    ),
]


class Counted(NamedTuple):
    """What is counted of a program."""

    program: Compiled
    loops: list[While]
    kernels: int | None  # of all steps of all loops
    milliseconds: float | None  # foretold

    def row(self) -> dict[str, Any]:
        """As a row of a table; a loop is its kernels, with its trips if the compiler knows them."""
        shown = (f"{loop.kernels}" + ("" if loop.trips is None else f" x {loop.trips}") for loop in self.loops)
        return {
            "kernels of a step": ", ".join(shown),
            "kernels in all": self.kernels,
            "foretold, ms": None if self.milliseconds is None else round(self.milliseconds, 2),
            "trip counts known": f"{sum(loop.trips is not None for loop in self.loops)} of {len(self.loops)}",
            "copies in steps": max((max(loop.copies, default=0) for loop in self.loops), default=0),
            "temporary bytes": self.program.temporary,
            "seconds": round(self.program.seconds, 1),
        }


def counted(target: Target, contender: Contender, body: str) -> Counted:
    """Compile and count."""
    step, *arguments = BODIES[body]
    function = contender.of(step)
    program = compiled(target, function, *arguments)
    found = loops(program.text)
    if not contender.counts_steps:
        return Counted(program, found, None, None)
    taken = steps_taken(target, function, *arguments)
    kernels = kernels_started(found, taken)
    time = None if kernels is None else milliseconds(program.text, DEVICES[target.name], taken)
    return Counted(program, found, kernels, time)
