"""JAX's flags that are to become defaults: `jax.checkpoint` and custom rules are equations that hold an object.

`make test-all` runs all tests with each of them. Here is one of each kind, with those flags that this JAX has. Others
have their tests at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

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


NEWEST = jax.__version_info__ >= (0, 12)


@contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


# ---- arrays that a body closes over are no constants of its jaxpr


@pytest.mark.parametrize("kind", ["bounded", "residuals", "checkpointed"])
def test_simplified_constants(kind: Any) -> None:
    table = jnp.sin(jnp.arange(4.0))

    def loop(x: Any, n: Any) -> Any:
        return lx.fori_loop(0, n, lambda i, y: jnp.sin(y) * x + table[i] + (table * y).sum(), x, max_steps=4, kind=kind)

    def alone(x: Any, n: int) -> Any:
        y = x
        for i in range(n):
            y = jnp.sin(y) * x + table[i] + (table * y).sum()
        return y

    xs, counts = jnp.array([X, 0.2]), [3, 1]
    with flag("jax_use_simplified_jaxpr_constants", True):
        both = lambda x, n: (jax.value_and_grad(loop)(x, n), jax.grad(jax.grad(loop))(x, n))
        (values, slopes), curvatures = jax.jit(jax.vmap(both))(xs, jnp.array(counts))
    for i, (x, n) in enumerate(zip(xs, counts, strict=True)):
        expected = alone(x, n), jax.grad(alone)(x, n), jax.grad(jax.grad(alone))(x, n)
        np.testing.assert_allclose((values[i], slopes[i], curvatures[i]), expected, rtol=1e-12)


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


def _conditional(w: Any, x: Any, n: Any) -> Any:
    del n
    return lx.while_loop(lambda c: c > _vary(0.1), lambda c: c * _vary(w), x, max_steps=20, throw=False)


@pytest.mark.skipif(not NEWEST, reason="lax.scan itself cannot do without it before")
@pytest.mark.parametrize(
    "f",
    [
        *map(_scanned, ["bounded", "residuals", lx.Checkpointed(2)]),
        *map(_in_lanes, ["lockstep", "compact", "sequential"]),
        *(_branched, _conditional),
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


# ---- a scan of `jax.lax` is an equation that holds an object, and changes arrays in place. It has no derivatives yet.


@pytest.mark.skipif(not NEWEST, reason="the flag is too young")
@pytest.mark.parametrize("run", [lambda f: f, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])[0]])
@pytest.mark.xfail(strict=True, raises=NotImplementedError, reason="JAX 0.12: Scan3 has no rule for discharge")
def test_scan3_in_a_body(run: Any) -> None:
    with flag("jax_scan3", True):
        inner = lambda y: lax.scan(lambda c, _: (jnp.sin(c), None), y, length=2)[0]
        run(lambda x: lx.fori_loop(0, 2, lambda _, y: inner(y) * x, x))(jnp.float64(X))


@pytest.mark.skipif(not NEWEST, reason="the flag is too young")
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="JAX 0.12: Scan3 is no scan that can be replaced")
def test_rewrite_loops_finds_scan3() -> None:
    with flag("jax_scan3", True):
        f = lx.rewrite_loops(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)[0])
        assert "loop" in [eqn.primitive.name for eqn in _all(jax.make_jaxpr(f)(jnp.float64(X)).jaxpr)]


# ---- backward rules that log


@pytest.mark.skipif(not NEWEST, reason="they do not log before")
@pytest.mark.parametrize("kind", ["lax", "auto", "residuals", "checkpointed", lx.Truncated(last=2)])
def test_logs_of_a_backward_rule_are_refused_by_name(kind: Any) -> None:
    logging: Any = jax.custom_vjp(jnp.sin)
    logging.defvjp_with_logs(lambda x: (jnp.sin(x), x), lambda x, ct: ((jnp.cos(x) * ct,), {"of the sine": ct}))
    loop = lambda x: lx.fori_loop(0, 3, lambda _, y: logging(y) * x, x, kind=kind)
    np.testing.assert_allclose(loop(X), lx.fori_loop(0, 3, lambda _, y: jnp.sin(y) * X, X))
    with pytest.raises(NotImplementedError, match="logs 'of the sine', and loops of loopax do not hand logs on"):
        jax.grad(loop)(X)
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.vjp(loop, X)[1].with_logs(1.0)  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.grad(lambda x: jax.vmap(loop)(x[None])[0])(jnp.float64(X))
    with pytest.raises(NotImplementedError, match="of the sine"):
        jax.vjp(lambda x: lx.cond(x > 0, logging, lambda x: x, x), X)[1](1.0)


@pytest.mark.skipif(not NEWEST, reason="they do not log before")
def test_logs_in_the_linear_system_of_implicit_are_refused_by_name() -> None:
    logging: Any = jax.custom_vjp(jnp.cos)
    logging.defvjp_with_logs(lambda x: (jnp.cos(x), x), lambda x, ct: ((-jnp.sin(x) * ct,), {"of the cosine": ct}))
    loop = lambda f, x: lx.fori_loop(0, 60, lambda _, y: 0.5 * f(y) + x, x, kind="implicit")
    np.testing.assert_allclose(loop(logging, X), loop(jnp.cos, X))
    with pytest.raises(NotImplementedError, match="logs 'of the cosine', and loops of loopax do not hand logs on"):
        jax.grad(lambda x: loop(logging, x))(X)
    plain: Any = jax.custom_vjp(jnp.cos)
    plain.defvjp(lambda x: (jnp.cos(x), x), lambda x, ct: (-jnp.sin(x) * ct,))
    np.testing.assert_allclose(jax.grad(lambda x: loop(plain, x))(X), jax.grad(lambda x: loop(jnp.cos, x))(X))
