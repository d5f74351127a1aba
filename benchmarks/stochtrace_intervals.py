"""Confidence intervals of trace estimates: how often they have the trace in them, and what a tolerance costs.

All in float64; lanes one after the other, as each stops where it likes.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jax import Array

from benchmarks.groups import Findings
from benchmarks.stochtrace import LOOPAX
from benchmarks.stochtrace_errors import in_float64, keys, mapped, rms
from benchmarks.stochtrace_matrices import held_out_matrices, is_semidefinite, matrices
from loopax.stochtrace import TraceEstimate, estimate_trace

SIZE = 128
SEEDS = {"Hutchinson": 1000, "Hutch++": 400, "XTrace": 400, "XNysTrace": 400}
ORACLES = {
    "Hutchinson": (20, 36, 72, 200),
    "Hutch++": (24, 36, 72, 96),
    "XTrace": (24, 36, 72, 96),
    "XNysTrace": (24, 36, 72, 96),
}
LEVEL, COVERAGE, CONFIDENCE = 0.95, 0.92, 0.999
FEW, RATIO_OF_FEW, RATIO = 36, 1.6, 1.2  # products of the oracle, and bounds on the ratio up to so many and from 72 on


def intervals(name: str, of: Callable[[int], dict[str, Array]]) -> list[dict[str, Any]]:
    """The tolerance is the root mean square of the error with as many products as the oracle takes."""
    rows = [
        _rows_of(name, matrix_name, matrix) for matrix_name, matrix in of(SIZE).items() if _suits(name, matrix_name)
    ]
    return [row for some in rows for row in some]


def _suits(name: str, matrix_name: str) -> bool:
    return name != "XNysTrace" or is_semidefinite(matrix_name)


def _rows_of(name: str, matrix_name: str, matrix: Array) -> list[dict[str, Any]]:
    rows, trace, seeds = [], jnp.trace(matrix), SEEDS[name]
    for oracle in ORACLES[name]:
        with_count = _with_count(name, oracle)(matrix, keys(seeds, oracle))
        tolerance = _error_of_the_oracle(name, matrix, oracle, with_count)
        if tolerance > 1e-12 * jnp.abs(matrix).sum():  # more than rounding errors
            stopped = _within(name, _most(name, oracle))(matrix, keys(seeds, oracle + 1), tolerance)
            rows.append({"matrix": matrix_name} | _row(trace, with_count, stopped, oracle, seeds))
    return rows


def _error_of_the_oracle(name: str, matrix: Array, oracle: int, with_count: TraceEstimate) -> float:
    """For Hutchinson's estimate from the matrix itself."""
    if name != "Hutchinson":
        return rms(with_count.value - jnp.trace(matrix))
    symmetric = (matrix + matrix.T) / 2
    variance = 2 * (jnp.sum(symmetric**2) - jnp.sum(jnp.diag(symmetric) ** 2))
    return float(jnp.sqrt(variance / oracle))


def _most(name: str, oracle: int) -> int:
    """Room for twice as many products; but a basis has no more directions than there are, and is costly."""
    return 4096 if name == "Hutchinson" else min(2 * oracle, SIZE)


@cache
def _with_count(name: str, count: int) -> Callable[..., TraceEstimate]:
    batch = count if name == "Hutchinson" else 8
    program = lambda matrix, key: estimate_trace(matrix, key, estimator=LOOPAX[name], num_matvecs=count, batch=batch)
    return jax.jit(partial(mapped, program))


@cache
def _within(name: str, most: int) -> Callable[..., TraceEstimate]:
    def program(matrix: Array, keys: Array, tolerance: float) -> TraceEstimate:
        options: Any = {"atol": tolerance, "max_matvecs": most}
        within = lambda matrix, key: estimate_trace(matrix, key, estimator=LOOPAX[name], **options)
        return mapped(within, matrix, keys)

    return jax.jit(program)


def _row(trace: Array, with_count: TraceEstimate, stopped: TraceEstimate, oracle: int, seeds: int) -> dict[str, Any]:
    low, high = with_count.interval(LEVEL)
    coverages = coverage(with_count, trace), coverage(stopped, trace)
    ratio = float(stopped.num_matvecs.mean()) / oracle
    bound = float(np.interp(oracle, (FEW, 72), (RATIO_OF_FEW, RATIO)))
    least = least_coverage(seeds)
    return {
        "oracle": oracle,
        "so many: std_error / rms error": rms(with_count.std_error) / rms(with_count.value - trace),
        "so many: half of the interval / 1.96 rms error": rms((high - low) / 2) / 1.96 / rms(with_count.value - trace),
        "so many: coverage": coverages[0],
        "tolerance: coverage": coverages[1],
        "least coverage": least,
        "tolerance: mean products / oracle": ratio,
        "bound": bound,
        "met": min(coverages) >= least and ratio <= bound,
    }


def coverage(estimate: TraceEstimate, trace: Array) -> float:
    """The share of intervals that have the trace in them."""
    low, high = estimate.interval(LEVEL)
    return float(jnp.mean((low <= trace) & (trace <= high)))


def least_coverage(seeds: int) -> float:
    """What a coverage of 92 % shows at least with so many seeds: the lower end of a 99.9 % interval."""
    return float(scipy.stats.binom.ppf((1 - CONFIDENCE) / 2, seeds, COVERAGE) / seeds)


# ---- what few signs do not show

_NEARLY_THREE = np.array([1.0, 1.0, 1.0, 0.1])


def few_signs() -> list[dict[str, Any]]:
    """Matrices of rank one, through few signs; theory forbids to know better where samples are equal, or nearly."""
    n, seeds = SIZE, 1000
    found = {
        "ones on two coordinates": jnp.zeros((n, n)).at[:2, :2].set(1),
        "ones on three coordinates": jnp.zeros((n, n)).at[:3, :3].set(1),
        "v v^T, v = (1, 1, 1, 0.1, 0, ...)": jnp.zeros((n, n)).at[:4, :4].set(np.outer(_NEARLY_THREE, _NEARLY_THREE)),
        "rank one": matrices(n)["rank one"],
    }
    return [_few(of, matrix, count, seeds) for of, matrix in found.items() for count in (2, 4, 8, 16)]


def _few(of: str, matrix: Array, count: int, seeds: int) -> dict[str, Any]:
    estimates = _with_count("Hutchinson", count)(matrix, keys(seeds, count))
    low, high = estimates.interval(LEVEL)
    found, is_infinite = coverage(estimates, jnp.trace(matrix)), jnp.isinf(high)
    return {
        "matrix": of,
        "products": count,
        "value ± 1.96 std_error: coverage": float(
            jnp.mean(jnp.abs(estimates.value - jnp.trace(matrix)) <= 1.96 * estimates.std_error)
        ),
        "interval: coverage": found,
        "least coverage": least_coverage(seeds),
        "share without ends": float(is_infinite.mean()),
        "median length / trace": float(jnp.median(high - low) / jnp.trace(matrix)),
        "met": found >= least_coverage(seeds),
    }


# ---- all


def tables() -> list[Findings]:
    """All tables."""
    what = (
        f"Targets: {COVERAGE:.0%} of the {LEVEL:.0%} intervals have the trace in them, with a number of products and "
        f"with a tolerance (least coverage: the lower end of the {CONFIDENCE:.1%} interval of what {COVERAGE:.0%} show "
        f"with so many seeds); at most {RATIO_OF_FEW} times as many products as the oracle takes up to {FEW}, {RATIO} "
        "times from 72 on. The tolerance is the rms error with as many products as stand under oracle."
    )
    groups = {"": matrices, "matrices that nothing was chosen on": held_out_matrices}
    return [
        *(
            Findings(
                f"Traces: intervals, {SEEDS[name]} seeds: {', '.join(filter(None, (name, group)))}",
                in_float64(partial(intervals, name, of)),
                what,
            )
            for group, of in groups.items()
            for name in LOOPAX
        ),
        Findings(
            "Traces: intervals from few signs, 1000 seeds: Hutchinson",
            in_float64(few_signs),
            "Of m samples from signs all are equal in up to (3/4)^m + (1/4)^m of cases, and show nothing.",
        ),
    ]
