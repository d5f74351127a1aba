"""Whether LAPACK's threads get in the way of XLA's: then small factorizations take milliseconds."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.command.settings import Setting

FEW, MANY = 16, 32  # columns that OpenBLAS solves for on one thread, and on all of them
MOST = 2.0  # milliseconds that the second may take longer; the arithmetic takes a hundredth of it
ROUNDS = 24
NAME = "LAPACK's threads"


def lapack_threads() -> Setting:
    """How a triangular solve of LAPACK fares that uses several threads, right behind work of XLA's own threads."""
    if jax.default_backend() != "cpu":
        return Setting(NAME, "not used")
    return judged(*(_milliseconds(columns) for columns in (FEW, MANY)))


def judged(few: float, many: float) -> Setting:
    """What the milliseconds of a solve on one thread, and of one on several, mean."""
    if many - few <= MOST:
        return Setting(NAME, "in nobody's way")
    return Setting(
        NAME,
        f"{many - few:.0f} ms late",
        "OpenBLAS's threads wait for cores that XLA's have: set OPENBLAS_NUM_THREADS=1 before Python starts",
    )


def _milliseconds(columns: int) -> float:
    """The time of a product of XLA's and a solve behind it: the lower quartile, since others compute too."""
    matrix = jnp.eye(columns) + jnp.tril(jnp.ones((columns, columns)), -1) / columns
    large = jnp.ones((600, 600)) / 600

    @jax.jit
    def solve(large: Any, matrix: Any) -> Any:
        product, matrix = jax.lax.optimization_barrier((large @ large, matrix))
        return product, jax.scipy.linalg.solve_triangular(matrix, matrix, lower=True)

    jax.block_until_ready(solve(large, matrix))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(solve(large, matrix))
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[ROUNDS // 4]
