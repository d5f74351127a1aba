"""Gradients of weights that all devices share, through loops of which each device takes another number of steps.

A program of its own, for `sharding/test_shared_weights.py`: where devices wait for each other it does not end. With
`second` as its argument it takes second derivatives of all programs, without it first ones, and second ones of three.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.support.problem import KINDS, name_of

BOUND = 4
MOST = 12  # as many as any device takes
WEIGHT = np.float64(0.7)


def chosen(take, new, old):
    return jax.tree.map(lambda new, old: jnp.where(take, new, old), new, old)


class Plain:
    """Loops of the reference: scans of JAX that take `MOST` steps, of which a device uses its own."""

    def fori_loop(self, lower, upper, body, init):
        step = lambda i, c: (i + 1, body(i, c))
        return self.while_loop(lambda c: c[0] < upper, lambda c: step(*c), (lower, init))[1]

    def while_loop(self, cond, body, init):
        init = jax.tree.map(jnp.asarray, init)
        return lax.scan(lambda c, _: (chosen(cond(c), body(c), c), None), init, None, MOST)[0]

    def scan(self, f, init, xs, length, reverse=False, stop=None):
        def step(carry, row):
            i, x = row
            c, going = carry
            take = going & (i < length)
            new, y = f(c, x)
            stopped = take & stop(new, y) if stop is not None else False
            return (chosen(take, new, c), going & ~jnp.asarray(stopped)), jnp.where(take, y, 0.0)

        rows = np.arange(len(xs)), xs
        (c, _), ys = lax.scan(step, (jnp.asarray(init), jnp.asarray(True)), rows, reverse=reverse)
        return c, ys


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


ROWS = np.linspace(0.5, 1.5, BOUND)


def fori(loops, w, x, n):
    return loops.fori_loop(0, n, lambda i, y: jnp.sin(w * y) + 0.3 * w, x)


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
        y = lax.fori_loop(0, 2, lambda i, y: product(w, y), y)
        return lax.cond(y > 0.2, lambda: jnp.sin(w * y), lambda: w * y)

    return loops.fori_loop(0, n, lambda i, y: jax.jit(lambda y: jax.nn.softplus(w) * inner(y))(y), x)


PROGRAMS = [fori, while_, while_on_value, scan, scan_reverse, scan_stop]
PROGRAMS += [inner_varies, outer_varies, both_vary, higher_order]


def first(f):
    """The value and the derivative."""
    return jax.value_and_grad(f)


def forward_over_reverse(f):
    """The derivative and the second one."""
    return lambda w: jax.jvp(jax.grad(f), (w,), (jnp.ones(()),))


def second(f):
    """The second derivative forward over reverse with all that this computes, then reverse over reverse."""
    return lambda w: (*forward_over_reverse(f)(w), jax.grad(jax.grad(f))(w))


def derivatives(f):
    """Value, and derivatives up to the second, which are taken in two ways."""
    return lambda w: (*first(f)(w), *second(f)(w)[1:])


def mesh(shape=(8,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


SHARED, OWN, BOTH = PartitionSpec(), PartitionSpec("d"), PartitionSpec(("d", "m"))
XS, COUNTS = np.linspace(0.4, 1.0, 8), np.arange(8, dtype=np.int32) % (BOUND + 1)


def weighed(results):
    return (results * jnp.arange(1.0, 9)).sum()


def on_devices(shard, rewritten=lambda f: f):
    """Eight devices, of which each has its number of steps; `shard(w, x, n)` is the result of one."""
    shards = rewritten(lambda w, x, n: shard(w, x[0], n[0])[None])
    mapped = jax.shard_map(shards, mesh=mesh(), in_specs=(SHARED, OWN, OWN), out_specs=OWN)
    return lambda w: weighed(mapped(w, XS, COUNTS))


def on_rows_of_devices(shard):
    """Four rows of two devices: those of a row take the same number of steps, and all share the weight."""
    shards = lambda w, x, n: shard(w, x[0], n[0])[None]
    mapped = jax.shard_map(shards, mesh=mesh((4, 2), ("d", "m")), in_specs=(SHARED, BOTH, OWN), out_specs=BOTH)
    return lambda w: weighed(mapped(w, XS, COUNTS[:4]))


def in_lanes(shard):
    """Two lanes on each device."""
    starts, shares = jnp.array([1.0, 0.5]), jnp.array([1, 2], jnp.int32)
    return lambda w, x, n: jax.vmap(lambda s, k: shard(w, s * x, n // k))(starts, shares).sum()


def plain(f, counts=COUNTS, lanes=((1.0, 1),)):
    """The reference: all lanes on one device, without `shard_map`."""
    starts, shares = np.concatenate([s * XS for s, _ in lanes]), np.concatenate([counts // m for _, m in lanes])
    weights = np.tile(np.arange(1.0, 9), len(lanes))
    return lambda w: weights @ jax.vmap(lambda x, n: f(Plain(), w, x, n))(starts, shares)


def of(f, **options):
    return lambda w, x, n: f(Loops(**options), w, x, n)


class Lax:
    """The loops of JAX, for `rewrite_loops` to find."""

    fori_loop, while_loop = staticmethod(lax.fori_loop), staticmethod(lax.while_loop)


def while_with_weight(loops, w, x, n):
    """A leaf of the carry does not vary in JAX's eyes, though devices stop at different values of it."""
    inner = jax.jit(lambda y, v: (jnp.sin(w * y) * v + 0.3 * w, v * w))

    def step(c):
        y, v = inner(c[0], c[2])
        return y, c[1] + 1, v

    return loops.while_loop(lambda c: c[1] < n, step, (x, 0, w))[0]


def nested_while(loops, w, x, n):
    return loops.fori_loop(0, n, lambda i, y: while_with_weight(loops, w, y, n - i), x)


def cases():
    """Name -> (what is computed on devices, the same without them)."""
    for f in PROGRAMS:
        alone = plain(f)
        yield f.__name__, (on_devices(of(f)), alone)
        if f in (fori, while_on_value, scan):
            for kind in KINDS if f is fori else KINDS[1::2]:
                yield f"{f.__name__} {name_of(kind)}", (on_devices(of(f, kind=kind, max_steps=2 * BOUND)), alone)
    for f in (scan, higher_order):
        counts = COUNTS[:4].repeat(2)
        yield f"{f.__name__} on rows of devices", (on_rows_of_devices(of(f)), plain(f, counts))
    lanes = [(1.0, 1), (0.5, 2)]
    for f, how in ((fori, "compact"), (while_on_value, "lockstep"), (inner_varies, "lockstep")):
        yield f"{f.__name__} in {how} lanes", (on_devices(in_lanes(of(f, lanes=how))), plain(f, lanes=lanes))
    yield "free lanes", (on_devices(in_lanes(free)), plain(outer_varies, lanes=lanes))
    for f in (while_with_weight, nested_while):
        shard = lambda w, x, n, f=f: f(Lax, w, x, n)
        yield f"{f.__name__} rewritten", (on_devices(shard, lx.rewrite_loops), plain(f))
    around = lx.rewrite_loops(on_devices(lambda w, x, n: while_with_weight(Lax, w, x, n)))
    yield "rewritten around the devices", (around, plain(while_with_weight))


def free(w, x, n):
    inner = lambda y: lx.fori_loop(0, 2, lambda i, y: jnp.sin(w * y), y)
    return lx.fori_loop(0, n, lambda i, y: w * inner(y) + 0.1, x, lanes="free")


def orders(name, again):
    """Values and gradients of all programs, with second derivatives of three; then those of the others.

    Second derivatives are taken in two ways where the kind is the default one, and forward over reverse elsewhere.
    """
    if not again:
        return derivatives if name in DEEP else first
    return second if name in {f.__name__ for f in PROGRAMS} else forward_over_reverse


DEEP = ("fori", "scan", "scan_stop")


def main(again):
    found, known = {}, {}
    for name, (devices, alone) in cases():
        if again and name in DEEP:
            continue
        if alone not in known:
            known[alone] = jax.jit(orders(name, again)(alone))(WEIGHT)
        results = jax.jit(orders(name, again)(devices))(WEIGHT)
        found[name] = [np.array(numbers).tolist() for numbers in (results, known[alone][: len(results)])]
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main("second" in sys.argv)
