"""Gradients of weights that all devices share, through loops of which each device takes another number of steps.

A program of its own, for `transforms/test_shared_weights.py`: where devices wait for each other it does not end.
"""

import itertools
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.problem import KINDS

BOUND = 4
WEIGHT = jnp.float64(0.7)


class Plain:
    """The same loops in Python, for numbers of steps that are known."""

    def fori_loop(self, lower, upper, body, init):
        for i in range(int(lower), int(upper)):
            init = body(i, init)
        return init

    def while_loop(self, cond, body, init):
        while cond(init):
            init = body(init)
        return init

    def scan(self, f, init, xs, length, reverse=False, stop=None):
        ys = [jnp.zeros(())] * len(xs)
        for i in reversed(range(int(length))) if reverse else range(int(length)):
            init, ys[i] = f(init, xs[i])
            if stop is not None and stop(init, ys[i]):
                break
        return init, jnp.stack(ys)


class Loops:
    """Those of loopax, with these options."""

    def __init__(self, **options):
        self.options = options

    def fori_loop(self, *arguments):
        return lx.fori_loop(*arguments, **self.options)

    def while_loop(self, *arguments):
        return lx.while_loop(*arguments, **self.options)

    def scan(self, f, init, xs, length, **named):
        return lx.scan(f, init, xs, length, **named, kind=self.options.get("kind", "auto"))


ROWS = jnp.linspace(0.5, 1.5, BOUND)


def fori(loops, w, x, n):
    return loops.fori_loop(0, n, lambda i, y: jnp.sin(w * y) + w / (i + 1), x)


def while_(loops, w, x, n):
    body = lambda c: (jnp.sin(w * c[0]) + 0.3 * w, c[1] + 1)
    return loops.while_loop(lambda c: c[1] < n, body, (x, 0))[0]


def while_on_value(loops, w, x, n):
    """The predicate varies only because the carry does, which starts the same on all devices."""
    body = lambda c: (jnp.sin(w * c[0]) + 0.3 * w, c[1] + x)
    return loops.while_loop(lambda c: c[1] < 2.0, body, (w, 0.0))[0]


def scan(loops, w, x, n):
    """Rows depend on the weight, too, and some rows of the results do not depend on the carry."""
    step = lambda c, row: (jnp.sin(c * row * w), row * w)
    c, ys = loops.scan(step, x, ROWS * w, n)
    return c + (ys * jnp.arange(1.0, BOUND + 1)).sum()


def scan_reverse(loops, w, x, n):
    step = lambda c, row: (jnp.sin(c * row * w), c * w)
    c, ys = loops.scan(step, x * w, ROWS, n, reverse=True)
    return c + ys.sum()


def scan_stop(loops, w, x, n):
    step = lambda c, row: (c * row * w + x, c * w)
    c, ys = loops.scan(step, w, ROWS, BOUND, stop=lambda c, y: c > 1.3)
    return c + ys.sum()


def inner_varies(loops, w, x, n):
    inner = lambda y: loops.fori_loop(0, n, lambda i, y: jnp.sin(w * y), y)
    return loops.fori_loop(0, 2, lambda i, y: w * inner(y) + 0.1, x)


def outer_varies(loops, w, x, n):
    inner = lambda y: loops.fori_loop(0, 2, lambda i, y: jnp.sin(w * y), y)
    return loops.fori_loop(0, n, lambda i, y: w * inner(y) + 0.1, x)


def both_vary(loops, w, x, n):
    inner = lambda i, y: loops.while_loop(lambda c: c[1] < n - i, lambda c: (jnp.sin(w * c[0]), c[1] + 1), (y, 0))[0]
    return loops.fori_loop(0, n, lambda i, y: w * inner(i, y) + 0.1, x)


def higher_order(loops, w, x, n):
    """Functions with rules of their own, conditionals and `lax` loops in the body."""

    @jax.custom_jvp
    def product(a, b):
        return a * b

    product.defjvp(lambda p, t: (product(*p), t[0] * p[1] + p[0] * t[1]))

    @jax.checkpoint
    def inner(y):
        y = jax.lax.fori_loop(0, 2, lambda i, y: product(w, y), y)
        return jax.lax.cond(y > 0.2, lambda: jnp.sin(w * y), lambda: w * y)

    return loops.fori_loop(0, n, lambda i, y: jax.jit(lambda y: jax.nn.softplus(w) * inner(y))(y), x)


PROGRAMS = {
    f.__name__: f
    for f in (fori, while_, while_on_value, scan, scan_reverse, scan_stop)
    + (inner_varies, outer_varies, both_vary, higher_order)
}


def derivatives(f):
    """Value and derivatives up to the second, in three ways."""
    gradient = jax.grad(f)

    def found(w):
        value, slope = jax.value_and_grad(f)(w)
        return (
            value,
            slope,
            jax.jvp(gradient, (w,), (jnp.ones(()),))[1],
            jax.grad(gradient)(w),
            jax.jvp(f, (w,), (jnp.ones(()),))[1],
        )

    return found


def mesh(shape=(8,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def main(program, **options):
    f = PROGRAMS[program]
    xs, counts = jnp.linspace(0.4, 1.0, 8), jnp.arange(8, dtype=jnp.int32) % (BOUND + 1)
    spec = PartitionSpec("d")
    loops = Loops(**options)
    shard = lambda w, xs, ns: f(loops, w, xs[0], ns[0])[None]
    sharded = jax.shard_map(shard, mesh=mesh(), in_specs=(PartitionSpec(), spec, spec), out_specs=spec)
    return jax.jit(derivatives(lambda w: (sharded(w, xs, counts) * jnp.arange(1.0, 9)).sum()))(WEIGHT)


def wanted(program):
    f = PROGRAMS[program]
    xs, counts = jnp.linspace(0.4, 1.0, 8), jnp.arange(8, dtype=jnp.int32) % (BOUND + 1)
    with jax.ensure_compile_time_eval():
        pass
    plain = lambda w: sum((k + 1) * f(Plain(), w, x, int(n)) for k, (x, n) in enumerate(zip(xs, counts, strict=True)))
    return derivatives(plain)(WEIGHT)
