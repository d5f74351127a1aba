"""A kind with an inverse, written outside of loopax, under every composition of transformations.

The problem is that of `tests/support/problem.py` with a step that has an inverse. What is expected comes from Python
loops where the number of steps is one, and from the same program with another kind elsewhere.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from tests.kinds.reversible import Reversible
from tests.support.op_by_op import op_by_op
from tests.support.problem import BOUND, XS, H, Program, W, mixed
from tests.support.reference import assert_close, fori_reference, scan_reference, while_reference

OTHER = lx.Checkpointed(4)


def step(w: Array, c: Any, x: Any) -> Any:
    """A step of two halves: each changes one part of the carry by a function of the other."""
    p, q, count = c
    p = p + jnp.sin(w @ q + x)
    return p, 1.1 * q - jnp.tanh(p), count + 1


def back(w: Array, c: Any, x: Any) -> Any:
    """Its inverse."""
    p, q, count = c
    q = (q + jnp.tanh(p)) / 1.1
    return p - jnp.sin(w @ q + x), q, count - 1


def start(h: Array) -> Any:
    return h, 2.0 * h, 0


def row_of(x: Array, c: Any) -> Any:
    return c[0] * x, c[1].sum()


def small(c: Any, y: Any = None) -> Array:
    return abs(c[0]).max() < 2.4


def scan_of(run: Callable[..., Any], kind: lx.Kind | None, **options: Any) -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        f = lambda c, x: (new := step(w, c, x), row_of(x, new))
        own = Reversible(lambda c, x: back(w, c, x)) if kind is None else kind
        (p, q, _), ys = run(f, start(h), xs, n, kind=own, **options)
        return mixed((p, q, ys))

    return program


def scan_with(f: Any, carry: Any, xs: Any, n: Any, kind: lx.Kind, **options: Any) -> Any:
    return lx.scan(f, carry, xs, length=n, kind=kind, **options)


def while_loop(kind: lx.Kind | None, max_steps: int | None = BOUND, lanes: Any = "lockstep") -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        own = Reversible(lambda c: back(w, c, xs[c[2] - 1])) if kind is None else kind
        body = lambda c: step(w, c, xs[c[2]])
        p, q, _ = lx.while_loop(lambda c: c[2] < n, body, start(h), max_steps=max_steps, kind=own, lanes=lanes)
        return mixed((p, q))

    return program


def fori_loop(kind: lx.Kind | None, lanes: Any = "lockstep") -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        own = Reversible(lambda i, c: back(w, c, xs[i - 1])) if kind is None else kind
        body = lambda i, c: step(w, c, xs[i - 1])
        return mixed(lx.fori_loop(1, n + 1, body, start(h), max_steps=BOUND, kind=own, lanes=lanes)[:2])

    return program


def of_scan(**options: Any) -> Callable[..., Program]:
    return lambda kind, **lanes: scan_of(scan_with, kind, **options, **lanes)


LOOPS: dict[str, Callable[..., Program]] = {
    "scan": of_scan(),
    "reverse": of_scan(reverse=True),
    "stop": of_scan(stop=lambda c, y: ~small(c)),
    "reverse_stop": of_scan(reverse=True, stop=lambda c, y: ~small(c)),
    "while": while_loop,
    "unbounded": lambda kind, **lanes: while_loop(kind, max_steps=None, **lanes),
    "fori": fori_loop,
}


def by_python(loop: str) -> Program:
    """The result of a Python loop."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        if loop == "fori":
            return mixed(fori_reference(1, n + 1, lambda i, c: step(w, c, xs[i - 1]), start(h))[:2])
        if loop in {"while", "unbounded"}:
            return mixed(while_reference(lambda c: c[2] < n, lambda c: step(w, c, xs[c[2]]), start(h))[0][:2])
        stop = (lambda c, y: ~small(c)) if "stop" in loop else None
        f = lambda c, x: (new := step(w, c, x), row_of(x, new))
        (p, q, _), ys, _ = scan_reference(f, start(h), xs, n, "reverse" in loop, stop)
        return mixed((p, q, ys))

    return program


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_python_loops(loop: str) -> None:
    found = jax.jit(jax.value_and_grad(LOOPS[loop](None), (0, 1, 2)))
    for n in (0, 1, 7, BOUND):
        assert_close(found(W, H, XS, n), jax.value_and_grad(by_python(loop), (0, 1, 2))(W, H, XS, n))


LENGTHS = jnp.array([0, 3, BOUND, 1])
STARTS = jnp.stack([H, -H, 0.5 * H, 2.0 * H])
ALL = (0, 1, 2)


def summed(f: Program, axes: Any) -> Program:
    return lambda *args: jax.vmap(f, axes)(*args).sum()


def each(f: Any) -> Any:
    """A function for lanes with their own starts and lengths, and for two batches of them."""
    return jax.vmap(f, (None, 0, None, 0))


COMPOSITIONS: dict[str, Callable[[Program], Any]] = {
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f, ALL), 1)(W, H, XS, 5),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, ALL), 1)(W, H, XS, 5),
    "reverse over forward": lambda f: jax.grad(lambda w: jax.jvp(lambda h: f(w, h, XS, 5), (H,), (H,))[1])(W),
    "third": lambda f: jax.jacrev(lambda h: jax.jvp(jax.grad(lambda h: f(W, h, XS, 4)), (h,), (H,))[1])(H),
    "vmap of grad": lambda f: each(jax.grad(f, ALL))(W, STARTS, XS, LENGTHS),
    "grad of vmap": lambda f: jax.grad(summed(f, (None, 0, None, 0)), ALL)(W, STARTS, XS, LENGTHS),
    "grad of vmap of one length": lambda f: jax.grad(summed(f, (None, 0, None, None)), ALL)(W, STARTS, XS, 6),
    "vmap of hessian": lambda f: each(jax.hessian(f, 1))(W, STARTS, XS, LENGTHS),
    "hessian of vmap": lambda f: jax.hessian(summed(f, (None, 0, None, 0)))(W, STARTS, XS, LENGTHS),
    "grad of vmap of grad": lambda f: jax.grad(lambda hs: mixed(each(jax.grad(f, 1))(W, hs, XS, LENGTHS)))(STARTS),
    "two vmaps": lambda f: jax.vmap(each(jax.grad(f)), (0, None, None, None))(
        jnp.stack([W, 0.5 * W]), STARTS, XS, LENGTHS
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), ALL)(W, H, XS, 5),
    "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(lambda h: f(W, h, XS, 5)))(H),
    "checkpoint of grad": lambda f: jax.grad(lambda w: jax.checkpoint(jax.grad(f, 1))(w, H, XS, 5).sum())(W),
    "linearize": lambda f: jax.linearize(jax.grad(lambda h: f(W, h, XS, 5)), H)[1](H),
    "vmap of linear functions": lambda f: jax.vmap(jax.vjp(lambda w, h: f(w, h, XS, 5), W, H)[1])(jnp.arange(3.0)),
    "inside lax.scan": lambda f: jax.grad(
        lambda h: jax.lax.scan(lambda h, n: (H + jnp.sin(h * f(W, h, XS, n)), None), h, LENGTHS)[0].sum()
    )(H),
    "inside a loop": lambda f: jax.hessian(
        lambda h: lx.fori_loop(0, 3, lambda i, h: H + jnp.sin(h * f(W, h, XS, i + 2)), h, kind=lx.Checkpointed(1)).sum()
    )(H),
}


FAST = {
    ("scan", "forward over reverse"),
    ("reverse_stop", "reverse over reverse"),
    ("scan", "vmap of grad"),
    ("while", "grad of vmap"),
    ("scan", "checkpoint"),
    ("scan", "inside a loop"),
}


def compositions() -> Iterator[Any]:
    """All of them, of which some are in `make test`."""
    for loop, composition in product(["scan", "reverse_stop", "while"], COMPOSITIONS):
        marks = [] if (loop, composition) in FAST else [pytest.mark.slow]
        yield pytest.param(loop, composition, marks=marks)


@pytest.mark.parametrize(("loop", "composition"), list(compositions()))
def test_compositions(loop: str, composition: str) -> None:
    compose = COMPOSITIONS[composition]
    found, expected = (jax.jit(lambda kind=kind: compose(LOOPS[loop](kind)))() for kind in (None, OTHER))
    assert_close(found, expected)


LEAVING = ["grad of vmap", *(pytest.param(c, marks=pytest.mark.slow) for c in ("vmap of grad", "hessian of vmap"))]


@pytest.mark.parametrize("composition", LEAVING)
@pytest.mark.parametrize("loop", [pytest.param("scan", marks=pytest.mark.slow), "while"])
def test_lanes_that_leave(loop: str, composition: str) -> None:
    compose, lanes = COMPOSITIONS[composition], lx.Compact(min_lanes=1, shrink=2)
    found, expected = (jax.jit(lambda kind=kind: compose(LOOPS[loop](kind, lanes=lanes)))() for kind in (None, OTHER))
    assert_close(found, expected)


@pytest.mark.slow
def test_without_jit() -> None:
    found = op_by_op(jax.grad(LOOPS["scan"](None), ALL))(W, H, XS, 3)
    assert_close(found, jax.grad(by_python("scan"), ALL)(W, H, XS, 3))


def test_a_loop_in_the_step() -> None:
    """A reversible loop whose step holds one."""

    def program(h: Array, kind: Any) -> Array:
        def several(c: Any) -> Any:
            inner = lambda i, c: back(W, c, XS[i])
            return lx.fori_loop(0, 3, lambda i, c: step(W, c, XS[i]), c, kind=kind(inner))

        def all_back(c: Any) -> Any:
            return lx.fori_loop(0, 3, lambda i, c: back(W, c, XS[2 - i]), c)

        outer = lx.fori_loop(0, 4, lambda i, c: several(c), start(h), kind=kind(lambda i, c: all_back(c)))
        return mixed(outer[:2])

    for transform in (jax.grad, jax.hessian):
        found, expected = (
            jax.jit(transform(lambda h, kind=kind: program(h, kind)))(H) for kind in (Reversible, lambda _: OTHER)
        )
        assert_close(found, expected)


def sweeps(program: Any, *args: Any) -> list[ReverseSweep]:
    """Those that stand in a program."""
    found = [eqn.params for eqn in jax.make_jaxpr(program)(*args).jaxpr.eqns if eqn.primitive is reverse_sweep_p]
    return [ReverseSweep(**params) for params in found]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_gradient_stores_one_carry(loop: str) -> None:
    (sweep,) = sweeps(jax.grad(LOOPS[loop](None)), W, H, XS, 5)
    assert sweep.inverse is not None
    assert sweep.saving.rows(BOUND) == 1


def test_a_wrong_inverse_gives_a_wrong_gradient() -> None:
    """It is the inverse that walks back, not a replay."""
    wrong = Reversible(lambda i, c: back(2.0 * W, c, XS[i]))
    loop = lambda h, kind: mixed(lx.fori_loop(0, 5, lambda i, c: step(W, c, XS[i]), start(h), kind=kind)[:2])
    found, expected = (jax.grad(loop)(H, kind) for kind in (wrong, OTHER))
    assert not jnp.allclose(found, expected)


def test_accumulators_are_not_walked_back() -> None:
    """Leaves that the derivative does not read are not stored."""

    def program(h: Array) -> Array:
        body = lambda i, c: (step(W, c[0], XS[i]), c[1] + c[0][0])
        kind = Reversible(lambda i, c: ((before := back(W, c[0], XS[i])), c[1] - before[0]))
        return lx.fori_loop(0, 5, body, (start(h), h), kind=kind)[1].sum()

    (sweep,) = sweeps(jax.grad(program), H)
    assert sweep.num_state == 2


class TestRefused:
    def test_free_lanes(self) -> None:
        inner = lambda c: lx.fori_loop(0, 2, lambda i, c: step(W, c, XS[i]), c)
        kind = Reversible(lambda i, c: c)
        with pytest.raises(NotImplementedError, match="lanes='free' does not take a kind that brings an inverse"):
            lx.fori_loop(0, 3, lambda i, c: inner(c), start(H), kind=kind, lanes="free")

    def test_a_queue(self) -> None:
        def of_item(h: Array) -> Array:
            kind = Reversible(lambda i, c: back(W, c, XS[i]))
            return mixed(lx.fori_loop(0, 3, lambda i, c: step(W, c, XS[i]), start(h), kind=kind)[:2])

        with pytest.raises(NotImplementedError, match="does not take a kind that brings an inverse"):
            lx.lanes_map(of_item, STARTS, lanes=2)

    def test_what_is_no_function(self) -> None:
        with pytest.raises(TypeError, match="the inverse of fori_loop"):
            lx.fori_loop(0, 3, lambda i, c: c, H, kind=Reversible(3))  # pyright: ignore[reportArgumentType]

    def test_an_inverse_with_another_carry(self) -> None:
        with pytest.raises(TypeError, match="the inverse of body_fun of fori_loop"):
            lx.fori_loop(0, 3, lambda i, c: c, H, kind=Reversible(lambda i, c: c[:2]))
