"""The examples as modules, and the settings under which users run them."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FOLDER = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """A module of its own for each call, which a test may change."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def precision_of_a_user() -> Iterator[None]:
    """The settings that users have, not the strict ones of these tests."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def assert_nearly(ours: Any, theirs: Any, tolerance: float) -> None:
    """The largest difference in each array is small beside the array's largest entry."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))
