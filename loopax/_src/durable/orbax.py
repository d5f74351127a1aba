"""Orbax and TensorStore, which only durable loops need: imported when the first one runs."""

import importlib
from typing import Any


def ocp() -> Any:
    """The module `orbax.checkpoint`."""
    return _imported("orbax.checkpoint")


def tensorstore() -> Any:
    """The module `tensorstore`, on which Orbax depends."""
    return _imported("tensorstore")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loopax.durable saves with Orbax, and {name} cannot be imported. Install it: "
            "`pip install loopax[durable]`."
        ) from error
