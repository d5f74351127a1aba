"""`cond` and `switch`: what a lane gets is what its own branch gives, in values, derivatives, errors and effects."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.compiled import temporary, whole_arrays_in_loops
from tests.support.progress_recorder import recorder
from tests.support.reference import assert_close

slow = pytest.mark.slow
COMPACT = lx.Compact(min_lanes=3)  # of which places are left over in the last batch
LANES = ["lockstep", COMPACT]
each_lanes = pytest.mark.parametrize("lanes", LANES, ids=str)


def root_of(x: Any) -> Any:
    """Newton's method, which goes on for ever where there is no root."""
    step = lambda y: (y + x / y) / 2
    return lx.while_loop(lambda y: jnp.abs(y * y - x) > 1e-9, step, x + 1.0, kind=lx.Checkpointed(8))


# A function, and where it is defined: at its edge its derivative is infinite, beyond it is NaN or does not end.
EDGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sqrt": (lambda x: x > 0, jnp.sqrt),
    "norm": (lambda x: x != 0, lambda x: jnp.linalg.norm(jnp.stack([x, 2 * x]))),
    "solve": (lambda x: x != 0, lambda x: jnp.linalg.solve(jnp.array([[x, 1.0], [0.0, x]]), jnp.ones(2)).sum()),
    "no convergence": (lambda x: x > 0, root_of),
}
STARTS = np.array([0.3, 0.0, -0.7, 0.9])
each_edge = pytest.mark.parametrize(
    "edge", [pytest.param(e, marks=slow) if e in ("solve", "norm") else e for e in EDGES]
)


def with_edge(edge: str, lanes: Any) -> Callable[..., Any]:
    """A function of x and of a weight that both branches share."""
    is_inside, f = EDGES[edge]

    def run(x: Any, w: Any) -> Any:
        return lx.cond(is_inside(x), lambda x: w * f(x) * x, lambda x: w * x**3, x, lanes=lanes)

    return run


def alone(edge: str, x: float) -> Callable[..., Any]:
    is_inside, f = EDGES[edge]
    return (lambda x, w: w * f(x) * x) if is_inside(x) else (lambda x, w: w * x**3)


@each_lanes
@each_edge
def test_derivatives_at_the_edge_of_a_domain(edge: str, lanes: Any) -> None:
    """Of each lane and of the whole batch, with respect to what lanes have and what they share."""
    run = with_edge(edge, lanes)

    @jax.jit
    def found(xs: Any) -> Any:
        batch = lambda xs, w: jax.vmap(run, (0, None))(xs, w).sum()
        return {
            "value": jax.vmap(run, (0, None))(xs, 1.5),
            "each": jax.vmap(jax.grad(run), (0, None))(xs, 1.5),
            "of batch": jax.grad(batch)(xs, 1.5),
            "weight": jax.grad(batch, 1)(xs, 1.5),
            "second": jax.vmap(jax.hessian(run), (0, None))(xs, 1.5),
            "second of batch": jax.grad(lambda xs: jax.grad(batch)(xs, 1.5).sum())(xs),
        }

    def expected(xs: Any) -> Any:
        each = [(alone(edge, x), x) for x in xs]
        first, second = ([d(f)(x, 1.5) for f, x in each] for d in (jax.grad, lambda f: jax.grad(jax.grad(f))))
        return {
            "value": [f(x, 1.5) for f, x in each],
            "each": first,
            "of batch": first,
            "weight": sum(jax.grad(f, 1)(x, 1.5) for f, x in each),
            "second": second,
            "second of batch": second,
        }

    outside = np.full(4, next(x for x in (-0.7, 0.0, 3.0) if not EDGES[edge][0](x)))
    for xs in (STARTS, outside):  # in the second batch no lane is inside
        got, wanted = found(xs), {name: jnp.asarray(rows) for name, rows in expected(xs).items()}
        assert_close(got, wanted)


# ---- what it costs


@pytest.mark.parametrize("size", [2, 6])
def test_compact_batches_evaluate_the_lanes_that_take_the_branch(size: int) -> None:
    batches: list[int] = []

    def counted(x: Any) -> Any:
        jax.debug.callback(lambda _: batches.append(1), x.sum() * 0)
        return x * 2

    taken = np.arange(24) % 12 < 5  # ten of 24
    lanes = lx.Compact(min_lanes=size)
    jax.jit(jax.vmap(lambda p, x: lx.cond(p, counted, lambda x: x, x, lanes=lanes)))(taken, np.ones((24, 1)))
    jax.effects_barrier()
    assert len(batches) == taken.sum()  # JAX calls back for each lane; none of the places left over do


def test_places_left_over_in_a_compact_batch_read_a_lane_that_takes_the_branch() -> None:
    read: list[float] = []

    def noted(x: Any) -> Any:
        twice = lambda x: (read.extend(np.ravel(x)), 2 * x)[1]
        return jax.pure_callback(twice, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    xs = np.arange(7.0)
    f = lambda x: lx.cond(x > 3, noted, lambda x: x, x, lanes=lx.Compact(min_lanes=2))
    assert_close(jax.jit(jax.vmap(f))(xs), np.where(xs > 3, 2 * xs, xs))
    assert set(read) == {4.0, 5.0, 6.0}


def test_a_gradient_in_compact_batches_stores_nothing_of_the_branch() -> None:
    """The steps of a branch do not count."""

    def memory(steps: int) -> int:
        long = lambda x: lax.fori_loop(0, steps, lambda _, x: x + 1e-3, x)
        branch = lambda x: jnp.sin(lax.scan(lambda x, _: (jnp.sin(x), None), long(x), None, length=4)[0])
        f = lambda p, x: lx.cond(p, branch, lambda x: x, x, lanes=lx.Compact(min_lanes=8))
        total = lambda x: jax.vmap(f)(np.arange(512) % 64 == 0, x).sum()
        return temporary(jax.jit(jax.grad(total)).lower(np.ones((512, 16))).compile())

    one_lane_of_steps = 16 * 8 * 4
    assert memory(3) <= 8 * 512 * 16 * 6 + 8 * one_lane_of_steps * 8


def test_one_index_for_all_lanes_stays_one_conditional() -> None:
    f = jax.vmap(lambda p, x: lx.cond(p, jnp.sin, jnp.cos, x), (None, 0))
    text = jax.jit(f).lower(True, np.ones(8)).as_text()
    assert text.count("stablehlo.case") == 2
    assert "stablehlo.select" not in text


@pytest.mark.parametrize(
    ("branch", "is_selected"),
    [
        (lambda x: jnp.sin(x) * 2, True),
        (lambda x: jnp.eye(2) @ x, False),
        (lambda x: lax.cond(x[0] > 1, jnp.sin, jnp.cos, x), False),
        (lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=4)[0], False),
    ],
    ids=["elementwise", "product", "conditional", "scan"],
)
def test_lanes_compute_and_select_a_few_elementwise_operations(branch: Any, is_selected: bool) -> None:
    """Of both functions; any other one is a conditional of its own, which is not run where no lane takes it."""
    f = jax.vmap(lambda p, x: lx.cond(p, branch, lambda x: -x, x))
    text = jax.jit(f).lower(np.array([True, False]), np.ones((2, 2))).as_text()
    assert text.count("stablehlo.case") == (not is_selected)


def test_a_gradient_computes_nothing_of_a_branch_outside_of_it() -> None:
    """All of it depends on operands alone, which a loop takes for constants: it is not moved out of the branch."""
    steps = lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=4)[0]
    f = lambda p, x: lx.cond(p, steps, lambda x: x, x)
    for arguments in ((True, 1.0), (True, jnp.ones(3))):
        program = jax.make_jaxpr(lambda p, x: jax.vjp(lambda x: f(p, x), x)[1](x))(*arguments)
        assert "scan" not in [eqn.primitive.name for eqn in program.eqns]


# ---- pytrees, models, keys


def test_results_are_pytrees_of_any_kind() -> None:
    a = lambda x: {"x": x, "n": 1, "flag": True, "key": jax.random.key(1)}
    b = lambda x: {"x": x * 2, "n": 2, "flag": x > 0, "key": jax.random.key(2)}
    out = lx.cond(False, a, b, jnp.float32(3.0))
    assert out["x"].dtype == jnp.float32
    assert out["n"].weak_type
    assert bool(out["flag"])
    assert jax.random.key_data(out["key"])[1] == 2


def test_a_function_beside_other_functions() -> None:
    """What it hands on as it is depends on these, and so does what it computes, also where it is traced already."""
    given, first, second = lambda x, y: (x, y), lambda x, y: (x, 2 * y), lambda x, y: (2 * x, y)
    for other, expected in ((first, (3.0, 10.0)), (second, (6.0, 5.0)), (first, (3.0, 10.0))):
        assert lx.cond(jnp.bool_(True), given, other, 3.0, 5.0) == (3.0, 5.0)
        assert lx.cond(jnp.bool_(False), given, other, 3.0, 5.0) == expected
        assert lx.switch(jnp.int32(1), [other, given], 3.0, 5.0) == (3.0, 5.0)


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lx.cond(True, lambda: (1, jnp.ones(3)), lambda: (2, jnp.ones(2))), TypeError, r"\[1\]: .*\[2\] and"),
        (lambda: lx.switch(0, [jnp.sin, jnp.cos, lambda x: (x,)], 1.0), TypeError, r"branches\[2\] and branches\[0\]"),
        (lambda: lx.cond("yes", lambda: 1, lambda: 1), TypeError, "got str 'yes', expected one bool"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.switch(1.0, [lambda: 1]), TypeError, "got float 1.0, expected one integer"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.switch(0, [3]), TypeError, r"branches\[0\] of switch: got int 3"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.cond(True, jnp.sin, jnp.cos, 1.0, operand=2.0), TypeError, "by name and 1 by position"),
        (lambda: lx.cond(True, jnp.sin, jnp.cos, 1.0, lanes="free"), ValueError, "free lanes are for a loop"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert re.search(message, str(raised.value)), str(raised.value)


@each_lanes
def test_collectives_under_predicates_of_each_lane(lanes: Any) -> None:
    f = lambda p, x: lx.cond(p, lambda x: lax.psum(x, "i"), lambda x: x, x, lanes=lanes)
    with pytest.raises(NotImplementedError, match="psum"):
        jax.vmap(f, axis_name="i")(np.array([True, False]), np.ones(2))
    assert_close(jax.vmap(f, (None, 0), axis_name="i")(True, np.ones(2)), jnp.full(2, 2.0))


__all__ = ["recorder"]  # a fixture


# ---- branches that are not taken


@each_lanes
def test_a_loop_that_does_not_end_in_a_branch_not_taken(lanes: Any) -> None:
    """The program of jax#2947."""

    def f(x: Any) -> Any:
        closer = lambda x: lax.while_loop(lambda y: y > 3.5, lambda y: (y + 3.2) / 2, x)
        away = lambda x: lax.while_loop(lambda y: y < 3.0, lambda y: y * 2.0, x)  # not from zero or below
        return lx.cond(x > 3.5, closer, lambda x: lx.cond(x > 0, away, lambda x: x, x), x, lanes=lanes)

    found = jax.jit(jax.vmap(f))(jnp.array([0.0, -1.0, 1.0, 100.0]))
    assert_close(found[:3], jnp.array([0.0, -1.0, 4.0]))
    assert 3.2 < found[3] <= 3.5


@each_lanes
@pytest.mark.parametrize("taken", [[True, False, True], [False] * 3], ids=["by some", "by none"])
def test_effects_of_a_branch_not_taken(lanes: Any, taken: list[bool]) -> None:
    seen: list[float] = []

    def heard(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return 2 * x

    run = jax.vmap(lambda p, x: lx.cond(p, heard, lambda x: x, x, lanes=lanes))
    xs = np.array([1.0, 2.0, 3.0])
    found = jax.jit(run)(np.array(taken), xs)
    jax.effects_barrier()
    assert sorted(seen) == list(xs[np.array(taken)])
    assert_close(found, jnp.where(jnp.array(taken), 2 * xs, xs))


@each_lanes
def test_an_error_in_a_branch_not_taken(lanes: Any) -> None:
    def checked(x: Any) -> Any:
        return eqx.error_if(jnp.sqrt(x), x < 0, "negative")

    run = jax.jit(jax.vmap(lambda p, x: lx.cond(p, checked, lambda x: x, x, lanes=lanes)))
    xs = np.array([4.0, -1.0])
    assert_close(run(np.array([True, False]), xs), jnp.array([2.0, -1.0]))
    assert_close(run(np.array([False, False]), xs), jnp.array([4.0, -1.0]))
    with pytest.raises(Exception, match="negative"):
        run(np.array([True, True]), xs)


@each_lanes
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eagerly"])
def test_nan_in_a_branch_not_taken(lanes: Any, jit: Any) -> None:
    run = jit(jax.vmap(jax.value_and_grad(lambda x: lx.cond(x > 0, jnp.log, lambda x: 2 * x, x, lanes=lanes))))
    for xs in ([1.0, -1.0], [-1.0, -2.0]):
        with jax.debug_nans(True):
            value, slope = run(np.array(xs))
        assert_close(value, jnp.array([0.0 if x > 0 else 2 * x for x in xs]))
        assert_close(slope, jnp.array([1 / x if x > 0 else 2.0 for x in xs]))


# ---- branches in the body of a loop, and loops that report in a branch

LENGTHS = np.array([1, 4, 0, 3])


@each_lanes
def test_a_branch_in_a_loop_is_taken_by_lanes_that_take_the_step(lanes: Any) -> None:
    """A lane that has finished would take the branch that is heard, which goes on for ever from there."""
    seen: list[float] = []

    def heard(x: Any, n: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return lx.while_loop(lambda y: (y < 8.0) | ((n == 3) & (x == 10.0)), lambda y: y + 1.0, x)

    def lane(n: Any) -> Any:
        body = lambda i, x: lx.cond(i % 2 == 1, heard, lambda x, _: x + i, x, n, lanes=lanes)
        return lx.fori_loop(0, n, lambda i, x: body(i, x) - jnp.where(i == 3, 5.0, 0.0), 0.0)

    found = jax.jit(jax.vmap(lane))(LENGTHS)
    jax.effects_barrier()
    assert_close(found, jnp.array([0.0, 5.0, 0.0, 10.0]))
    assert sorted(seen) == [0.0, 0.0, 10.0]


def test_progress_of_a_loop_in_a_branch(recorder: Any) -> None:
    """It is shown where the branch is taken."""
    shown = lambda x: lx.fori_loop(0, 5, lambda _, x: x + 1.0, x, progress=True)
    run = jax.jit(lambda p, x: lx.cond(p, shown, lambda x: x, x))
    assert jax.block_until_ready(run(False, 1.0)) == 1.0
    assert not recorder.ended
    assert jax.block_until_ready(run(True, 1.0)) == 6.0
    assert len(recorder.ended) == 1


# ---- branches that write rows of an array

ROWS = jnp.sin(jnp.arange(2400.0)).reshape(600, 4)


def two_arrays(i: Any, x: Any, cond: Any) -> Any:
    """One is returned as it is, of the other a row is written; and a row of what was there is returned."""
    written = lambda x, y: (x.at[i].set(jnp.sin(y[i])), y, x[i])
    y, x, row = cond(x[i, 0] > 0, written, lambda x, y: (x, y.at[i].add(x[i + 1]), y[i]), x, jnp.cos(x))
    return x.at[2 * i].set(row + y[i])


def nested(i: Any, x: Any, cond: Any) -> Any:
    inner = lambda x: cond(i % 2 == 0, lambda x: x.at[i].set(2.0 * x[i + 1]), lambda x: x.at[i + 1].add(x[i]), x)
    return cond(x[i, 0] > 0, inner, lambda x: x.at[0].multiply(0.5), x)


# What a step makes of an array, by its number.
WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "operand": lambda i, x, cond: cond(x[i, 0] > 0, lambda x: x.at[i + 1].set(jnp.sin(x[i])), lambda x: x, x),
    "closed over": lambda i, x, cond: cond(x[i, 0] > 0, lambda: x.at[i + 1].set(jnp.sin(x[i])), lambda: x),
    "one branch, closed over": lambda i, x, cond: cond(
        i % 2 == 0, lambda y: x.at[i].set(y[i] * x[i + 1]), lambda y: y.at[i + 1].add(x[i]), x
    ),
    "twice the same": lambda i, x, cond: sum(
        cond(i % 2 == 0, lambda x, y: (x.at[i].set(y[i + 1]), y), lambda x, y: (x, y.at[i].add(x[i])), x, x)
    ),
    "both, from each other": lambda i, x, cond: sum(
        cond(i % 2 == 0, lambda x, y: (y, x), lambda x, y: (x.at[i].set(y[i]), y.at[i].set(x[i])), x, jnp.cos(x))
    ),
    "used afterwards": lambda i, x, cond: (
        cond(i % 2 == 0, lambda x: x.at[i].set(jnp.sin(x[i])), lambda x: x.at[i].add(1.0), x) * 0.5 + x
    ),
    "two arrays": two_arrays,
    "nested": nested,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow) if name == "twice the same" else name for name in WRITES]
)
def test_branches_that_write_rows_are_those_of_lax(name: str) -> None:
    def run(cond: Any) -> Callable[..., Any]:
        def loss(x: Any) -> Any:
            return jnp.exp(0.1 * lx.fori_loop(0, 3, lambda i, x: WRITES[name](i, x, cond), x)).sum()

        lanes = jnp.stack([ROWS, -ROWS, jnp.cos(ROWS)])
        second = lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))[1]
        return jax.jit(lambda: (jax.value_and_grad(loss)(ROWS), second(ROWS), jax.vmap(jax.grad(loss))(lanes)))

    assert_close(run(lx.cond)(), run(lax.cond)())


@pytest.mark.parametrize("name", ["operand", "closed over", "one branch, closed over"])
def test_a_branch_that_writes_rows_touches_no_others(name: str) -> None:
    loss = lambda x: jnp.exp(lx.fori_loop(0, 3, lambda i, x: WRITES[name](i, x, lx.cond), x)).sum()
    text = jax.jit(jax.grad(loss)).lower(ROWS).compile().as_text() or ""
    assert not whole_arrays_in_loops(text, *ROWS.shape)


def test_a_switch_that_writes_rows_takes_the_nearest_branch() -> None:
    branches = [lambda x, i=i: x.at[i].set(i + 2.0 * x[3]) for i in range(3)]
    for index in (-1, 1, 7):
        found = jax.jit(lambda index: lx.switch(index, branches, ROWS))(index)
        assert_close(found, lax.switch(index, branches, ROWS))


def test_a_branch_with_an_error_that_writes_rows() -> None:
    def step(i: Any, x: Any) -> Any:
        return lx.cond(i == 1, lambda x: x.at[0].set(eqx.error_if(x[1], x[1] < 2, "too small")), lambda x: x, x)

    with pytest.raises(Exception, match="too small"):
        eqx.filter_jit(lambda: lx.fori_loop(0, 2, step, ROWS))()
    assert_close(eqx.filter_jit(lambda: lx.fori_loop(0, 1, step, ROWS))(), ROWS)


def test_branches_of_one_array_given_twice_and_of_two() -> None:
    branches = lambda x, y: x.at[0].set(y[1]), lambda x, y: x.at[1].add(y[0])
    twice = jax.jit(lambda x: lx.cond(x[0, 0] < 1, *branches, x, x))(ROWS)
    assert_close(twice, ROWS.at[0].set(ROWS[1]))
    two = jax.jit(lambda x, y: lx.cond(x[0, 0] < 1, *branches, x, y))(ROWS, jnp.cos(ROWS))
    assert_close(two, ROWS.at[0].set(jnp.cos(ROWS[1])))
