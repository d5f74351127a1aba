"""What callbacks are called with."""

from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

import loopax as lx


class Log:
    """What callbacks were called with, when a function runs."""

    def __init__(self):
        self.values = []

    def in_order(self, function, *args):
        """In the order of the calls."""
        self.values.clear()
        jax.block_until_ready(function(*args))
        jax.effects_barrier()
        return list(self.values)

    def of(self, function, *args):
        """Sorted."""
        return sorted(self.in_order(function, *args))

    def __call__(self, x):
        jax.debug.callback(self.append, x)
        return x

    def append(self, x: Any) -> None:
        """Called back with this value."""
        self.values.append(float(x))

    def append_and_return(self, x: Any) -> Any:
        """Called back with this value, which is the result."""
        self.append(x)
        return np.asarray(x)


# (log, x) -> what the callback returns, or None. What JAX lets a program do besides its results:
EFFECTS = {
    "callback": lambda log, x: jax.debug.callback(log.append, x),
    "ordered callback": lambda log, x: jax.debug.callback(log.append, x, ordered=True),
    "io_callback": lambda log, x: io_callback(log.append, None, x),
    "ordered io_callback": lambda log, x: io_callback(log.append, None, x, ordered=True),
    "io_callback with a result": lambda log, x: io_callback(log.append_and_return, jax.typeof(x), x),
}

# (step, x, number of steps) -> what each loop makes of the step
FORMS = {
    "fori_loop": lambda step, x, n, **options: lx.fori_loop(0, n, lambda i, x: step(x), x, max_steps=4, **options),
    "while_loop": lambda step, x, n, **options: lx.while_loop(
        lambda c: c[1] < n, lambda c: (step(c[0]), c[1] + 1), (x, 0), max_steps=4, **options
    )[0],
    "scan": lambda step, x, n, **options: lx.scan(lambda x, _: (step(x), None), x, length=n, max_steps=4, **options)[0],
    "rollout": lambda step, x, n, **options: lx.rollout(lambda x: (step(x), x), x, n, max_steps=4, **options)[0],
}

# (step, x) -> the step, once, in what a body may hold
INNER = {
    "jit": lambda step, x: jax.jit(step)(x),
    "cond": lambda step, x: jax.lax.cond(x >= 0, step, lambda x: x, x),
    "scan": lambda step, x: jax.lax.scan(lambda c, _: (step(c), None), x, None, length=1)[0],
    "while": lambda step, x: jax.lax.while_loop(lambda c: c[1] < 1, lambda c: (step(c[0]), c[1] + 1), (x, 0))[0],
    "loop": lambda step, x: lx.fori_loop(0, 1, lambda i, c: step(c), x),
    "traced length": lambda step, x: lx.fori_loop(0, (x >= 0).astype(int), lambda i, c: step(c), x),
    "nested": lambda step, x: jax.jit(lambda x: lx.fori_loop(0, 1, lambda i, c: jax.jit(step)(c), x))(x),
    "checkpoint": lambda step, x: jax.checkpoint(step)(x),
}
