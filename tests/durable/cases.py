"""What the tests of durable loops share: comparison to the bit, runs that stop, and processes of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# One save takes as long as all else that a short run does. Options of runs of which only the end is looked at:
SELDOM: dict[str, Any] = {"checkpoint_every": 1000}


class StoppedError(Exception):
    """What a body raises in the middle of a run."""


def bits(leaf: Any) -> np.ndarray:
    """The bytes of an array, those of a PRNG key's integers."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return np.frombuffer(array.tobytes(), np.uint8)


def same_bits(actual: Any, expected: Any) -> None:
    """Equal pytrees, to the types of leaves and their last bits; what is not an array is identical."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array)
        if isinstance(e, jax.Array):
            assert jax.typeof(a) == jax.typeof(e)  # weak types included
            np.testing.assert_array_equal(bits(a), bits(e))
        else:
            assert a is e or a == e


def read_rows(ys: Any) -> Any:
    """The pytree of outputs in memory."""
    from loopax import durable

    is_rows = lambda y: isinstance(y, durable.Rows)
    return jax.tree.map(lambda y: jnp.asarray(y[:]) if is_rows(y) else y, ys, is_leaf=is_rows)


class Steps:
    """Counts the steps that are executed, and raises at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.taken: list[int] = []
        self.stop_at = stop_at

    def __call__(self, i: Any) -> None:
        if self.stop_at is not None and int(i) == self.stop_at:
            raise StoppedError(f"at step {int(i)}")
        self.taken.append(int(i))

    def at(self, i: Any) -> None:
        """To be called in a body."""
        jax.debug.callback(self, i)


def stopped(run: Callable[[], Any]) -> None:
    """Call what stops with an error of its body."""
    with pytest.raises(Exception, match="at step"):
        run()


def saves(directory: Path) -> list[int]:
    """The steps of the saves in a directory, in order."""
    return sorted(int(path.name) for path in (directory / "saves").iterdir() if path.name.isdigit())
