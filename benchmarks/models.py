"""Models in the carry: what they cost beside the same model closed over as plain arrays, and beside NNX's own loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

LANES, SIZE, BOUND = 32, 256, 64

CLOSED_OVER, NNX = "arrays, closed over", "NNX module in the carry"


class Layer(nnx.Module):
    """A weight that stays, and a counter that changes."""

    def __init__(self, weight: Array) -> None:
        self.weight = nnx.Param(weight)
        self.count = nnx.Variable(jnp.int32(0))

    def __call__(self, x: Array) -> Array:
        """One step."""
        self.count[...] += 1
        return jnp.tanh(x @ self.weight[...])


def closed_over(how: Any) -> Callable[..., Array]:
    """One lane with plain arrays."""

    def lane(weight: Array, n: Array, x: Array) -> Array:
        body = lambda _, c: (jnp.tanh(c[0] @ weight), c[1] + 1)
        last, _ = lx.fori_loop(0, n, body, (x, jnp.int32(0)), max_steps=BOUND, throw=False, lanes=how)
        return (last**2).sum()

    return lane


def with_nnx(how: Any) -> Callable[..., Array]:
    """One lane with a module."""

    def step(_: Any, carry: Any) -> Any:
        layer, x = carry
        return layer, layer(x)

    def lane(layer: Layer, n: Array, x: Array) -> Array:
        carry = (lx.local(layer), x)
        _, last = lx.fori_loop(0, n, step, carry, max_steps=BOUND, throw=False, lanes=how)
        return (last**2).sum()

    return lane


def arguments() -> tuple[Array, ...]:
    """The weight, and the number of steps and the start of each lane."""
    random = np.random.RandomState(0)
    weight = jnp.asarray(random.randn(SIZE, SIZE) / SIZE**0.5, jnp.float32)
    counts = jnp.asarray(random.randint(1, BOUND + 1, LANES), jnp.int32)
    return weight, counts, jnp.asarray(random.randn(LANES, SIZE), jnp.float32)


def gradient_of(lane: Callable[..., Array], make: Callable[[Array], Any]) -> Callable[..., Array]:
    """With respect to the weight of the model that all lanes share."""
    return jax.grad(lambda weight, n, x: jax.vmap(lane, (None, 0, 0))(make(weight), n, x).sum())


def shared_weights(how: str) -> Group:
    """The gradient in a batch whose lanes take numbers of steps of their own."""
    programs = {
        CLOSED_OVER: gradient_of(closed_over(how), lambda weight: weight),
        NNX: gradient_of(with_nnx(how), Layer),
    }
    cases = [Case(name, program, arguments()) for name, program in programs.items()]
    targets = [
        Target("time", NNX, CLOSED_OVER, 1.3),
        Target("temporary memory", NNX, CLOSED_OVER, 1.3, "temporary_mib"),
    ]
    title = f"NNX: gradient, {LANES} lanes, {SIZE} x {SIZE} weights, per-lane counts, {how}"
    return Group(title, cases, targets, rounds=15)


# ---- one loop, beside NNX's own

STEPS = 1000


def with_nnx_scan(weight: Array, x: Array, _: Array) -> Array:
    """A number of steps that is known when the program is compiled."""

    @nnx.scan(in_axes=nnx.Carry, out_axes=nnx.Carry, length=STEPS)
    def scanned(carry: Any) -> Any:
        layer, x = carry
        return layer, layer(x)

    return (scanned((Layer(weight), x))[1] ** 2).sum()


def while_loop(loop: Callable[..., Any], **options: Any) -> Callable[..., Array]:
    """A condition on a counter in the carry."""

    def program(weight: Array, x: Array, n: Array) -> Array:
        def step(carry: Any) -> Any:
            layer, x, i, n = carry
            return layer, layer(x), i + 1, n

        start = Layer(weight), x, jnp.int32(0), n
        return (loop(lambda carry: carry[2] < carry[3], step, start, **options)[1] ** 2).sum()

    return program


def one_loop(differentiated: bool) -> Group:
    """A batch through one layer, again and again: a module in the carry of one loop."""
    bound: Any = {"max_steps": STEPS, "throw": False}
    programs = {"nnx.scan, static n": with_nnx_scan}
    if differentiated:
        kinds = [lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
    else:
        kinds = [lx.Lax()]
        programs["nnx.while_loop"] = while_loop(nnx.while_loop)
    programs |= {f"loopax while_loop, {kind}": while_loop(lx.while_loop, kind=kind, **bound) for kind in kinds}
    if differentiated:
        programs = {name: jax.grad(program) for name, program in programs.items()}
    weight, _, x = arguments()
    cases = [Case(name, program, (weight, x, jnp.int32(STEPS))) for name, program in programs.items()]
    what = "gradient" if differentiated else "forward"
    return Group(f"NNX: {what}, batch {LANES}, {SIZE} x {SIZE} weights, n = {STEPS}", cases, [])


def groups() -> list[Group]:
    """All tables."""
    return [*(shared_weights(how) for how in ("lockstep", "compact")), one_loop(False), one_loop(True)]
