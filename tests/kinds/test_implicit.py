"""`Implicit` against loops that run to rounding, in every mode; checks, tolerances and costs."""

from collections.abc import Callable
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
from tests.support.compiled import temporary as temporary_bytes
from tests.support.counted import counting, evaluations
from tests.support.problem import argument_of
from tests.support.reference import assert_close

W = jnp.asarray(np.random.RandomState(0).randn(3, 3)) * 0.25
X = jnp.array([0.3, -0.8, 1.1])
UNROLLED = lx.Bounded()
CLOSE = 1e-8  # the loops run to 1e-13, and the adjoint to 2e-12


def f(w: Array, x: Array, z: Array) -> Array:
    return jnp.tanh(w @ z + x)


def while_loop(w: Array, x: Array, kind: Any, **options: Any) -> Array:
    """Until the change is small; the carry holds more than the fixed point."""
    body = lambda c: (new := f(w, x, c[0]), abs(new - c[0]).max(), c[2] + 1)
    start = jnp.zeros_like(x), jnp.inf, 0
    return lx.while_loop(lambda c: c[1] > 1e-13, body, start, max_steps=200, **argument_of(kind), **options)[0]


def fori_loop(w: Array, x: Array, kind: Any, **options: Any) -> Array:
    return lx.fori_loop(0, 100, lambda i, z: f(w, x, z), jnp.zeros_like(x), **argument_of(kind), **options)


def newton(w: Array, x: Array, kind: Any) -> Array:
    def body(z: Any, _: Any = None) -> Array:
        slope = jnp.eye(3) - (1 - f(w, x, z) ** 2)[:, None] * w
        return z - jnp.linalg.solve(slope, z - f(w, x, z))

    return lx.fori_loop(0, 12, lambda i, z: body(z), jnp.zeros(3), **argument_of(kind))


def of_z(c: Any) -> Any:
    return c[0]


def by_jax(matvec: Any, b: Any) -> Any:
    return jax.scipy.sparse.linalg.gmres(matvec, b, tol=1e-13)


def residual_of(w: Array, x: Array) -> Callable[[Any], Any]:
    return lambda c: (c[0], c[0] - f(w, x, c[0]))


GMRES = lineax.GMRES(rtol=1e-13, atol=1e-13)
PROGRAMS: dict[str, tuple[Callable[..., Array], Callable[[Array, Array], Implicit]]] = {
    "while_loop": (while_loop, lambda w, x: Implicit(fixed_point=of_z)),
    "fori_loop": (fori_loop, lambda w, x: Implicit()),
    "lineax": (fori_loop, lambda w, x: Implicit(GMRES)),
    "function": (fori_loop, lambda w, x: Implicit(by_jax)),
    "residual": (while_loop, lambda w, x: Implicit(fixed_point=residual_of(w, x))),
    # Reverse mode of `jax.lax.custom_root` with GMRES raises an error (jax#33872), as of optimistix's root_find two
    # of the four orders of second derivatives did (optimistix#151).
    "residual by lineax": (while_loop, lambda w, x: Implicit(GMRES, fixed_point=residual_of(w, x))),
    "Newton": (newton, lambda w, x: Implicit()),
}
MODES: dict[str, Callable[[Any], Any]] = {
    "gradient": lambda g: jax.grad(g, (0, 1)),
    "forward over forward": lambda g: jax.jacfwd(jax.jacfwd(g, 1), 0),
    "forward over reverse": lambda g: jax.jacfwd(jax.grad(g, 1), 0),
    "reverse over forward": lambda g: jax.jacrev(jax.jacfwd(g, 1), 0),
    "reverse over reverse": lambda g: jax.jacrev(jax.grad(g, 1), 0),
    "third": lambda g: jax.grad(lambda w, x: (jax.hessian(g, 1)(w, x) ** 2).sum()),
}
FAST = {("while_loop", mode) for mode in MODES} | {(name, "gradient") for name in PROGRAMS}
FAST |= {("residual", "reverse over reverse"), ("residual by lineax", "reverse over reverse")}


def loss_of(name: str) -> tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]]:
    """With the implicit derivative, and with that of all steps."""
    program, kind = PROGRAMS[name]
    return lambda w, x: (program(w, x, kind(w, x)) ** 3).sum(), lambda w, x: (program(w, x, UNROLLED) ** 3).sum()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in FAST else [pytest.mark.slow])
        for name in PROGRAMS
        for mode in MODES
    ],
)
def test_modes(name: str, mode: str) -> None:
    found, expected = (jax.jit(MODES[mode](loss))(W, X) for loss in loss_of(name))
    assert_close(found, expected, CLOSE)


@pytest.mark.parametrize("fixed_point", [None, of_z, lambda c: c[:2]], ids=["all", "one", "weights too"])
def test_weights_in_the_carry_have_a_derivative(fixed_point: Any) -> None:
    """The body returns them as they came: they are what the fixed point depends on, and no start of it."""

    def loop(w: Array, kind: Any) -> Array:
        z, w, _ = lx.fori_loop(0, 100, lambda i, c: (f(c[1], X, c[0]), c[1], c[2]), (X, w, 3), **argument_of(kind))
        return (z**2).sum() + w[0, 1] ** 2

    kind = Implicit(fixed_point=fixed_point)
    assert_close(jax.grad(loop)(W, kind), jax.grad(loop)(W, UNROLLED), CLOSE)
    second = lambda kind: jax.jacfwd(jax.grad(loop))(W, kind)
    if fixed_point is None:
        assert_close(second(kind), second(UNROLLED), 1e-7)


XS = jnp.stack([X, 0.1 * X, -X, 3.0 * X])


@pytest.mark.parametrize("lanes", ["lockstep", lx.Compact(min_lanes=1, shrink=2)], ids=str)
def test_lanes_have_systems_of_their_own(lanes: Any) -> None:
    def loss(w: Array, x: Array, kind: Any) -> Array:
        return (while_loop(w, x, kind, lanes=lanes) ** 3).sum()

    each = jax.jit(jax.vmap(jax.grad(lambda w, x: loss(w, x, UNROLLED), (0, 1)), (None, 0)))(W, XS)
    kind = Implicit(fixed_point=of_z)
    assert_close(jax.jit(jax.vmap(jax.grad(lambda w, x: loss(w, x, kind), (0, 1)), (None, 0)))(W, XS), each, CLOSE)
    of_batch = lambda w, xs: jax.vmap(lambda x: loss(w, x, kind))(xs).sum()
    assert_close(jax.jit(jax.grad(of_batch, (0, 1)))(W, XS), (each[0].sum(0), each[1]), CLOSE)


def test_inside_loops_and_checkpoints() -> None:
    def outer(w: Array, kind: Any) -> Array:
        inner = jax.checkpoint(lambda x: while_loop(w, x, kind))
        return lx.fori_loop(0, 3, lambda i, x: inner(x), X, kind=lx.Checkpointed(1)).sum()

    found, expected = (jax.jit(jax.grad(lambda w, k=k: outer(w, k)))(W) for k in (Implicit(fixed_point=of_z), UNROLLED))
    assert_close(found, expected, CLOSE)


def test_memory_does_not_depend_on_the_bound() -> None:
    def temporary(bound: int) -> int:
        def loss(w: Array, x: Array) -> Array:
            body = lambda c: (f(w, x, c[0]), abs(f(w, x, c[0]) - c[0]).max())
            fixed = Implicit(fixed_point=of_z)
            return lx.while_loop(lambda c: c[1] > 1e-9, body, (x, jnp.inf), max_steps=bound, derivative=fixed)[0].sum()

        return temporary_bytes(jax.jit(jax.grad(loss)).lower(jnp.eye(64) * 0.1, jnp.ones(64)).compile())

    assert temporary(10) == temporary(10_000)


def test_a_gradient_evaluates_the_body_twice_more() -> None:
    """At the fixed point, linearised by the carry and by what else it depends on; a value evaluates it no more."""

    def loop(count: Callable[[], None], x: Array) -> Array:
        def body(i: Any, z: Array) -> Array:
            return f(W, x, counting(count, z))

        return lx.fori_loop(0, 50, body, X, derivative="implicit").sum()

    assert evaluations(lambda count: loop(count, X)) == 50
    assert evaluations(lambda count: jax.grad(lambda x: loop(count, x))(X)) == 52


def other_leaves(x: Array, kind: Any) -> Array:
    """What follows from the fixed point is differentiated with it."""
    kind = Implicit(fixed_point=of_z) if isinstance(kind, Implicit) else kind
    return lx.fori_loop(0, 100, lambda i, c: (f(W, x, c[0]), jnp.sin(c[0]) @ x), (X, 0.0), **argument_of(kind))[1]


def complex_and_mixed_leaves(a: Array, kind: Any) -> Array:
    body = lambda i, c: (0.4 * c[0] + a * 1j, 0.5 * c[1] + abs(c[0]) ** 2)
    z, y = lx.fori_loop(0, 120, body, (jnp.zeros((), jnp.complex128), 0.0), **argument_of(kind))
    return y + z.imag


def index_behind_the_last_step(w: Array, kind: Any) -> Array:
    """What a body reads by its index, here a row of zeros behind those that count."""
    rows = jnp.zeros((60, 3)).at[:20].set(1.0)
    return lx.fori_loop(10, 60, lambda i, z: f(w, X, z) + rows[i] * w[0], jnp.zeros(3), **argument_of(kind)).sum()


def residuals_in_another_order_than_the_leaves(a: Array, kind: Any) -> Array:
    residual = lambda c: (c[1] - 0.5 * jnp.sin(c[0]), c[0] - jnp.cos(a * c[1]))
    kind = Implicit(fixed_point=lambda c: ((c[1], c[0]), residual(c))) if isinstance(kind, Implicit) else kind
    return lx.fori_loop(0, 60, lambda i, c: (jnp.cos(a * c[1]), 0.5 * jnp.sin(c[0])), (0.1, 0.2), **argument_of(kind))[
        0
    ]


def start_at_the_fixed_point(w: Array, kind: Any) -> Array:
    """The solver takes as many steps as it needs, though the loop took one. A start has no derivative."""
    if kind is UNROLLED:
        return fori_loop(w, X, UNROLLED).sum()
    z = fori_loop(w, X, "lax")
    return lx.fori_loop(0, 1, lambda i, z: f(w, X, z), z, **argument_of(kind)).sum()


OTHERS = [(other_leaves, X), (complex_and_mixed_leaves, 1.3), (index_behind_the_last_step, W)]
OTHERS += [(residuals_in_another_order_than_the_leaves, 0.9), (start_at_the_fixed_point, W)]


@pytest.mark.parametrize(("loop", "at"), OTHERS)
def test_other_loops(loop: Any, at: Any) -> None:
    assert_close(jax.grad(loop)(at, Implicit()), jax.grad(loop)(at, UNROLLED), CLOSE)


def test_the_start_has_no_derivative_but_where_nothing_changes_it() -> None:
    loop = lambda z: lx.fori_loop(0, 100, lambda i, z: f(W, X, z), z, derivative=Implicit()).sum()
    assert_close(jax.grad(loop)(X), jnp.zeros(3))
    assert jax.grad(lambda x: lx.fori_loop(0, 3, lambda i, x: x, x, derivative=Implicit()))(2.0) == 1.0


BY_JAX = Implicit(by_jax)


class TestFailures:
    @pytest.mark.parametrize(
        ("gradient", "message"),
        [
            (
                lambda: jax.grad(
                    lambda a: lx.fori_loop(0, 3, lambda i, z: jnp.sqrt(a * z - 1), 0.5, derivative=BY_JAX)
                )(0.9),
                r"this one ended before \(nan\)",
            ),
            # It multiplies by 4: the norms of x and of the residual are infinite after about 256 steps.
            (
                lambda: jax.grad(
                    lambda x: fori_loop(W, x, Implicit(fixed_point=lambda z: (z, 3 * (f(W, x, z) - z)))).sum()
                )(X),
                r"did not converge .* \(inf\)",
            ),
            (
                lambda: jax.grad(lambda x: fori_loop(W, x, Implicit(lambda matvec, b: b * jnp.nan)).sum())(X),
                r"whose residual is more than 0.001 of b \(nan\)",
            ),
        ],
        ids=["a loop of nan", "a solver that leaves the range of numbers", "a solution of nan"],
    )
    def test_what_is_not_finite(self, gradient: Any, message: str) -> None:
        with pytest.raises(eqx.EquinoxRuntimeError, match=message):
            eqx.filter_jit(gradient)()

    def test_a_loop_that_ended_before(self) -> None:
        def loop(x: Array, throw: bool = True, **options: Any) -> Array:
            kind = Implicit(rtol=1e-6, **options)
            return lx.fori_loop(0, 4, lambda i, z: f(W, x, z), jnp.zeros(3), derivative=kind, throw=throw).sum()

        assert jnp.isfinite(loop(X))
        pattern = r"loopax.fori_loop at .*: derivative=Implicit.* this one ended before \(0\.0\d+\): .* at most 1e-06"
        for gradient in (jax.grad(loop), eqx.filter_jit(jax.grad(loop)), jax.grad(lambda x: loop(x, throw=False))):
            with pytest.raises(eqx.EquinoxRuntimeError, match=pattern):
                gradient(X)
        assert jnp.isnan(jax.grad(lambda x: loop(x, unsolved="nan"))(X)).all()

    def test_one_lane_alone_is_nan(self) -> None:
        """z <- a z + x does not converge in the last lane."""

        def loop(a: Array, x: Array) -> Array:
            return lx.fori_loop(0, 60, lambda i, z: a * z + x, 0.0, derivative=Implicit(unsolved="nan"))

        found = jax.vmap(jax.grad(loop, 1), (0, None))(jnp.array([0.5, 0.1, 1.0]), 2.0)
        assert_close(found, jnp.array([2.0, 1 / 0.9, jnp.nan]), CLOSE)


# ---- Newton's method for a stiff system: an implicit Euler step of z' = -S z - z**3, for eigenvalues of S up to 1e6

Q = jnp.linalg.qr(jnp.asarray(np.random.RandomState(0).randn(4, 4)))[0]
S = Q @ (jnp.array([1e6, 1e4, 1e2, 1.0])[:, None] * Q.T)
P = jnp.array([0.5, -0.3, 0.8, 0.2])
STEPS = jnp.geomspace(1e-3, 1.0, 64)  # of time: a lane for each


def residual(z: Array, p: Array, h: Array) -> Array:
    return z - p + h * (S.astype(p.dtype) @ z + z**3)


def stiff_newton(p: Array, h: Array, derivative: Implicit, **options: Any) -> tuple[Array, lx.LoopInfo]:
    def body(c: tuple[Array, Array]) -> tuple[Array, Array]:
        change = jnp.linalg.solve(jax.jacfwd(residual)(c[0], p, h), residual(c[0], p, h))
        return c[0] - change, jnp.abs(change).max()

    start = p, jnp.array(jnp.inf, p.dtype)
    (z, _), info = lx.while_loop(
        lambda c: c[1] > 1e-6, body, start, max_steps=9, derivative=derivative, info=True, **options
    )
    return z, info


OF_Z = Implicit(fixed_point=lambda c: c[0])


@pytest.fixture(name="iterations")
def _iterations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each linear system of a lane takes."""
    found: list[int] = []
    run_function = linear_solver.run_function

    def counted(*args: Any, **asked: Any) -> Any:
        out = run_function(*args, **asked)
        jax.debug.callback(lambda steps: found.extend(np.ravel(steps).tolist()), out.num_steps)
        return out

    monkeypatch.setattr(linear_solver, "run_function", counted)
    return found


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("lanes", ["lockstep", pytest.param("compact", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_newton_on_a_stiff_system(mode: Any, lanes: Any, throw: bool, iterations: list[int]) -> None:
    """The Jacobian of a step is zero, but for the rounding errors of a solution: they are 1e-10, not 1e-16."""
    zs, info = jax.vmap(lambda h: stiff_newton(P, h, OF_Z))(STEPS)
    assert info.num_steps.max() <= 4
    found = jax.jit(jax.vmap(mode(lambda p, h: stiff_newton(p, h, OF_Z, lanes=lanes, throw=throw)[0]), (None, 0)))(
        P, STEPS
    )
    jax.effects_barrier()
    assert iterations
    assert max(iterations) <= 2
    expected = jax.vmap(lambda z, h: jnp.linalg.inv(jax.jacfwd(residual)(z, P, h)))(zs, STEPS)
    assert_close(found, expected, 1e-9)


def test_a_start_near_the_fixed_point_of_a_slow_contraction() -> None:
    loop = lambda a: lx.fori_loop(0, 3, lambda i, z: 0.98 * z + a, 50.001, derivative=Implicit())
    assert_close(jax.grad(loop)(1.0), jnp.array(50.0), 1e-6)


def test_a_system_that_is_solved_as_exactly_as_the_loop_has_converged() -> None:
    """Of a contraction so slow that 1000 iterations leave 5e-5 of a residual: enough for a loop that left as much."""

    def slope(start: float) -> Array:
        return jax.grad(lambda a: lx.fori_loop(0, 1, lambda i, z: 0.99 * z + a, start, derivative=Implicit()))(1.0)

    assert_close(slope(100.05), jnp.array(100.0), 1e-4)


# ---- a fixed point at zero, or near


def shrink(a: Any, start: Any = 1.0, bound: Any = 1e-6, x: Any = 0.0, **options: Any) -> Any:
    return lx.while_loop(
        lambda z: jnp.abs(z - x) > bound, lambda z: a * (z - x) + x, start, derivative=Implicit(**options)
    )


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
        return lx.fori_loop(0, 3, lambda i, c: (0.5 * c[0] + a, jnp.abs(c[0])), (0.0, start), derivative=Implicit())[0]

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
        derivative = Implicit(solver, **options)
        return lx.fori_loop(0, 60, lambda i, z: a * z + x * (1 - a), x, derivative=derivative, throw=throw)

    return jax.vmap(lambda a, x: jax.grad(loop, 1)(a, x, False))(a, jnp.full(3, 2.0))


@pytest.mark.parametrize(
    "solver",
    [None, lineax.GMRES(rtol=1e-9, atol=1e-9), lambda matvec, b: jnp.where(jnp.abs(matvec(b)) > 0, 2 * b, b)],
    ids=["own", "lineax", "function"],
)
def test_an_unsolved_system_is_an_error_unless_nan_is_asked_for(solver: Any) -> None:
    a = jnp.array([0.5, 1.0, 0.5])
    pattern = r"implicit.py:\d+ \(of_lanes.<locals>.loop\): derivative=.*eigenvalue.*First at index 1 of the batch"
    with pytest.raises(eqx.EquinoxRuntimeError, match=pattern):
        eqx.filter_jit(lambda: of_lanes(solver, a))()
    assert_close(of_lanes(solver, a, unsolved="nan"), jnp.array([1.0, jnp.nan, 1.0]))
