"""What loopax chooses by: the memory that a gradient may take, and what basic operations cost.

Settings are a part of the key of each trace and of each cache here, so what is traced later follows them.
"""

from functools import cache
from typing import Any, NamedTuple

import jax

DEFAULT_MEMORY = 256 * 2**20  # bytes

# The constants of a machine, from which `core/jaxpr/cost.py` tells what a step costs.
#
# Nothing is measured unless a user asks for it (`python -m loopax calibrate`). The constants that hold until then
# were fitted on a CPU (docs/benchmark.md). On a GPU all but the last two are a thousand times as small, and their
# ratios similar.

NEAR_BYTES = 3 * 2**18  # in the cache of one core
CACHE_BYTES = 24 * 2**20


class Costs(NamedTuple):
    """In nanoseconds."""

    near_byte: float = 0.025  # stored and read again, if all that is stored fits in the cache of a core
    cached_byte: float = 0.17  # if it fits in a cache
    memory_byte: float = 0.9  # if it does not
    product: float = 0.019  # a multiplication or an addition of a matrix product
    convolution: float = 0.19
    elementwise: float = 0.22  # an element of a cheap operation
    function: float = 0.6  # of one that takes some instructions, such as `exp` and `tanh`
    narrow_function: float = 6.2  # and on top of it in rows of few elements, for which there are no vector instructions
    slow_function: float = 3.8  # of one that takes many, such as `sin` and `pow`
    comparison: float = 8.5  # of a sort
    call: float = 200.0  # an operation that is not fused with others, on top of its arithmetic
    step: float = 100.0  # of a loop, on top of its body

    def storing(self, num_bytes: float, in_all: float) -> float:
        """Storing so many bytes per step and reading them again, if there are so many in all."""
        if in_all <= NEAR_BYTES:
            return num_bytes * self.near_byte
        return num_bytes * (self.cached_byte if in_all <= CACHE_BYTES else self.memory_byte)


class Settings(NamedTuple):
    """What is set by `loopax.configure`."""

    memory: int = DEFAULT_MEMORY  # of `Auto()`
    costs: Costs = Costs()


# What holds from the start: `loopax._src.configuration` replaces it by what the environment says.
default = Settings()


@cache
def context() -> Any:
    """What JAX knows of the settings: it compiles a function again under others.

    It is made when a program sets something. A new context is itself another setting, and loopax may be imported while
    a function is traced: the function would be compiled again when it is called again.
    """
    return jax.make_user_context(default)


def settings() -> Settings:
    """The settings that are in use here."""
    return context().value if context.cache_info().currsize else default


def costs() -> Costs:
    """The constants that are in use here."""
    return settings().costs
