"""Loops that end before a step that makes a NaN or an infinity (`finite=`)."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import loopax as lx
from tests.support.breaking_loops import LOOPS, QUIET, RAISED, X, broken_at, fori, scan, while_
from tests.support.limited_loops import raises

KINDS = ["auto", "lax", "checkpointed", "bounded", "residuals"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("bad", [0, 3, 5, 9])
def test_a_loop_ends_before_the_step_that_breaks(loop: Any, bad: int) -> None:
    steps, is_broken = min(bad, 6), bad < 6
    for run in (loop, jax.jit(loop)):
        last, info = run(bad, X)
        np.testing.assert_allclose(last, X * 1.5**steps)
        assert info.num_steps == steps
        assert info.broken == is_broken
        assert not info.limit_reached
        assert info.broken_step == (steps if is_broken else -1)
        assert info.broken_leaf == ((1 if loop is while_ else 0) if is_broken else -1)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_that_of_the_steps_before(loop: Any, kind: str) -> None:
    options = {"max_steps": 6} if loop is not scan else {}
    value = lambda x, bad: jnp.sum(loop(bad, x, kind=kind, **options)[0] ** 2)
    gradient, hessian = jax.jit(jax.grad(value)), jax.jit(jax.hessian(value))
    for bad in (0, 4, 9):
        expected = 2 * X * 1.5 ** (2 * min(bad, 6))
        np.testing.assert_allclose(jax.jacfwd(value)(X, bad), expected)
        if kind != "lax" or loop is scan:  # whose length is static
            np.testing.assert_allclose(gradient(X, bad), expected)
            np.testing.assert_allclose(hessian(X, bad), np.diag([2 * 1.5 ** (2 * min(bad, 6))] * 3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 4])
def test_rows_before_the_step_are_kept(reverse: bool, unroll: int) -> None:
    xs = jnp.array([1.0, 2.0, 0.0, 4.0, 5.0])

    def run(xs: Any, n: Any = 5) -> Any:
        options = {"finite": True, "throw": False, "info": True, "reverse": reverse, "unroll": unroll}
        return lx.scan(lambda c, x: (c + x, 1 / x), jnp.float64(0), xs, n, **options)

    (carry, ys), info = jax.jit(run)(xs)
    taken, expected = (9.0, [0, 0, 0, 0.25, 0.2]) if reverse else (3.0, [1, 0.5, 0, 0, 0])
    assert carry == taken
    assert info.num_steps == 2
    assert info.broken_step == 2
    assert info.broken_leaf == 1
    np.testing.assert_allclose(ys, expected)
    grad = jax.jit(jax.grad(lambda xs: jnp.sum(run(xs)[0][1])))(xs)
    np.testing.assert_allclose(grad, np.where(np.array(expected) == 0, 0, -(np.array(expected) ** 2)))
    many = jnp.stack([xs, xs + 1, xs.at[1].set(0)])
    lengths = jnp.array([5, 4, 5], jnp.int32)
    (_, rows), info = jax.jit(jax.vmap(run))(many, lengths)
    np.testing.assert_array_equal(info.broken_step, [2, -1, 2 if reverse else 1])
    for i in range(3):
        (_, alone), _ = run(many[i], lengths[i])
        np.testing.assert_allclose(rows[i], alone)


# ---- what breaks


def test_an_element_that_is_not_finite_at_the_start_never_counts() -> None:
    start = jnp.array([-jnp.inf, 0.0, jnp.nan])
    turned = lambda i, x: jnp.where(i % 2 == 0, jnp.array([1.0, 2.0, 3.0]), start.at[1].set(5.0))
    assert not lx.fori_loop(0, 6, turned, start, finite=True, info=True)[1].broken
    breaks = lambda i, x: jnp.where(i == 3, x.at[1].set(-jnp.inf), x + 1)
    assert lx.fori_loop(0, 6, breaks, start, finite=True, throw=False, info=True)[1].broken_step == 3


def test_infinities_may_be_allowed() -> None:
    run = partial(fori, 3, X, value=jnp.inf)
    assert run().__getitem__(1).broken
    assert not run(finite="nan")[1].broken
    assert fori(3, X, finite="nan")[1].broken_step == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1700), (70, 80)])
def test_of_any_dtype_and_shape_the_element_is_right(dtype: str, shape: tuple[int, ...]) -> None:
    index = tuple(size // 2 for size in shape)

    def run(at: Any, value: Any, finite: Any) -> Any:
        step = lambda i, x: jnp.where(i == 2, x.at[index].set(value.astype(dtype)), x)
        return lx.fori_loop(0, at, step, jnp.ones(shape, dtype), finite=finite)

    run = jax.jit(run, static_argnums=2)
    run(2, jnp.float32(jnp.nan), True)
    run(3, jnp.float32(jnp.inf), "nan")
    place = f"[{', '.join(map(str, index))}]" if shape else ""
    with raises(RAISED, f"step 2 (the first is 0) made carry{place} NaN; it was 1"):
        jax.block_until_ready(run(3, jnp.float32(jnp.nan), True))
    with raises(RAISED, f"step 2 (the first is 0) made carry{place} infinite; it was 1"):
        jax.block_until_ready(run(3, jnp.float32(-jnp.inf), True))


def test_leaves_that_stay_and_integers_are_not_looked_at() -> None:
    init = {"count": jnp.int32(0), "weights": jnp.array([jnp.nan]), "x": jnp.float64(1)}
    body = lambda c: {**c, "count": c["count"] + 1, "x": c["x"] * 2}
    run = lambda **k: lx.while_loop(lambda c: c["count"] < 3, body, init, info=True, **k)[1]
    assert not run(finite=True).broken
    assert run().broken is None
    counts = lx.fori_loop(0, 3, lambda i, n: n + i, jnp.int32(0), finite=True, info=True)
    assert counts[0] == 3
    assert counts[1][2:] == (False, -1, -1)  # nothing could break


# ---- large arrays, of which a step writes parts


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_of_a_large_array_what_a_step_writes_is_looked_at(value: float) -> None:
    def run(bad: Any) -> Any:
        def step(i: Any, rows: Any) -> Any:
            return rows.at[i].set(jnp.where((i == bad) & (jnp.arange(2000) == 7), value, 1.0))

        return lx.fori_loop(0, 4, step, jnp.full((6, 2000), jnp.inf), finite=True, throw=False, info=True)

    rows, info = jax.jit(run)(9)
    assert not info.broken
    assert rows[3, 0] == 1
    rows, info = jax.jit(run)(2)  # the element was an infinity at the start
    assert not info.broken
    assert rows[3, 0] == 1
    finite = jax.jit(lambda bad: lx.fori_loop(0, 4, lambda i, r: r.at[i].set(jnp.where(i == bad, value, 1.0)), ZEROS,
                                              finite=True))  # fmt: skip
    finite(9)
    with raises(RAISED, f"step 2 (the first is 0) made carry[2, 0] {'NaN' if value != value else 'infinite'}"):
        jax.block_until_ready(finite(2))


ZEROS = jnp.zeros((6, 2000))


def test_rows_of_buffers_and_histories_are_looked_at() -> None:
    def append(xs: Any, when: Any) -> Any:
        step = lambda buffer, x: (buffer.append(1 / x, when=when | (x[0] > 0)), None)
        return lx.scan(step, lx.Buffer(6, like=jnp.zeros(2)), xs, finite=True)[0].rows

    xs = jnp.array([[1.0, 2.0], [0.0, 3.0]])
    append = jax.jit(append)
    np.testing.assert_allclose(append(xs, False)[0], [1, 0.5])
    with raises(RAISED, "step 1 (the first is 0) made carry[0] infinite, in the row that is put into it"):
        jax.block_until_ready(append(xs, True))

    def step(state: Any, history: Any) -> Any:
        return state, jnp.log(history[-1] - 0.5)

    with raises(RAISED, "step 1 (the first is 0) made history"):
        jax.block_until_ready(
            lx.rollout(step, None, 4, history=lx.History(3, like=jnp.ones(1)).push(jnp.ones(1)), finite=True)
        )


# ---- errors


def test_errors_name_line_step_lane_path_index_and_value() -> None:
    def run(bad: Any) -> Any:
        body = lambda c: {"x": [broken_at(bad)(c["x"][0], c["i"])], "i": c["i"] + 1}
        return lx.while_loop(lambda c: c["i"] < 5, body, {"x": [X], "i": jnp.int32(0)}, finite=True)["x"][0]

    expected = (
        r"step 2 (the first is 0) made carry['x'][0][1] NaN; it was 2.25 before. The loop ended before this step."
    )
    for call in (run, jax.jit(run), jax.grad(lambda bad, x: jnp.sum(run(bad) * x), argnums=1)):
        with raises(RAISED, "loopax.while_loop at", expected):
            jax.block_until_ready(call(*(jnp.int32(2), X)[: 1 + (call is not run and not hasattr(call, "lower"))]))
    with raises(RAISED, expected, "First at index 3 of the batch."):
        jax.block_until_ready(jax.jit(jax.vmap(run))(jnp.array([9, 9, 9, 2, 1], jnp.int32)))


def test_a_loop_in_a_loop_tells_its_step_and_the_row_of_the_other() -> None:
    def run(bad: Any, outer_bad: Any) -> Any:
        def outer(i: Any, x: Any) -> Any:
            return fori(jnp.where(i == outer_bad, bad, 9), x, 4, throw=True, info=False)

        return lx.fori_loop(0, 5, outer, X)

    expected = "loopax.fori_loop at"
    with raises(RAISED, expected, "step 2 (the first is 0), in row 3 of the loop around it made carry[1] NaN"):
        jax.block_until_ready(jax.jit(run)(2, 3))
    jax.jit(run)(9, 3)
    with raises(RAISED, "in row 1 of the loop around it", "First at index 1 of the batch."):
        jax.block_until_ready(jax.jit(jax.vmap(run))(jnp.array([9, 2]), jnp.array([3, 1])))


def test_bad_arguments_are_refused() -> None:
    for wrong in (False, "inf", 1.5):
        with pytest.raises(ValueError, match=r"finite=...\): got"):
            lx.fori_loop(0, 3, lambda i, x: x, 1.0, finite=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match=r"linear_transpose of a loop with finite="):
        jax.linear_transpose(lambda x: fori(9, x)[0], X)(X)
    together = lambda x: lx.fori_loop(0, 3, lambda i, x: jax.lax.psum(x, "lanes"), x, finite=True)
    with pytest.raises(NotImplementedError, match=r"which finite= does not"):
        jax.vmap(together, axis_name="lanes")(X)
    with pytest.raises(TypeError, match="finite"):
        jax.jit(lambda flag: lx.fori_loop(0, 3, lambda i, x: x, 1.0, finite=flag))(True)


# ---- transformations


def test_steps_in_python_are_looked_at() -> None:
    with jax.disable_jit():
        for loop in LOOPS:
            for bad in (0, 3, 9):
                last, info = loop(bad, X)
                np.testing.assert_allclose(last, X * 1.5 ** min(bad, 6))
                assert info.broken_step == (bad if bad < 6 else -1)
            # Types are those of a traced loop, also where no step breaks, and where none can.
            for _, info in (loop(2, X), loop(9, X), lx.fori_loop(0, 3, lambda i, n: n + 1, 0, info=True, **QUIET)):
                assert [getattr(x, "dtype", None) for x in info] == [jnp.int32, bool, bool, jnp.int32, jnp.int32]
            np.testing.assert_allclose(loop(9, X, throw=True)[0], X * 1.5**6)
        assert lx.fori_loop(0, 3, lambda i, n: n + 1, 0, finite=True) == 3
        limited = lx.while_loop(lambda c: c < 9, lambda c: 2 * c, 1.0, max_steps=3, info=True, **QUIET)
        np.testing.assert_array_equal(limited[1], (3, True, False, -1, -1))
        with raises(eqx.EquinoxRuntimeError, "step 3 (the first is 0) made carry[1] NaN"):
            fori(3, X, throw=True)
        last, info = jax.vmap(lambda bad: fori(bad, X))(jnp.array([1, 9]))
        np.testing.assert_array_equal(info.broken_step, [1, -1])
        seen: list[int] = []

        def loud(x: Any, i: Any) -> Any:
            seen.append(int(i))
            return broken_at(0)(x, i), i

        (last, ys), info = lx.scan(loud, X, jnp.arange(3), info=True, **QUIET)
        assert seen == [0]  # it is not taken again for the types of its results
        np.testing.assert_array_equal(last, X)
        np.testing.assert_array_equal(ys, np.zeros(3, int))
        assert info[2:] == (True, 0, 0)


def test_effects_happen_once() -> None:
    seen: list[int] = []

    def run(bad: Any, x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return broken_at(bad)(x, i)

        return lx.fori_loop(0, 6, step, x, finite=True, throw=False, info=True)

    last, info = jax.jit(run)(3, X)
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]
    assert info.num_steps == 3
    np.testing.assert_allclose(last, X * 1.5**3)
    seen.clear()
    jax.jit(jax.vmap(run, in_axes=(0, None)))(jnp.array([2, 9]), X)
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 4, 5]


def test_devices_end_before_their_own() -> None:
    mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    run = jax.shard_map(lambda bad: fori(bad[0], X)[0][None], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    bad = jnp.array([1, 9, 0, 4])
    np.testing.assert_allclose(jax.jit(run)(bad), np.asarray(X) * 1.5 ** np.minimum(bad, 6)[:, None])
    of_device = lambda bad, x: fori(bad[0], x)[0][None]
    on_devices = jax.shard_map(of_device, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    value = lambda x: jnp.sum(on_devices(bad, x))
    expected = np.sum(1.5 ** np.minimum(bad, 6))
    np.testing.assert_allclose(jax.jit(jax.grad(value))(X), [expected] * 3)


def test_checkpointed_functions_and_inner_loops_end_before_it() -> None:
    value = lambda x, bad: jnp.sum(jax.checkpoint(lambda x: fori(bad, x)[0])(x) ** 2)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(X, 2), 2 * X * 1.5**4)

    def nested(x: Any) -> Any:
        return lx.fori_loop(0, 3, lambda i, x: fori(i + 1, x)[0], x)

    np.testing.assert_allclose(jax.jit(nested)(X), X * 1.5**6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: jnp.sum(nested(x))))(X), [1.5**6] * 3)
    scanned = lambda x: jnp.sum(jax.lax.scan(lambda x, i: (fori(i, x)[0], None), x, jnp.arange(3))[0])
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(X), [1.5**3] * 3)


@pytest.mark.parametrize("derivative", [lx.Truncated(last=2), lx.Truncated(window=2), lx.Truncated(last=9)])
@pytest.mark.parametrize("reverse", [False, True])
def test_truncated_derivatives_are_those_of_the_steps_before(derivative: Any, reverse: bool) -> None:
    def value(x: Any, xs: Any, n: Any) -> Any:
        step = lambda c, x: (c * x, jnp.log(c * x))
        options = {"derivative": derivative, "reverse": reverse, "throw": False}
        return lx.scan(step, x, xs, n, finite=True, **options)[0]

    xs = jnp.array([2.0, 3.0, 0.5, -1.0, 4.0, 5.0])
    rows = xs[::-1] if reverse else xs
    number = int(np.argmax(np.asarray(rows) < 0))  # of steps
    assert value(1.0, xs, jnp.int32(6)) == np.prod(rows[:number])
    grad = jax.grad(value, argnums=(0, 1))(1.0, xs, jnp.int32(6))
    plain = jax.grad(partial(one_by_one, derivative, number), argnums=(0, 1))(1.0, rows)
    np.testing.assert_allclose(grad[0], plain[0])
    np.testing.assert_allclose(grad[1][::-1] if reverse else grad[1], plain[1])


def one_by_one(derivative: Any, number: int, x: Any, rows: Any) -> Any:
    """The value by a Python loop of so many steps."""
    last, window = derivative.last, derivative.window
    for i in range(number):
        if (last and i and i == number - last) or (window and i % window == 0 and i):
            x = jax.lax.stop_gradient(x)
        x = x * (rows[i] if window or i >= number - last else jax.lax.stop_gradient(rows[i]))
    return x


def test_a_reversible_loop_walks_back_from_the_step_before() -> None:
    kind = lx.Reversible(lambda i, x: x / 1.5)
    value = lambda x, bad, n: jnp.sum(
        lx.fori_loop(0, n, lambda i, x: jnp.where(i == bad, jnp.nan, 1.5 * x), x, kind=kind, finite=True, throw=False)
        ** 2
    )
    for bad in (0, 3, 9):
        np.testing.assert_allclose(jax.jit(jax.grad(value))(X, bad, 6), 2 * X * 1.5 ** (2 * min(bad, 6)))
    many = jax.jit(jax.vmap(jax.grad(value), in_axes=(None, 0, 0)))(X, jnp.array([2, 9, 0]), jnp.array([6, 3, 4]))
    np.testing.assert_allclose(many, 2 * np.asarray(X) * 1.5 ** (2 * np.array([2, 3, 0])[:, None]))


def test_an_implicit_derivative_is_looked_at() -> None:
    def root(a: Any) -> Any:
        new = lambda x: 0.5 * (x + a / x)
        return lx.while_loop(lambda x: jnp.abs(x * x - a) > 1e-10, new, a, derivative="implicit", finite=True)

    np.testing.assert_allclose(jax.jit(jax.grad(root))(2.0), 0.5 / np.sqrt(2.0), rtol=1e-6)
    options = {"derivative": "implicit", "finite": True}
    broken = jax.jit(lambda a: lx.while_loop(lambda x: x > -1.0, lambda x: jnp.log(a), a, **options))
    with raises(RAISED, "step 0 (the first is 0) made carry NaN"):
        jax.block_until_ready(broken(-0.5))


# ---- found by trying to break it


@pytest.mark.parametrize("unroll", [2, 3])
def test_no_step_follows_one_that_breaks(unroll: int) -> None:
    """Though those that would follow in the same iteration are finite."""
    step = lambda c, t: (c + 1, 1 / (t - 2))
    options = {"unroll": unroll, "finite": True, "throw": False, "info": True}
    (_, ys), info = lx.scan(step, 0, jnp.arange(2.0, 8.0), **options)
    assert info.num_steps == 0
    np.testing.assert_array_equal(ys, np.zeros(6))


def in_a_loop(f: Any) -> Any:
    return lambda buffer, x: lx.fori_loop(0, 1, lambda _, buffer: f(buffer, x), buffer)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, in_a_loop])
def test_rows_that_are_appended_out_of_sight_are_looked_at(wrap: Any) -> None:
    append = wrap(lambda buffer, x: buffer.append(x))

    def run(xs: Any) -> Any:
        step = lambda buffer, x: (append(buffer, 1 / x), None)
        return lx.scan(step, lx.Buffer(4, like=jnp.zeros(2)), xs, finite=True, throw=False, info=True)

    (buffer, _), info = jax.jit(run)(jnp.array([[1.0, 2.0], [0.0, 3.0], [1.0, 1.0]]))
    assert info.broken_step == 1
    assert buffer.count == 1
    assert np.all(np.isfinite(buffer.rows))


@pytest.mark.parametrize("size", [8, 1024])
def test_small_floats_and_mixed_dtypes(size: int) -> None:
    carry = {"a": jnp.ones(size, jnp.float8_e5m2), "b": jnp.ones(size, jnp.float32), "c": jnp.ones(size, jnp.complex64)}

    def step(i: Any, c: Any) -> Any:
        broken = jnp.where(i == 2, jnp.nan, 2).astype(c["a"].dtype)
        return {"a": c["a"].at[3].set(broken), "b": c["b"] + 1, "c": c["c"] + 1}

    with raises(RAISED, "step 2 (the first is 0) made carry['a'][3] NaN; it was 2 before"):
        jax.block_until_ready(jax.jit(lambda carry: lx.fori_loop(0, 4, step, carry, finite=True))(carry))


def test_a_complex_number_is_told_in_32_bits() -> None:
    with jax.enable_x64(False), raises(RAISED, "it was 1+2j before"):
        step = lambda i, z: jnp.where(i == 1, jnp.nan, 1j * z)
        jax.block_until_ready(jax.jit(lambda z: lx.fori_loop(0, 3, step, z, finite=True))(jnp.complex64(2 - 1j)))


def test_large_finite_numbers_are_finite() -> None:
    x = jnp.full(2000, 1e30, jnp.float32)  # whose squares are not
    jax.jit(jax.grad(lambda x: jnp.sum(lx.fori_loop(0, 3, lambda i, x: x * jnp.float32(0.5), x, finite=True))))(x)
