"""`jax.experimental.sparse.sparsify` of loops: bodies close over sparse matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse

import loopax as lx
from tests.support.reference import assert_close

DENSE = jnp.array([[0.0, 0.4, 0.0], [0.9, 0.0, 0.0], [0.0, 0.3, 0.7]])
V = jnp.array([0.5, -0.3, 0.8])
MATRICES = {"BCOO": sparse.BCOO.fromdense(DENSE), "BCSR": sparse.BCSR.fromdense(DENSE)}
BCOO = MATRICES["BCOO"]


def repeated(m: Any, v: Any, **options: Any) -> Any:
    return lx.fori_loop(0, 3, lambda i, c: jnp.sin(m @ c), v, **options)


LOOPS: dict[str, Any] = {
    "fori_loop": repeated,
    "scan": lambda m, v: lx.scan(lambda c, x: (jnp.sin(m @ c) * x, c), v, jnp.arange(1.0, 4.0)),
    "in the carry": lambda m, v: lx.fori_loop(0, 3, lambda i, c: (c[0], jnp.sin(c[0] @ c[1])), (m, v))[1],
    "cond": lambda m, v: lx.cond(v[0] > 0, lambda v: jnp.sin(m @ v), lambda v: v, v),
    "lanes": lambda m, v: jax.vmap(lambda n: lx.fori_loop(0, n, lambda i, c: jnp.sin(m @ c), v))(jnp.arange(3)),
    "gradient": lambda m, v: jax.grad(lambda v: repeated(m, v, kind="checkpointed").sum())(v),
}


# JAX has no rule for a transposed or batched product of a BCSR matrix.
CASES = [
    (name, matrix) for name in LOOPS for matrix in MATRICES if matrix == "BCOO" or name not in ("gradient", "lanes")
]


@pytest.mark.parametrize(("name", "matrix"), CASES)
def test_values(name: str, matrix: str) -> None:
    assert_close(sparse.sparsify(LOOPS[name])(MATRICES[matrix], V), LOOPS[name](DENSE, V))


@pytest.mark.parametrize("kind", ["auto", "checkpointed", "bounded", "residuals"])
def test_derivatives(kind: str) -> None:
    """Of the vector, and of the numbers that are not zero."""
    f = lambda m, v: jnp.vdot(V, repeated(m, v, kind=kind))
    of_parts = lambda data, v: sparse.sparsify(f)(sparse.BCOO((data, BCOO.indices), shape=BCOO.shape), v)
    of_matrix, of_vector = jax.jit(jax.grad(of_parts, (0, 1)))(BCOO.data, V)
    expected = jax.grad(f, (0, 1))(DENSE, V)
    assert_close(of_vector, expected[1])
    assert_close(of_matrix, expected[0][tuple(BCOO.indices.T)])
    hvp = lambda g, first: jax.jvp(lambda v: jax.grad(g, 1)(first, v), (V,), (V,))[1]
    assert_close(hvp(of_parts, BCOO.data), hvp(f, DENSE))


@pytest.mark.parametrize(
    "f",
    [
        lambda m, v: lx.fori_loop(0, 3, lambda i, c: (c[0] * 2, v), (m, v)),
        lambda m, v: lx.fori_loop(0, 3, lambda i, c: m * 2, DENSE),
        lambda m, v: lx.scan(lambda c, x: (c, None), v, m),
        lambda m, v: lx.scan(lambda c, x: (c, m * 2), v, length=3),
    ],
)
def test_sparse_carries_and_rows_are_refused(f: Any) -> None:
    with pytest.raises(NotImplementedError, match="a sparse matrix is in the carry, the rows or the results of a loop"):
        sparse.sparsify(f)(BCOO, V)


def test_compact_lanes_inside_are_refused() -> None:
    f = lambda m, n: lx.fori_loop(0, n, lambda i, c: jnp.sin(m @ c), V, lanes=lx.Compact(min_lanes=1))
    with pytest.raises(NotImplementedError, match="compact lanes closes over a sparse matrix"):
        sparse.sparsify(lambda m: jax.vmap(lambda n: f(m, n))(jnp.arange(4)))(BCOO)
