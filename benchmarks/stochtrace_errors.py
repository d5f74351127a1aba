"""Errors of trace estimates beside traceax's and matfree's, in float64, of matrices whose trace is known."""

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
from benchmarks.stochtrace_matrices import is_semidefinite, matrices

SEEDS = 200
SIZE_OF_ERRORS, PRODUCTS_OF_ERRORS = 200, 48


def in_float64(rows: Callable[[], list[dict[str, Any]]]) -> Callable[[], list[dict[str, Any]]]:
    def with_float64() -> list[dict[str, Any]]:
        with jax.enable_x64(True):
            return rows()

    return with_float64


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
        if name != "XNysTrace" or is_semidefinite(of)
    ]


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
    return {key: jax.jit(partial(mapped, program)) for key, program in programs.items()}


def mapped(program: Callable[..., Any], matrix: Array, keys: Array) -> Any:
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
    return {key: jax.jit(partial(mapped, program)) for key, program in programs.items()}


# ---- all


def tables() -> list[Findings]:
    """All tables."""
    title = f"n = {SIZE_OF_ERRORS}, {PRODUCTS_OF_ERRORS} products, {SEEDS} seeds"
    same = "p: the Kolmogorov-Smirnov test that |error| has the same distribution."
    return [
        Findings(f"Traces: errors, {title}", in_float64(errors), same),
        Findings(
            f"Traces: errors of Hutchinson's estimate, complex matrices, {title}", in_float64(complex_errors), same
        ),
    ]
