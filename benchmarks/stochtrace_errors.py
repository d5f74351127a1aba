"""Errors of trace estimates beside traceax's and matfree's, and what stopping at a tolerance makes of them.

All in float64, of matrices whose trace is known; lanes one after the other, as each stops where it likes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
import traceax
from jax import Array

from benchmarks.groups import Findings
from benchmarks.stochtrace import LOOPAX, MATFREE, with_loopax, with_matfree, with_traceax
from loopax.stochtrace import Estimator, TraceEstimate, estimate_trace

SEEDS, SEEDS_OF_TOLERANCES, SEEDS_OF_BASES = 200, 1000, 100
SIZE_OF_ERRORS, PRODUCTS_OF_ERRORS = 200, 48
SIZE_OF_TOLERANCES = 128
Z = 1.96  # standard errors to either side: 95 %
COVERAGE, RATIO = (0.90, 0.98), 1.2  # targets
LEAST = 16  # products that a tolerance is asked from on


def in_float64(rows: Callable[[], list[dict[str, Any]]]) -> Callable[[], list[dict[str, Any]]]:
    def with_float64() -> list[dict[str, Any]]:
        with jax.enable_x64(True):
            return rows()

    return with_float64


def with_eigenvalues(values: Any) -> Array:
    """A symmetric matrix, turned at random."""
    turn, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (len(values), len(values))))
    return (turn * values) @ turn.T


def matrices(n: int) -> dict[str, Array]:
    """Of every kind; the names say the eigenvalues, i = 0, 1, ..."""
    i, normal = jnp.arange(n), jax.random.normal(jax.random.key(1), (n, n))
    return {
        "Wishart": normal @ normal.T / n,
        "0.9^i": with_eigenvalues(0.9**i),
        "0.7^i": with_eigenvalues(0.7**i),
        "1 / (1 + i)^2": with_eigenvalues(1 / (1.0 + i) ** 2),
        "step: n/10 of 1, others 0.001": with_eigenvalues(jnp.where(i < n // 10, 1, 1e-3)),
        "Laplacian": 2 * jnp.eye(n) - jnp.eye(n, k=1) - jnp.eye(n, k=-1),
        "rank one": with_eigenvalues(jnp.where(i < 1, 1.0, 0)),
        "indefinite": (normal + normal.T) / (8 * n) ** 0.5 * 4,
        "indefinite, + 3": (normal + normal.T) / 8**0.5 + 3 * jnp.eye(n),
        "not symmetric": jnp.eye(n) + jax.random.normal(jax.random.key(2), (n, n)) / n**0.5,
    }


def keys(number: int, start: int) -> Array:
    return jax.random.split(jax.random.key(start), number)


def rms(errors: Array) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.abs(errors) ** 2)))


# ---- errors

OF_ERRORS = ("Wishart", "0.9^i", "1 / (1 + i)^2", "step: n/10 of 1, others 0.001", "indefinite", "not symmetric")


def errors() -> list[dict[str, Any]]:
    """With the same number of products and other random numbers: the distributions should be the same."""
    found = matrices(SIZE_OF_ERRORS)
    return [
        {"estimator": name, "matrix": of} | _compared(programs, found[of], jnp.trace(found[of]))
        for name, programs in ((name, _programs(name)) for name in LOOPAX)
        for of in OF_ERRORS
        if name != "XNysTrace" or _is_semidefinite(of)
    ]


def _is_semidefinite(name: str) -> bool:
    return not name.startswith(("indefinite", "not symmetric"))


def _programs(name: str) -> dict[str, Callable[..., Array]]:
    probes = traceax.RademacherSampler(float) if name in ("Hutchinson", "Hutch++") else traceax.SphereSampler(float)
    estimators = {
        "Hutchinson": traceax.HutchinsonEstimator,
        "Hutch++": traceax.HutchPlusPlusEstimator,
        "XTrace": traceax.XTraceEstimator,
        "XNysTrace": traceax.XNysTraceEstimator,
    }
    programs = {
        "loopax": with_loopax(LOOPAX[name], num_matvecs=PRODUCTS_OF_ERRORS, batch=PRODUCTS_OF_ERRORS),
        "traceax": with_traceax(estimators[name](probes), PRODUCTS_OF_ERRORS),
    }
    if name in MATFREE:
        programs["matfree"] = with_matfree(name, PRODUCTS_OF_ERRORS)
    return {key: jax.jit(partial(_mapped, program)) for key, program in programs.items()}


def _mapped(program: Callable[..., Any], matrix: Array, keys: Array) -> Any:
    return jax.lax.map(lambda key: program(matrix, key), keys)


def _compared(programs: dict[str, Callable[..., Array]], matrix: Array, trace: Array) -> dict[str, Any]:
    """Medians and root mean squares of |error|, and how probable such a difference is by chance."""
    found = {
        name: np.asarray(abs(program(matrix, keys(SEEDS, start)) - trace))
        for start, (name, program) in enumerate(programs.items())
    }
    ours = found["loopax"]
    row: dict[str, Any] = {"median |error|": float(np.median(ours)), "rms": rms(jnp.asarray(ours))}
    for peer in ("traceax", "matfree"):
        theirs = found.get(peer)
        row[f"median / {peer}"] = None if theirs is None else float(np.median(ours) / np.median(theirs))
        row[f"rms / {peer}"] = None if theirs is None else row["rms"] / rms(jnp.asarray(theirs))
        row[f"p, {peer}"] = None if theirs is None else _probability(ours, theirs)
    return row


def _probability(ours: Any, theirs: Any) -> float:
    """Of such a difference between samples of one distribution (Kolmogorov-Smirnov)."""
    result: Any = scipy.stats.ks_2samp(ours, theirs)
    return float(result.pvalue)


def complex_errors() -> list[dict[str, Any]]:
    """Hutchinson with the probes that are meant for signs: of modulus one here and in matfree, 1 and -1 in traceax."""
    n = SIZE_OF_ERRORS
    normal = jax.random.normal(jax.random.key(1), (n, n), complex)
    found = {
        "complex symmetric": (normal + normal.T) / n**0.5,
        "Hermitian": (normal + normal.conj().T) / n**0.5,
        "Hermitian, imaginary off the diagonal": jnp.eye(n) + 1j * (normal - normal.T).real / n**0.5,
        "no symmetry": normal / n**0.5,
    }
    programs = _complex_programs()
    return [{"matrix": of} | _compared(programs, matrix, jnp.trace(matrix)) for of, matrix in found.items()]


def _complex_programs() -> dict[str, Callable[..., Array]]:
    estimator = traceax.HutchinsonEstimator(traceax.RademacherSampler(complex))
    programs = {
        "loopax": with_loopax(LOOPAX["Hutchinson"], num_matvecs=PRODUCTS_OF_ERRORS, batch=PRODUCTS_OF_ERRORS),
        "traceax": with_traceax(estimator, PRODUCTS_OF_ERRORS),
        "matfree": with_matfree("Hutchinson", PRODUCTS_OF_ERRORS),
    }
    return {key: jax.jit(partial(_mapped, program)) for key, program in programs.items()}


# ---- tolerances

OF_TOLERANCES = ("Wishart", "0.9^i", "0.7^i", "Laplacian", "step: n/10 of 1, others 0.001", "indefinite, + 3")
ORACLES = {  # and the most products
    "Hutch++": {24: 48, 48: 96, 96: 120},
    "XTrace": {24: 48, 48: 96, 96: 120},
    "XNysTrace": {24: 40, 48: 72},
}
SKEWED = ("1 / (1 + i)^2", "rank one")


def tolerances(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Hutchinson's estimate: an oracle knows the variance of a sample, and how many it takes for a tolerance."""
    fixed = {target: _estimates(LOOPAX["Hutchinson"], num_matvecs=target, batch=target) for target in (20, 50, 200)}
    stopped = _estimates_within(LOOPAX["Hutchinson"], 4096)
    found, rows = matrices(SIZE_OF_TOLERANCES), []
    for of in names:
        matrix = found[of]
        deviation = jnp.sqrt(_variance(matrix))
        for target, of_fixed in fixed.items():
            results = stopped(matrix, keys(SEEDS_OF_TOLERANCES, target), deviation / target**0.5)
            row = _stopped_row(of, matrix, of_fixed(matrix, keys(SEEDS_OF_TOLERANCES, target)), results, target)
            rows.append(row)
    return rows


def basis_tolerances(name: str) -> list[dict[str, Any]]:
    """An estimator with a basis: the tolerance is the root mean square of the error with so many products."""
    found, rows = matrices(SIZE_OF_TOLERANCES), []
    for target, most in ORACLES[name].items():
        fixed = _estimates(LOOPAX[name], num_matvecs=target, batch=8)
        stopped = _estimates_within(LOOPAX[name], most)
        for of in OF_TOLERANCES:
            if name == "XNysTrace" and not _is_semidefinite(of):
                continue
            matrix = found[of]
            with_count = fixed(matrix, keys(SEEDS_OF_BASES, target))
            tolerance = rms(with_count.value - jnp.trace(matrix))
            if tolerance > 1e-12 * jnp.trace(matrix):  # more than rounding errors
                results = stopped(matrix, keys(SEEDS_OF_BASES, target + 1), tolerance)
                rows.append(_stopped_row(of, matrix, with_count, results, target))
    return sorted(rows, key=lambda row: OF_TOLERANCES.index(row["matrix"]))


def _variance(matrix: Array) -> Array:
    """Of a sample with signs."""
    symmetric = (matrix + matrix.T) / 2
    return 2 * (jnp.sum(symmetric**2) - jnp.sum(jnp.diag(symmetric) ** 2))


def _estimates(estimator: Estimator, **options: Any) -> Callable[..., TraceEstimate]:
    program = lambda matrix, key: estimate_trace(matrix, key, estimator=estimator, **options)
    return jax.jit(partial(_mapped, program))


def _estimates_within(estimator: Estimator, most: int) -> Callable[..., TraceEstimate]:
    def program(matrix: Array, keys: Array, tolerance: Array) -> TraceEstimate:
        options: Any = {"atol": tolerance, "max_matvecs": most}
        return jax.lax.map(lambda key: estimate_trace(matrix, key, estimator=estimator, **options), keys)

    return jax.jit(program)


def _stopped_row(of: str, matrix: Array, fixed: TraceEstimate, stopped: TraceEstimate, target: int) -> dict[str, Any]:
    trace = jnp.trace(matrix)
    ratio = float(stopped.num_matvecs.mean()) / max(target, LEAST)
    coverage = _coverage(stopped, trace)
    return {
        "matrix": of,
        "oracle": target,
        "so many: std_error / rms error": rms(fixed.std_error) / rms(fixed.value - trace),
        "so many: coverage": _coverage(fixed, trace),
        "tolerance: coverage": coverage,
        "tolerance: mean products / oracle": ratio,
        "met": COVERAGE[0] <= coverage <= COVERAGE[1] and ratio <= RATIO,
    }


def _coverage(estimate: TraceEstimate, trace: Array) -> float:
    return float(jnp.mean(jnp.abs(estimate.value - trace) <= Z * estimate.std_error))


# ---- all


def tables() -> list[Findings]:
    """All tables."""
    title = f"n = {SIZE_OF_ERRORS}, {PRODUCTS_OF_ERRORS} products, {SEEDS} seeds"
    stop = f"Traces: stopping at a tolerance, n = {SIZE_OF_TOLERANCES}"
    same = "p: the Kolmogorov-Smirnov test that |error| has the same distribution."
    target = (
        f"Targets: value ± {Z} std_error covers the trace in {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%}, with at most "
        f"{RATIO} times as many products as the oracle takes, {LEAST} at least."
    )
    of_oracle = {
        "Hutchinson": "The oracle knows the variance of a sample.",
        "basis": "The tolerance is the rms error with as many products as stand under oracle.",
    }
    return [
        Findings(f"Traces: errors, {title}", in_float64(errors), same),
        Findings(
            f"Traces: errors of Hutchinson's estimate, complex matrices, {title}", in_float64(complex_errors), same
        ),
        Findings(
            f"{stop}, {SEEDS_OF_TOLERANCES} seeds: Hutchinson",
            in_float64(partial(tolerances, OF_TOLERANCES)),
            f"{target} {of_oracle['Hutchinson']}",
        ),
        Findings(
            f"{stop}, {SEEDS_OF_TOLERANCES} seeds: Hutchinson, skewed samples",
            in_float64(partial(tolerances, SKEWED)),
            f"{target} {of_oracle['Hutchinson']}",
        ),
        *(
            Findings(
                f"{stop}, {SEEDS_OF_BASES} seeds: {name}",
                in_float64(partial(basis_tolerances, name)),
                f"{target} {of_oracle['basis']}",
            )
            for name in LOOPAX
            if name != "Hutchinson"
        ),
    ]
