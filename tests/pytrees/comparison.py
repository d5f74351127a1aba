"""What the tests of pytrees share: the loops of three steps, of loopax and of `jax.lax`, and comparison to the type."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.blocks import fori_loop, scan, while_loop

KINDS: list[Any] = ["auto", "lax", "checkpointed", "bounded", "residuals"]
LOOPS = [while_loop, fori_loop, scan]
EACH_LOOP = pytest.mark.parametrize("loop", LOOPS)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def lax_loop(step: Any, init: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init))[1]


def same(actual: Any, expected: Any) -> None:
    """Equal pytrees, to the type of every leaf; those that are not arrays are identical."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array)
        if not isinstance(e, jax.Array):
            assert a is e
            continue
        assert jax.typeof(a) == jax.typeof(e)  # weak types included
        a, e = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, e))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def eagerly(f: Any) -> Any:
    return f
