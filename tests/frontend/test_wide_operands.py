"""Operands of 64 bits where `jax_enable_x64` is off: they keep their bits, as in `jax.lax`."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.jax_internals import keep_bits
from tests.support.problem import argument_of, name_of
from tests.support.reference import assert_close

# ---- what takes elements out of such arrays, or puts them in


ROWS, Y, PLACES = (
    jnp.linspace(0.3, 2.0, 12).reshape(4, 3),
    jnp.linspace(-1.0, 1.0, 6).reshape(2, 3),
    jnp.array([2, 0], jnp.int32),
)

# Linear in float64[4, 3] and float64[2, 3] together; int32[2].
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gather": lambda x, y, i: x[i],
    "gather along another axis": lambda x, y, i: x.at[:, i].get(mode="promise_in_bounds", unique_indices=True),
    "scatter": lambda x, y, i: x.at[i].set(y, unique_indices=True),
    "dynamic slice": lambda x, y, i: lax.dynamic_slice_in_dim(x, i[0], 2),
    "dynamic update": lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i[1], 0),
    "concatenate": lambda x, y, i: jnp.concatenate([x, y]),
    "two results": lambda x, y, i: (x[1:], {"y": y[i[1]]}),
}


def same(f: Callable[..., Any], *arguments: Any) -> None:
    """With the flag and without."""
    expected = f(*arguments)
    with jax.enable_x64(False):
        found = f(*arguments)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert_close(found, expected)


def as_one(name: str) -> Callable[[Any, Any, Any], Any]:
    """A number, in which the function is not linear; without Python numbers, of which JAX makes 32 bits."""

    def one(x: Any, y: Any, i: Any) -> Any:
        results = jax.tree.leaves(keep_bits(FUNCTIONS[name], jnp.sin(x), y * y, i))
        return reduce(lax.add, [lax.dot(r.ravel(), jnp.cos(r).ravel()) for r in results])

    return one


def slopes(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient in both arrays, as one number again."""
    return lambda x, y, i: reduce(lax.add, [lax.dot(d.ravel(), d.ravel()) for d in jax.grad(f, (0, 1))(x, y, i)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elements_in_batches(name: str) -> None:
    f = lambda x, y, i: keep_bits(FUNCTIONS[name], x, y, i)
    same(f, ROWS, Y, PLACES)
    same(jax.jit(f), ROWS, Y, PLACES)
    same(jax.vmap(f), jnp.stack([ROWS, ROWS * ROWS]), jnp.stack([Y, Y * Y]), jnp.stack([PLACES, PLACES[::-1]]))
    same(jax.vmap(f, (None, 2, 0)), ROWS, jnp.stack([Y, Y * Y], 2), jnp.stack([PLACES, PLACES[::-1]]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_what_takes_elements_out(name: str) -> None:
    """Forward over reverse, reverse three times, and a batch of reverse twice."""
    one = as_one(name)

    def derivatives(x: Any, y: Any, i: Any) -> Any:
        second = jax.grad(slopes(one), (0, 1))
        ys, numbers = jnp.stack([y, y * y]), jnp.stack([i, i[::-1]])
        return (
            jax.jvp(lambda x, y: jax.grad(one, (0, 1))(x, y, i), (x, y), (x * x, y)),
            jax.grad(slopes(slopes(one)), (0, 1))(x, y, i),
            jax.vmap(second, (None, 0, 0))(x, ys, numbers),
        )

    same(jax.jit(derivatives), ROWS, Y, PLACES)


# ---- loops


X, XS = jnp.float64(1.1), jnp.array([0.3, 0.7, 1.9])
LIMIT, LIMITS = jnp.int64(3), jnp.array([1, 3, 2])
NEAR, FAR = jnp.int64(2**32), jnp.int64(2**32 + 2)  # 0 and 2, if they are cut
TINY = jnp.float64(1e-300)  # 0, if it is cut


def grow(c: Any, x: Any) -> Any:
    """Without Python numbers, with which JAX would make 32 bits."""
    return jnp.sin(c * x) + x


def lanes_of(x: Any, ns: Any, lanes: Any) -> Any:
    return jax.vmap(lambda n: lx.fori_loop(0, n, lambda i, c: grow(c, x), x, lanes=lanes))(ns)


LOOPS: dict[str, Callable[..., Any]] = {
    "fori_loop": lambda x, xs, n, ns: lx.fori_loop(0, 3, lambda i, c: grow(c, x), x),
    "fori_loop, traced": lambda x, xs, n, ns: lx.fori_loop(n - n, n, lambda i, c: (i, grow(c[1], x)), (n, x)),
    "while_loop": lambda x, xs, n, ns: lx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, grow(c[1], x)), (0, x)),
    "scan": lambda x, xs, n, ns: lx.scan(lambda c, row: (grow(c, row), c), x, xs, length=n),
    "History": lambda x, xs, n, ns: (
        lx.fori_loop(0, 3, lambda i, h: h.push(grow(h[0], h[i % 2])), lx.History(3, like=x).push(x).push(x)).rows
    ),
    "Buffer": lambda x, xs, n, ns: (
        lx.fori_loop(0, 3, lambda i, b: b.append(grow(b[i], x)), lx.Buffer(4, like=x).append(x)).rows
    ),
    "free": lambda x, xs, n, ns: lx.fori_loop(
        0, 2, lambda i, c: lx.fori_loop(0, 2, lambda j, c: grow(c, x), c), x, lanes="free"
    ),
    "cond": lambda x, xs, n, ns: lx.cond(x > xs[0], jnp.sin, lambda x: x, x),
    "lanes_map": lambda x, xs, n, ns: lx.lanes_map(
        lambda n: lx.scan(lambda c, row: (grow(c, row), c), x, xs, length=n), ns, num_lanes=2
    ),
    "lockstep": lambda x, xs, n, ns: lanes_of(x, ns, "lockstep"),
    "compact": lambda x, xs, n, ns: lanes_of(x, ns, lx.Compact(min_lanes=1)),
    "sequential": lambda x, xs, n, ns: lanes_of(x, ns, "sequential"),
    "costly branches of lanes": lambda x, xs, n, ns: jax.vmap(
        lambda y: lx.cond(y > x, lambda y: lx.fori_loop(0, 3, lambda i, c: grow(c, x), y), jnp.sin, y)
    )(xs),
    "reference": lambda x, xs, n, ns: with_reference(x, xs),
}


def with_reference(x: Any, xs: Any) -> Any:
    total = jax.new_ref(x)

    def f(c: Any, row: Any) -> Any:
        total[...] = grow(total[...], row)
        return c, None

    lx.scan(f, x, xs)
    return total[...]


def wide(result: Any) -> list[Any]:
    """The arrays that have 64 bits with the flag."""
    return [x for x in jax.tree.leaves(result) if x.dtype == jnp.float64]


def of_loop(name: str) -> Callable[[Any, Any], Any]:
    return lambda x, xs: wide(LOOPS[name](x, xs, LIMIT, LIMITS))


@pytest.mark.parametrize("name", LOOPS)
def test_values(name: str) -> None:
    same(lambda: jax.jit(of_loop(name))(X, XS))


@pytest.mark.parametrize("name", ["scan", "Buffer", "reference", "lockstep", "free", "compact"])
def test_derivatives(name: str) -> None:
    """Forward over reverse, of a sum of squares without Python numbers."""
    total = lambda x, xs: reduce(lax.add, [lax.dot(y.ravel(), y.ravel()) for y in of_loop(name)(x, xs)])
    second = lambda x, xs: jax.jvp(jax.grad(total, (0, 1)), (x, xs), (x, xs))
    same(lambda: jax.jit(second)(X, XS))


@pytest.mark.parametrize("kind", ["checkpointed", "bounded", "residuals", lx.Truncated(last=2)], ids=name_of)
def test_kinds(kind: Any) -> None:
    f = lambda x: lx.fori_loop(0, 9, lambda i, c: grow(c, x), x, **argument_of(kind))
    same(lambda: jax.jit(jax.grad(f))(X))


# What only decides whether to raise may have 32 bits, of which JAX warns.
CHECKS_ARE_CUT = pytest.mark.filterwarnings("ignore:Explicitly requested dtype")


@CHECKS_ARE_CUT
def test_reversible() -> None:
    """Its inverse is compared with the step; the NaN of one that is wrong is of the dtype, too."""
    for inverse in (lambda i, c, x: c - x, lambda i, c, x: c):
        kind = lambda x, inverse=inverse: lx.Reversible(partial(inverse, x=x), rtol=1e-3)
        f = lambda x, kind=kind: lx.fori_loop(0, 9, lambda i, c: c + x, x, kind=kind(x), throw=False)
        same(lambda f=f: jax.jit(jax.grad(f))(X))


@CHECKS_ARE_CUT
def test_implicit() -> None:
    def f(x: Any) -> Any:
        return lx.fori_loop(0, 80, lambda i, c: jnp.cos(c * x), x, derivative=lx.Implicit(rtol=1e-6))

    with jax.enable_x64(False):
        found = jax.jit(jax.grad(f))(jnp.sin(X))
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, jax.grad(f)(jnp.sin(X)), rtol=1e-5)


# ---- numbers of steps


def test_an_index_beyond_32_bits() -> None:
    with jax.enable_x64(False):
        last = jax.jit(lambda n: lx.fori_loop(n - n, n, lambda i, c: i, n))(LIMIT)
        far = jax.jit(lambda a, b: lx.fori_loop(a, b, lambda i, c: i, b))(NEAR, FAR)
    assert (last, last.dtype) == (2, jnp.int64)
    assert (far, far.dtype) == (int(FAR) - 1, jnp.int64)


def test_predicates_and_numbers_of_branches() -> None:
    with jax.enable_x64(False):
        assert lx.cond(TINY, lambda: True, lambda: False)
        assert jax.jit(lambda p: lx.cond(p, lambda: True, lambda: False))(TINY)
        assert jax.jit(lambda i: lx.switch(i, [lambda: 0, lambda: 1, lambda: 2, lambda: 3]))(FAR) == 3
