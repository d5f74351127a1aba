"""JAX's flags that are to become defaults: `jax.checkpoint` and custom rules are equations that hold an object.

`make test-all` runs all tests with each of them. Here is one of each kind, with those flags that this JAX has.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.jaxpr.util import inner_jaxprs, inner_programs, map_programs
from loopax._src.jax_internals import ClosedJaxpr, held_program
from tests.support.progress_recorder import once, recorder  # noqa: F401 - a fixture

FLAGS = [name for name in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3") if hasattr(jax.config, name)]
X = 0.7


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in FLAGS}
    for name in FLAGS:
        jax.config.update(name, True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.clear_caches()


# JAX 0.10 asks for the flag where a rule is attached, so the functions are made in the tests.


def checkpointed() -> Any:
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))


def with_vjp() -> Any:
    doubled = jax.custom_vjp(lambda x: 2.0 * jnp.sin(x))
    doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (3.0 * jnp.cos(x) * ct,))
    return doubled


def with_jvp() -> Any:
    halved = jax.custom_jvp(lambda x: 0.5 * jnp.sin(x))
    halved.defjvp(lambda p, t: (halved(*p), 0.25 * jnp.cos(p[0]) * t[0]))
    return halved


def powers(x: Any, n: Any = 4, **options: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, y: jnp.sin(y) * x, x, **options)


def unrolled(x: Any) -> Any:
    y = x
    for _ in range(4):
        y = jnp.sin(y) * x
    return y


def test_loops_in_a_checkpoint() -> None:
    batch = jax.vmap(jax.grad(jax.checkpoint(powers)))
    np.testing.assert_allclose(jax.jit(batch)(np.full(2, X)), jax.vmap(jax.grad(unrolled))(np.full(2, X)))


@pytest.mark.parametrize("kind", ["checkpointed", "bounded", "residuals"])
@pytest.mark.parametrize("make", [checkpointed, with_jvp, with_vjp])
def test_objects_in_the_body(make: Any, kind: Any) -> None:
    inner = make()

    def loop(x: Any) -> Any:
        return lx.fori_loop(0, 3, lambda _, y: inner(y) * x, x, kind=kind)

    def alone(x: Any) -> Any:
        return inner(inner(inner(x) * x) * x) * x

    run = lambda f: jax.jit(jax.vmap(jax.value_and_grad(f)))(np.array([X, 0.2]))
    np.testing.assert_allclose(run(loop), run(alone))


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: jax.custom_jvp(f), lambda f: jax.custom_vjp(f)])  # noqa: PLW0108
def test_rewrite_loops_finds_loops_in_objects(wrap: Any) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]

    wrapped = wrap(f)
    if hasattr(wrapped, "defjvp"):
        wrapped.defjvp(lambda p, t: (wrapped(*p), 5.0 * t[0]))
    elif hasattr(wrapped, "defvjp"):
        wrapped.defvjp(lambda x: (wrapped(x), None), lambda _, ct: (5.0 * ct,))
    rewritten = lx.rewrite_loops(wrapped)
    names = [eqn.primitive.name for eqn in _all(jax.make_jaxpr(rewritten)(X).jaxpr)]
    assert "loop" in names
    assert "while" not in names
    value, slope = jax.value_and_grad(rewritten)(X)
    np.testing.assert_allclose(value, np.sin(np.sin(np.sin(X))))
    expected = np.cos(X) * np.cos(np.sin(X)) * np.cos(np.sin(np.sin(X))) if wrap is jax.checkpoint else 5.0
    np.testing.assert_allclose(slope, expected)


def _all(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _all(inner)


def test_buffers_pass_through_a_checkpoint() -> None:
    def f(x: Any) -> Any:
        body = jax.checkpoint(lambda _, c: (c[0].append(c[1]), jnp.sin(c[1])))
        return lx.fori_loop(0, 3, body, (lx.Buffer(3, like=x), x))[0].rows.sum()

    slope = 1 + np.cos(X) + np.cos(X) * np.cos(np.sin(X))
    np.testing.assert_allclose(jax.jit(jax.grad(f))(jnp.float64(X)), slope)


def test_progress_is_shown_once(recorder: Any) -> None:  # noqa: F811
    jax.block_until_ready(jax.value_and_grad(jax.checkpoint(lambda x: powers(x, 25, progress=True)))(X))
    once(recorder, 25)


def test_another_program_in_an_object() -> None:
    """The program that an equation holds is exchanged, its rules stay."""
    function = with_vjp()
    closed = jax.make_jaxpr(lambda x: function(x) + 1.0)(X)
    (eqn, *_) = closed.jaxpr.eqns
    (inner,) = inner_programs(eqn)
    assert held_program(eqn.params["_prim"]) is inner
    assert map_programs(eqn, lambda program: program).params["_prim"] is eqn.params["_prim"]
    other = jax.make_jaxpr(lambda x: 7.0 * x)(X)
    new = map_programs(eqn, lambda _: other)
    results = lambda x: eqn.primitive.bind(x, **new.params)[0]
    np.testing.assert_allclose(jax.value_and_grad(results)(X), (2 * np.sin(X), 3 * np.cos(X)))
    assert isinstance(other, ClosedJaxpr)
    np.testing.assert_allclose(jax.jit(results)(X), 7.0 * X)
