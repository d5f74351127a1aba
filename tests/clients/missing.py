"""Clients that cannot be imported on a version of JAX: their programs run on the others only."""

from typing import NamedTuple

import jax


class Missing(NamedTuple):
    """Why a client is missing."""

    file: str  # its programs
    error: str  # how the message of its import begins


# By version of JAX, and by the name of the client. A test asserts the errors, so the list cannot grow old.
MISSING: dict[str, dict[str, Missing]] = {"0.12": {}}


def missing_here() -> dict[str, Missing]:
    """Those that are missing on this version."""
    return MISSING.get(".".join(jax.__version__.split(".")[:2]), {})
