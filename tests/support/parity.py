"""Comparison with `jax.lax`, to the type of every result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def same(actual: Any, expected: Any) -> None:
    """Equal pytrees, to the dtype and weak type of every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(jnp.asarray(a)) == jax.typeof(jnp.asarray(e))  # weak types included
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
