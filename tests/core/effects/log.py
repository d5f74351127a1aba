"""What callbacks are called with."""

from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback


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
