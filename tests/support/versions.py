"""What versions of JAX cannot do, also without loopax."""

import jax
import pytest

# The object that stands for a mapped `jax.custom_vjp` has no derivatives there.
maps_custom_vjp = pytest.mark.xfail(
    getattr(jax.config, "jax_custom_vjp3", False) and jax.__version_info__ < (0, 10, 1),
    reason="with its flag `jax_custom_vjp3`, JAX 0.10.0 cannot linearise a mapped `jax.custom_vjp`",
    raises=TypeError,
)
