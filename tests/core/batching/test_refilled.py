"""Stages with fewer places than lanes: places of lanes that have finished are given to lanes that wait."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import loopax as lx
from loopax._src.core.batching import compact_stages
from loopax._src.core.ir.lanes import Stage, stages
from loopax._src.core.jaxpr.cost import StepCost
from tests.core.batching.counting import LaneCounter
from tests.support.reference import assert_close

LANES, LIMIT = 10, 5
A, X = np.linspace(1.1, 3.5, LANES), np.linspace(0.2, 0.7, LANES)
COUNTED = np.arange(LANES) % 7
COUNTS = st.lists(st.integers(0, 7), min_size=LANES, max_size=LANES).map(np.array)


@pytest.fixture(scope="module", autouse=True)
def two_places():
    """Of few lanes, with steps that cost little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCost, "places", lambda self, moved, lanes: 2 if lanes > 2 else 0)
        patch.setattr(StepCost, "is_cheap", False)
        jax.clear_caches()
        yield
    jax.clear_caches()


def logistic(limit: int | None, lanes: Any = None) -> Any:
    """Steps of x <- a x (1 - x), at most so many; also how many were taken, and whether there would be more."""

    def f(a: Any, x: Any, n: Any) -> Any:
        body = lambda c: (a * c[0] * (1.0 - c[0]), c[1] + 1)
        how = lx.Compact(min_lanes=1) if lanes is None else lanes
        options: Any = {"lanes": how, "max_steps": limit, "throw": False, "info": True}
        (x, taken), info = lx.while_loop(lambda c: c[1] < n, body, (x, 0), **options)
        return x, taken, info.num_steps, info.limit_reached

    return f


def planned(function: Any, *args: Any) -> list[list[Stage]]:
    """The stages of the batches of a program."""
    found: list[list[Stage]] = []
    with pytest.MonkeyPatch.context() as patch:
        noted = lambda *args, **options: found.append(stages(*args, **options)) or found[-1]
        patch.setattr(compact_stages, "stages", noted)
        jax.make_jaxpr(function)(*args)
    return found


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_the_stages(limit):
    assert [Stage(2, 0)] in planned(jax.vmap(logistic(limit)), A, X, np.arange(LANES))


TRANSFORMATIONS = {
    "value": jax.vmap,
    "jvp": lambda f: lambda a, x, n: jax.jvp(lambda a, x: jax.vmap(f)(a, x, n)[0], (a, x), (x, a)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda a, x, n: f(a, x, n)[0], (0, 1))),
    "grad of vmap": lambda f: jax.grad(lambda a, x, n: jax.vmap(f)(a, x, n)[0].sum(), (0, 1)),
    "jvp of grad": lambda f: (
        lambda a, x, n: jax.jvp(jax.grad(lambda a: (jax.vmap(f)(a, x, n)[0] ** 2).sum()), (a,), (x,))
    ),
    "vmap of vmap": lambda f: lambda a, x, n: jax.vmap(jax.vmap(f), (None, 0, None))(a, jnp.stack([x, 0.9 * x]), n),
    "an outer batch alone": lambda f: lambda a, x, n: jax.vmap(lambda a: jax.vmap(f, (None, 0, 0))(a, x, n))(a[:3]),
    "shared weights": lambda f: (
        lambda a, x, n: jax.grad(lambda w: jax.vmap(lambda x, n: f(w, x, n)[0])(x, n).sum())(a[0])
    ),
    "grad of checkpoint": lambda f: (
        lambda a, x, n: jax.grad(jax.checkpoint(lambda x: jnp.sin(jax.vmap(f)(a, x, n)[0]).sum()))(x)
    ),
    "devices": lambda f: jax.shard_map(
        jax.vmap(f), mesh=jax.make_mesh((2,), ("d",), (AxisType.Auto,)), in_specs=P("d"), out_specs=P("d")
    ),
    "grad of devices": lambda f: jax.grad(lambda a, x, n: TRANSFORMATIONS["devices"](f)(a, x, n)[0].sum(), (0, 1)),
    "a scan around it": lambda f: (
        lambda a, x, n: jax.lax.scan(lambda x, _: (jax.vmap(f)(a, x, n)[0], None), x, length=2)[0]
    ),
}
WITHOUT_A_LIMIT = ["value", "jvp", "vmap of vmap"]
CASES = [(name, LIMIT) for name in TRANSFORMATIONS] + [(name, None) for name in WITHOUT_A_LIMIT]


@pytest.mark.parametrize(("name", "limit"), CASES)
def test_results_are_those_of_lockstep(name, limit):
    transform = TRANSFORMATIONS[name]
    found, expected = (jax.jit(transform(logistic(limit, lanes))) for lanes in (None, "lockstep"))

    @settings(deadline=None, max_examples=20)
    @given(COUNTS)
    def check(counts):
        assert_close(found(A, X, counts), expected(A, X, counts))

    check()


def test_values_by_hand():
    def by_hand(a, x, n):
        taken = min(int(n), LIMIT)
        for _ in range(taken):
            x = a * x * (1.0 - x)
        return x, taken, np.int32(taken), taken < n

    counts = np.arange(LANES)[::-1] % 7
    expected = zip(*(by_hand(*lane) for lane in zip(A, X, counts, strict=True)), strict=True)
    assert_close(jax.jit(jax.vmap(logistic(LIMIT)))(A, X, counts), tuple(map(np.array, expected)))


def test_the_lane_at_its_limit_is_named():
    counts = np.minimum(np.arange(LANES), LIMIT)
    counts[7] = LIMIT + 1
    f = lambda n: lx.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=LIMIT, lanes=lx.Compact(min_lanes=1))
    with pytest.raises(eqx.EquinoxRuntimeError, match="First at index 7 of the batch"):
        jax.block_until_ready(eqx.filter_jit(jax.vmap(f))(counts))


@pytest.mark.parametrize("how", ["grad", "linearize"])
def test_derivatives_of_a_batch_that_is_mapped_as_a_whole(how):
    """An ensemble: repeated for the lanes of one flat batch, its weights would take more memory than all else."""
    weights, xs, counts = (
        np.stack([np.eye(30), 0.9 * np.eye(30), np.ones((30, 30)) / 30]),
        np.ones((LANES, 30)),
        COUNTED,
    )

    def members(weights, lanes):
        def lane(w, x, n):
            body = lambda c: (jnp.tanh(w @ c[0]), c[1] + 1)
            return lx.while_loop(lambda c: c[1] < n, body, (x, 0), max_steps=7, lanes=lanes)[0]

        return jax.vmap(jax.vmap(lane, (None, 0, 0)), (0, None, None))(weights, xs, counts)

    def derivative(lanes):
        if how == "grad":
            return jax.grad(lambda w: (members(w, lanes) ** 2).sum())(weights)
        return jax.linearize(lambda w: members(w, lanes), weights)[1](weights)

    found, expected = (
        jax.jit(lambda lanes=lanes: derivative(lanes))() for lanes in (lx.Compact(min_lanes=1), "lockstep")
    )
    assert_close(found, expected)


def test_without_jit():
    with jax.disable_jit():
        found = jax.vmap(logistic(LIMIT))(A, X, COUNTED)
    assert_close(found, jax.vmap(logistic(LIMIT, "lockstep"))(A, X, COUNTED))


def test_the_transpose_of_a_linear_loop():
    f = lambda x, n: lx.while_loop(
        lambda c: c[1] < n, lambda c: (A[0] * c[0], c[1] + 1), (x, 0), lanes=lx.Compact(min_lanes=1)
    )[0]
    counts = np.arange(LANES) % 7
    transposed = jax.linear_transpose(lambda x: jax.vmap(f)(x, counts), X)
    assert_close(transposed(np.ones(LANES)), (A[0] ** counts,))


def test_what_is_evaluated_is_what_the_report_says():
    counter, counts = LaneCounter(), np.random.RandomState(0).geometric(0.1, 50)
    compact = lx.Compact(min_lanes=1)
    f = lambda n: lx.while_loop(lambda x: x < n.astype(float), lambda x: counter(x) + 1.0, 0.0, lanes=compact)
    (stage,) = lx.lane_report(counts, lanes=compact).stages
    assert counter.of(jax.jit(jax.vmap(f)), counts) == (len(stage.active), stage.lane_steps)
    assert stage.lanes == 2
    assert stage.active.sum() == counts.sum()
    assert stage.lane_steps < 1.15 * counts.sum()  # one of the two places waits for the other at the end alone


def test_a_batch_that_is_left_to_refilled_stages(monkeypatch):
    """The first stage as large as the batch, and two that are refilled."""
    plan, asked = [Stage(LANES, 6), Stage(4, 2), Stage(2, 0)], []
    monkeypatch.setattr(compact_stages, "stages", lambda *args, **options: asked.append(args) or plan)
    for limit in (None, LIMIT):
        asked.clear()
        found, expected = (jax.jit(jax.vmap(logistic(limit, lanes))) for lanes in (lx.Compact(min_lanes=3), "lockstep"))
        for seed in range(10):
            counts = np.random.RandomState(seed).randint(0, 8, LANES)
            assert_close(found(A, X, counts), expected(A, X, counts))
        assert asked


def test_lanes_of_any_type():
    """Keys, numbers of other widths, and arrays that each lane has of its own outside of its carry."""
    keys = jax.random.split(jax.random.key(0), LANES)
    rows = np.arange(LANES * 4.0, dtype=np.float16).reshape(LANES, 4)

    def f(key, row, n, lanes):
        def body(c):
            key, total, i = c
            return jax.random.fold_in(key, i), total + row, i + jnp.int8(1)

        start = (key, jnp.zeros(4, jnp.float16), jnp.int8(0))
        key, total, _ = lx.while_loop(lambda c: c[2] < n, body, start, lanes=lanes)
        return jax.random.key_data(key), total

    counts = (np.arange(LANES) % 4).astype(np.int8)
    found, expected = (jax.jit(jax.vmap(partial(f, lanes=how))) for how in (lx.Compact(min_lanes=1), "lockstep"))
    assert [Stage(2, 0)] in planned(found, keys, rows, counts)
    jax.tree.map(np.testing.assert_array_equal, found(keys, rows, counts), expected(keys, rows, counts))


# ---- which batches are refilled

ONES = jnp.ones(LANES)
NOT_REFILLED = {
    "rows that are read": lambda x: lx.scan(lambda c, x: (c + x, None), x, ONES, stop=lambda c, _: c > 3.0),
    "rows that are written": lambda x: lx.scan(lambda c, _: (c + x, c), x, length=9, stop=lambda c, _: c > 3.0),
    "the number of the row": lambda x: lx.scan(
        lambda c, i: (c + i.astype(float), None), x, jnp.arange(9), stop=lambda c, _: c > 3.0
    ),
    "a limit for each lane": lambda x: lx.scan(
        lambda c, _: (c + x, None), x, length=x.astype(int), max_steps=9, stop=lambda c, _: c > 3.0
    ),
    "effects": lambda x: lx.while_loop(lambda c: c < 3.0, lambda c: (jax.debug.print("{}", c), c + x)[1], x),
    "a bar": lambda x: lx.while_loop(lambda c: c < 3.0, lambda c: c + x, x, progress=True),
}


@pytest.mark.parametrize("why", NOT_REFILLED)
def test_not_refilled(why, monkeypatch):
    f = NOT_REFILLED[why]
    for name in ("scan", "while_loop"):
        monkeypatch.setattr(lx, name, partial(getattr(lx, name), lanes=lx.Compact(min_lanes=1)))
    plans = planned(jax.vmap(f), ONES)
    assert plans
    assert all(plan[0].places == LANES for plan in plans)
