"""JAX's flags that are to become defaults: `jax.checkpoint` and custom rules are equations that hold an object.

`make test-all` runs all tests with each of them. Here is one of each kind, with those flags that this JAX has. Others
have their tests at the end.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from loopax._src.jax_internals import inner_jaxprs
from tests.support.problem import argument_of
from tests.support.progress_recorder import once, recorder  # noqa: F401 - a fixture

FLAGS = [name for name in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3") if hasattr(jax.config, name)]
X = 0.7


@contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    with ExitStack() as stack:
        for name in FLAGS:
            stack.enter_context(flag(name, True))
        yield
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


NEWEST = jax.__version_info__ >= (0, 12)


# ---- JAX does not mark arrays as varying over a `shard_map` by itself: a body marks its own, loops mark theirs


def _vary(x: Any) -> Any:
    return lax.pcast(jnp.float64(x), "d", to="varying")


def _scanned(kind: Any) -> Any:
    def f(w: Any, x: Any, n: Any) -> Any:
        step = lambda c, row: (jnp.sin(c * _vary(w) + row), c * _vary(2.0))
        rows = jnp.broadcast_to(x * _vary(0.1), (5,))
        c, ys = lx.scan(step, x, rows, length=n, kind=kind, throw=False)
        return c + ys.sum()

    return f


def _in_lanes(lanes: Any) -> Any:
    def f(w: Any, x: Any, n: Any) -> Any:
        counts = lax.pcast(jnp.array([3, 1, 0], jnp.int32), "d", to="varying") + n
        step = lambda _, c: jnp.sin(c * _vary(w))
        of_lane = lambda n: lx.fori_loop(0, n, step, x, max_steps=8, lanes=lanes, kind="bounded", throw=False)
        return jax.vmap(of_lane)(counts).sum()

    return f


def _branched(w: Any, x: Any, n: Any) -> Any:
    del n
    return lx.cond(x > _vary(0.4), lambda x: x * _vary(w), lambda x: x, x)


@pytest.mark.skipif(not NEWEST, reason="lax.scan itself cannot do without it before")
@pytest.mark.parametrize(
    "f",
    [
        *map(_scanned, ["bounded", "residuals", lx.Checkpointed(2)]),
        *map(_in_lanes, ["lockstep", "compact", "sequential"]),
        _branched,
    ],
)
def test_bodies_that_mark_what_varies(f: Any) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def on_devices(w: Any, x: Any) -> Any:
        of_one = lambda w, x, n: f(w, x[0], n[0])[None]
        specs = PartitionSpec(), PartitionSpec("d"), PartitionSpec("d")
        mapped = jax.shard_map(of_one, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"))
        return mapped(w, x, jnp.array([5, 2], jnp.int32)).sum()

    def run() -> Any:
        slopes = jax.value_and_grad(on_devices, argnums=(0, 1))
        return jax.jit(slopes)(jnp.float64(0.7), jnp.array([0.3, 0.5]))

    with flag("jax_auto_pcast", False):
        found = run()
    with flag("jax_auto_pcast", True):
        expected = run()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


# ---- backward rules that log


@pytest.mark.skipif(not NEWEST, reason="they do not log before")
@pytest.mark.parametrize("kind", ["lax", "auto", "residuals", "checkpointed", lx.Truncated(last=2)])
def test_logs_of_a_backward_rule_are_refused_by_name(kind: Any) -> None:
    logging: Any = jax.custom_vjp(jnp.sin)
    logging.defvjp_with_logs(lambda x: (jnp.sin(x), x), lambda x, ct: ((jnp.cos(x) * ct,), {"of the sine": ct}))
    loop = lambda x: lx.fori_loop(0, 3, lambda _, y: logging(y) * x, x, **argument_of(kind))
    np.testing.assert_allclose(loop(X), lx.fori_loop(0, 3, lambda _, y: jnp.sin(y) * X, X))
    with pytest.raises(NotImplementedError, match="logs 'of the sine', and loops of loopax do not hand logs on"):
        jax.grad(loop)(X)
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.vjp(loop, X)[1].with_logs(1.0)  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.grad(lambda x: jax.vmap(loop)(x[None])[0])(jnp.float64(X))
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.vjp(lambda x: lx.cond(x > 0, logging, lambda x: x, x), X)[1](1.0)
