"""Trace estimates: time, memory and compilations beside those of traceax and matfree."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import traceax
from jax import Array
from matfree import stochtrace as matfree

from benchmarks.groups import Findings, Group, Target
from benchmarks.measure import Case
from loopax.stochtrace import Estimator, Hutchinson, HutchPlusPlus, XNysTrace, XTrace, estimate_trace

Program = Callable[..., Array]

LOOPAX = {
    "Hutchinson": Hutchinson(),
    "Hutch++": HutchPlusPlus(),
    "XTrace": XTrace(),
    "XNysTrace": XNysTrace(positive_semidefinite=True),
}
TRACEAX = {
    "Hutchinson": traceax.HutchinsonEstimator(),
    "Hutch++": traceax.HutchPlusPlusEstimator(),
    "XTrace": traceax.XTraceEstimator(),
    "XNysTrace": traceax.XNysTraceEstimator(),
}
SIZE, PRODUCTS = 1024, 64
COUNTS = range(6, 61, 6)
LARGE_SIZE, MANY_PRODUCTS = 4096, 1024
MATFREE = ("Hutchinson", "XTrace", "XNysTrace")  # what it has


# ---- the same estimate with each library, of a matrix


def with_loopax(estimator: Estimator, **options: Any) -> Program:
    return lambda matrix, key: estimate_trace(matrix, key, estimator=estimator, **options).value


def with_traceax(estimator: Any, num_matvecs: int) -> Program:
    def program(matrix: Array, key: Array) -> Array:
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        return estimator.estimate(key, operator, num_matvecs)[0]

    return program


def with_matfree(name: str, num_matvecs: int) -> Program:
    def program(matrix: Array, key: Array) -> Array:
        return matfree_estimate(name, lambda v: matrix @ v, jnp.zeros_like(matrix[0]), num_matvecs, key)

    return program


def matfree_estimate(name: str, matvec: Callable[[Array], Array], like: Array, num_matvecs: int, key: Array) -> Array:
    """Its choice of probes is ours: signs, and the sphere where a basis is made."""
    if name == "Hutchinson":
        sampler = matfree.sampler_signs(like, num=num_matvecs)
        return matfree.estimator_monte_carlo(matfree.monte_carlo_trace(), sampler)(matvec, key)
    per_sample = 2 if name == "XTrace" else 1
    integrand = matfree.leave_one_out_xtrace() if name == "XTrace" else matfree.leave_one_out_xnystrace()
    sampler = matfree.sampler_sphere(like, num=num_matvecs // per_sample)
    return matfree.estimator_leave_one_out(integrand, sampler)(matvec, key)


# ---- time


def wishart(size: int) -> Array:
    """A positive semidefinite matrix."""
    factor = jax.random.normal(jax.random.key(0), (size, size))
    return factor @ factor.T / size


def times(name: str, differentiated: bool) -> Group:
    """One estimator, forward or the gradient with respect to the matrix."""
    programs = {f"loopax, batch={b}": with_loopax(LOOPAX[name], num_matvecs=PRODUCTS, batch=b) for b in (64, 16, 1)}
    programs["traceax"] = with_traceax(TRACEAX[name], PRODUCTS)
    if name in MATFREE:
        programs["matfree"] = with_matfree(name, PRODUCTS)
    if differentiated:
        programs = {key: jax.grad(f) for key, f in programs.items()}
    arguments = wishart(SIZE), jax.random.key(1)
    cases = [Case(key, f, arguments) for key, f in programs.items()]
    what = "gradient" if differentiated else "forward"
    title = f"Traces: {name}, {what}, n = {SIZE}, {PRODUCTS} products"
    return Group(title, cases, [Target("time", "loopax, batch=64", "traceax", 1.0)], rounds=31)


def groups() -> list[Group]:
    """All tables of times."""
    return [times(name, differentiated) for name in LOOPAX for differentiated in (False, True)]


# ---- compilations


def compilations() -> list[dict[str, Any]]:
    """Of one compiled function, called with ten numbers of products; seconds with what the calls themselves take."""
    return [_compilations_of(name) for name in LOOPAX]


def _compilations_of(name: str) -> dict[str, Any]:
    most = max(COUNTS)
    ours = with_run_time_count(LOOPAX[name], most)
    found = {"loopax": _traces_and_seconds(ours, [])}
    static = [2]
    peer = lambda matrix, key, k: with_traceax(TRACEAX[name], k)(matrix, key)
    found["traceax"] = _traces_and_seconds(peer, static)
    if name in MATFREE:
        found["matfree"] = _traces_and_seconds(lambda matrix, key, k: with_matfree(name, k)(matrix, key), static)
    row: dict[str, Any] = {"estimator": name}
    for key in ("loopax", "traceax", "matfree"):
        row[f"{key}: compilations"], row[f"{key}: s"] = found.get(key, (None, None))
    return row | {"bound": 1, "met": found["loopax"][0] <= 1}


def with_run_time_count(estimator: Estimator, most: int) -> Program:
    def program(matrix: Array, key: Array, count: Array) -> Array:
        options: Any = {"num_matvecs": count, "max_matvecs": most, "batch": 64}
        return estimate_trace(matrix, key, estimator=estimator, **options).value

    return program


def _traces_and_seconds(program: Program, static: list[int]) -> tuple[int, float]:
    traces = []

    def counted(*arguments: Any) -> Array:
        traces.append(arguments)
        return program(*arguments)

    jax.clear_caches()
    compiled = jax.jit(counted, static_argnums=static)
    matrix, key = wishart(256), jax.random.key(1)
    start = time.perf_counter()
    for count in COUNTS:
        jax.block_until_ready(compiled(matrix, key, count if static else jnp.int32(count)))
    return len(traces), time.perf_counter() - start


# ---- memory


def memory() -> list[dict[str, Any]]:
    """Temporary memory of Hutchinson's estimate, as the compiler reports it."""
    matrix = jax.ShapeDtypeStruct((LARGE_SIZE, LARGE_SIZE), jnp.float32)
    diagonal = jax.ShapeDtypeStruct((LARGE_SIZE,), jnp.float32)
    of_matrix, of_diagonal = lambda matrix, v: matrix @ v, lambda diagonal, v: diagonal * v
    title = f"a matrix, {MANY_PRODUCTS} products"
    rows = [
        _memory_of(f"{title}: forward", of_matrix, matrix, MANY_PRODUCTS, False, 1.0),
        _memory_of(f"{title}: gradient", of_matrix, matrix, MANY_PRODUCTS, True, 2 * 4 * LARGE_SIZE**2 / 2**20),
    ]
    few = _memory_of("a diagonal, 64 products: gradient", of_diagonal, diagonal, 64, True, None)
    most = max(few["loopax, batch=1"], few["loopax, batch=16"])
    return [*rows, few, _memory_of("a diagonal, 4096 products: gradient", of_diagonal, diagonal, 4096, True, most)]


def _memory_of(
    title: str,
    product: Callable[[Any, Array], Array],
    parameters: jax.ShapeDtypeStruct,
    num_matvecs: int,
    differentiated: bool,
    bound: float | None,
) -> dict[str, Any]:
    like = jax.ShapeDtypeStruct((LARGE_SIZE,), jnp.float32)

    def ours(batch: int) -> Program:
        options: Any = {"num_matvecs": num_matvecs, "batch": batch, "size": like}
        return lambda parameters, key: estimate_trace(lambda v: product(parameters, v), key, **options).value

    def of_traceax(parameters: Any, key: Array) -> Array:
        operator = lineax.FunctionLinearOperator(lambda v: product(parameters, v), like)
        return traceax.HutchinsonEstimator(traceax.RademacherSampler(float)).estimate(key, operator, num_matvecs)[0]

    def of_matfree(parameters: Any, key: Array) -> Array:
        matvec, zeros = lambda v: product(parameters, v), jnp.zeros(like.shape)
        return matfree_estimate("Hutchinson", matvec, zeros, num_matvecs, key)

    programs = {f"loopax, batch={b}": ours(b) for b in (1, 16)} | {"traceax": of_traceax, "matfree": of_matfree}
    found: dict[str, Any] = {}
    for name, program in programs.items():
        function = jax.grad(program) if differentiated else program
        compiled = jax.jit(function).lower(parameters, jax.random.key(1)).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        found[name] = analysis.temp_size_in_bytes / 2**20
    row = {f"n = {LARGE_SIZE}, MiB": title} | found
    met = None if bound is None else max(found["loopax, batch=1"], found["loopax, batch=16"]) <= bound
    return row | {"bound": bound, "met": met}


def tables() -> list[Findings]:
    """All tables but those of times."""
    return [
        Findings("Traces: ten numbers of products, n = 256", compilations, counts=("loopax: compilations",)),
        Findings(
            "Traces: temporary memory of Hutchinson's estimate", memory, memory=("loopax, batch=1", "loopax, batch=16")
        ),
    ]
