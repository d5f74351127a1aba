"""Settings of JAX that belong to a thread, and to the place where a stream is made."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax


class Settings(NamedTuple):
    """Those that decide about arrays."""

    x64: bool
    promotion: Any
    device: Any
    prng: Any

    @classmethod
    def here(cls) -> "Settings":
        """As they are now, in this thread."""
        config: Any = jax.config
        return cls(
            bool(config.jax_enable_x64),
            config.jax_numpy_dtype_promotion,
            config.jax_default_device,
            config.jax_default_prng_impl,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Also somewhere else."""
        with ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.numpy_dtype_promotion(self.promotion))
            stack.enter_context(jax.default_device(self.device))
            stack.enter_context(jax.default_prng_impl(self.prng))
            yield
