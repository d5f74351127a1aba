"""How exactly `Implicit` wants a loop to have converged, and its linear system to be solved."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax import Array

import loopax as lx
from loopax import Implicit
from loopax._src.kinds import linear_solver
from tests.support.reference import assert_close

# ---- Newton's method for a stiff system: an implicit Euler step of z' = -S z - z**3, for eigenvalues of S up to 1e6

Q = jnp.linalg.qr(jnp.asarray(np.random.RandomState(0).randn(4, 4)))[0]
S = Q @ (jnp.array([1e6, 1e4, 1e2, 1.0])[:, None] * Q.T)
P = jnp.array([0.5, -0.3, 0.8, 0.2])
STEPS = jnp.geomspace(1e-3, 1.0, 64)  # of time: a lane for each


def residual(z: Array, p: Array, h: Array) -> Array:
    return z - p + h * (S.astype(p.dtype) @ z + z**3)


def newton(p: Array, h: Array, kind: lx.Kind, **options: Any) -> tuple[Array, lx.LoopInfo]:
    def body(c: tuple[Array, Array]) -> tuple[Array, Array]:
        change = jnp.linalg.solve(jax.jacfwd(residual)(c[0], p, h), residual(c[0], p, h))
        return c[0] - change, jnp.abs(change).max()

    start = p, jnp.array(jnp.inf, p.dtype)
    (z, _), info = lx.while_loop(lambda c: c[1] > 1e-6, body, start, max_steps=9, kind=kind, info=True, **options)
    return z, info


OF_Z = Implicit(fixed_point=lambda c: c[0])


@pytest.fixture(name="iterations")
def _iterations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each linear system of a lane takes."""
    found: list[int] = []
    run = linear_solver.run

    def counted(*args: Any) -> Any:
        out = run(*args)
        jax.debug.callback(lambda steps: found.extend(np.ravel(steps).tolist()), out.num_steps)
        return out

    monkeypatch.setattr(linear_solver, "run", counted)
    return found


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("lanes", ["lockstep", pytest.param("compact", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_newton_on_a_stiff_system(mode: Any, lanes: Any, throw: bool, iterations: list[int]) -> None:
    """The Jacobian of a step is zero, but for the rounding errors of a solution: they are 1e-10, not 1e-16."""
    zs, info = jax.vmap(lambda h: newton(P, h, OF_Z))(STEPS)
    assert info.num_steps.max() <= 4
    found = jax.jit(jax.vmap(mode(lambda p, h: newton(p, h, OF_Z, lanes=lanes, throw=throw)[0]), (None, 0)))(P, STEPS)
    jax.effects_barrier()
    assert iterations
    assert max(iterations) <= 2
    expected = jax.vmap(lambda z, h: jnp.linalg.inv(jax.jacfwd(residual)(z, P, h)))(zs, STEPS)
    assert_close(found, expected, 1e-9)


def test_a_start_near_the_fixed_point_of_a_slow_contraction() -> None:
    loop = lambda a: lx.fori_loop(0, 3, lambda i, z: 0.98 * z + a, 50.001, kind=Implicit())
    assert_close(jax.grad(loop)(1.0), jnp.array(50.0), 1e-6)


def test_a_system_that_is_solved_as_exactly_as_the_loop_has_converged() -> None:
    """Of a contraction so slow that 1000 iterations leave 5e-5 of a residual: enough for a loop that left as much."""

    def slope(start: float) -> Array:
        return jax.grad(lambda a: lx.fori_loop(0, 1, lambda i, z: 0.99 * z + a, start, kind=Implicit()))(1.0)

    assert_close(slope(100.05), jnp.array(100.0), 1e-4)


# ---- a fixed point at zero, or near


def shrink(a: Any, start: Any = 1.0, bound: Any = 1e-6, x: Any = 0.0, **options: Any) -> Any:
    return lx.while_loop(lambda z: jnp.abs(z - x) > bound, lambda z: a * (z - x) + x, start, kind=Implicit(**options))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_fixed_point_of_zero(dtype: Any) -> None:
    a, start = dtype(0.5), dtype(1)
    for mode in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        assert abs(mode(shrink)(a, start)) <= 4e-6


def test_fixed_points_of_zero_in_some_lanes() -> None:
    xs = jnp.array([0.0, 1.0, 1e-8, -2.0, 0.0])
    found = jax.vmap(jax.grad(lambda x: shrink(0.5, x=x, start=x + 1)))(xs)
    assert_close(found, jnp.ones(5), 1e-6)


def test_a_leaf_that_starts_at_infinity_excuses_nothing() -> None:
    """Nor does one leaf excuse another."""

    def loop(a: Array, start: Any) -> Array:
        return lx.fori_loop(0, 3, lambda i, c: (0.5 * c[0] + a, jnp.abs(c[0])), (0.0, start), kind=Implicit())[0]

    for start in (jnp.inf, 1e10):
        with pytest.raises(eqx.EquinoxRuntimeError, match="ended before"):
            jax.grad(loop)(1.0, start)


def test_a_given_tolerance() -> None:
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"ended before \(0.5\).*Implicit\(atol=1e-6\)"):
        jax.grad(lambda a: shrink(a, bound=1e-3))(0.5)
    assert abs(jax.grad(lambda a: shrink(a, bound=1e-3, atol=1e-3))(0.5)) <= 4e-3
    with pytest.raises(eqx.EquinoxRuntimeError, match="ended before"):
        jax.grad(lambda a: shrink(a, atol=0))(0.5)


# ---- what is not solved


def of_lanes(solver: Any, a: Array, **options: Any) -> Array:
    """z <- a z + (1 - a) x, whose fixed point is x, but for a = 1, where every z is one."""

    def loop(a: Array, x: Array, throw: bool = True) -> Array:
        kind = Implicit(solver, **options)
        return lx.fori_loop(0, 60, lambda i, z: a * z + x * (1 - a), x, kind=kind, throw=throw)

    return jax.vmap(lambda a, x: jax.grad(loop, 1)(a, x, False))(a, jnp.full(3, 2.0))


@pytest.mark.parametrize(
    "solver",
    [None, lineax.GMRES(rtol=1e-9, atol=1e-9), lambda matvec, b: jnp.where(jnp.abs(matvec(b)) > 0, 2 * b, b)],
    ids=["own", "lineax", "function"],
)
def test_an_unsolved_system_is_an_error_unless_nan_is_asked_for(solver: Any) -> None:
    a = jnp.array([0.5, 1.0, 0.5])
    pattern = r"tolerances.py:\d+ \(of_lanes.<locals>.loop\): for its .*eigenvalue.*First at index 1 of the batch"
    with pytest.raises(eqx.EquinoxRuntimeError, match=pattern):
        eqx.filter_jit(lambda: of_lanes(solver, a))()
    assert_close(of_lanes(solver, a, unsolved="nan"), jnp.array([1.0, jnp.nan, 1.0]))
