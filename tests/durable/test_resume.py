"""Runs that stop and go on, also on other devices: the bits of a run that was never interrupted."""

import shutil
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from loopax import durable
from loopax._src.durable.pace import SavePace
from loopax._src.durable.saves import SavedState, Saves
from tests.durable.cases import SELDOM, Steps, read_rows, same_bits, saves, stopped
from tests.support.compiled import compilations
from tests.support.reference import assert_close

X = jnp.array([1.0, -0.5, 2.0])
XS = jnp.asarray(np.random.RandomState(0).randn(20, 3))
OFTEN: dict[str, Any] = {"checkpoint_every": 4, "chunk_steps": 2}


def scan_of(steps: Steps) -> Any:
    def f(c: Any, x: Any) -> Any:
        h, n = c
        steps.at(n)
        h = jnp.sin(h) * 1.5 + x
        return (h, n + 1), (h * 2.0, n)

    return f


def run_scan(steps: Steps, directory: Any, **options: Any) -> Any:
    (carry, ys), info = durable.scan(scan_of(steps), (X, 0), XS, directory=directory, info=True, **{**OFTEN, **options})
    jax.effects_barrier()
    return carry, read_rows(ys), int(info.num_steps)


def run_while(steps: Steps, directory: Any, **options: Any) -> Any:
    def body(c: Any, key: Any) -> Any:
        steps.at(c[1])
        return jnp.sin(c[0]) + jax.random.normal(key), c[1] + 1

    key = jax.random.key(2)
    options = {**OFTEN, **options, "key": key, "info": True, "directory": directory}
    carry, info = durable.while_loop(lambda c: c[1] < 20, body, (X, 0), **options)
    jax.effects_barrier()
    return carry, int(info.num_steps)


slow = pytest.mark.slow
RUNS = [
    pytest.param(run_scan, id="scan"),
    pytest.param(partial(run_scan, reverse=True), id="reverse", marks=slow),
    pytest.param(partial(run_scan, unroll=2), id="unroll", marks=slow),
    pytest.param(run_while, id="while"),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_stops_goes_on_with_the_same_bits(run: Any, tmp_path: Any) -> None:
    steps = Steps()
    expected = run(steps, tmp_path / "whole", **SELDOM)
    steps.stop_at = 13
    stopped(lambda: run(steps, tmp_path / "run"))
    last = max(saves(tmp_path / "run"))
    assert 13 - 6 <= last <= 13
    steps.stop_at, steps.taken = None, []
    same_bits(run(steps, tmp_path / "run", **SELDOM), expected)
    assert sorted(steps.taken) == list(range(last, 20))  # what was saved is not executed again
    steps.taken = []
    same_bits(run(steps, tmp_path / "run"), expected)  # a finished run gives its results
    assert steps.taken == []


def test_more_steps_go_on_and_fewer_are_refused(tmp_path: Any) -> None:
    """Outputs have more rows then."""
    steps = Steps()

    def f(c: Any, _: Any) -> Any:
        steps.at(c[1])
        return (jnp.sin(c[0]) * 1.5 + 0.1, c[1] + 1), c[0]

    def run(length: int, name: str, **options: Any) -> Any:
        carry, ys = durable.scan(f, (X, 0), length=length, directory=tmp_path / name, **{**OFTEN, **options})
        jax.effects_barrier()
        return carry, read_rows(ys)

    expected = run(20, "whole", **SELDOM)
    run(9, "run", keep=3)
    assert len(saves(tmp_path / "run")) == 3
    steps.taken = []
    same_bits(run(20, "run", keep=1), expected)
    assert sorted(steps.taken) == list(range(9, 20))
    assert saves(tmp_path / "run") == [20]
    with pytest.raises(ValueError, match=r"has taken 20 steps, and only 9 are asked for\. Ask for as many"):
        run(9, "run")


def test_a_stop_that_is_reached_stays(tmp_path: Any) -> None:
    calls = Steps()

    def f(c: Any, _: Any) -> Any:
        calls.at(c)
        return c + 1, c

    run = lambda: durable.scan(f, 0, XS, stop=lambda c, _: c >= 7, directory=tmp_path, info=True, **OFTEN)
    for _ in range(2):
        (carry, ys), info = run()
        jax.effects_barrier()
        assert (int(carry), int(info.num_steps), list(ys[5:9])) == (7, 7, [5, 6, 0, 0])
    assert sorted(calls.taken) == list(range(7))


@pytest.mark.parametrize("beyond", [2**31 - 3, pytest.param(5 * 2**31 - 2, marks=slow)])
def test_steps_are_counted_in_64_bits(beyond: int, tmp_path: Any) -> None:
    """Keys of later steps are of other streams, and results do not depend on chunks there either."""
    key = jax.random.key(5)

    def body(c: Any, key: Any) -> Any:
        return {
            "n": c["n"] + 1,
            "x": c["x"] + jax.random.normal(key),
            "keys": c["keys"].at[c["n"]].set(jax.random.key_data(key)),
        }

    init = {"n": jnp.int64(0), "x": 0.0, "keys": jnp.zeros((6, 2), jnp.uint32)}
    results = []
    for chunk_steps in (1, 4, 1000):
        options: dict[str, Any] = {"directory": tmp_path / str(chunk_steps), "chunk_steps": chunk_steps, "key": key}
        run = partial(durable.while_loop, lambda c: c["n"] < 6, body, init, info=True, **options)
        durable.while_loop(lambda c: c["n"] < 6, body, init, max_steps=0, throw=False, **options)
        arrays = [jnp.asarray(x) for x in jax.tree.leaves({**init, "x": jnp.float64(0)})]
        store = Saves("a test", options["directory"], 2, SavePace(1, True))
        store.start(SavedState(beyond, True, arrays))
        store.close()
        result, info = run()
        assert (info.num_steps, info.num_steps.dtype) == (beyond + 6, np.int64)
        results.append(result)
    for result in results[1:]:
        same_bits(result, results[0])
    keys = results[0]["keys"]
    assert len({tuple(k) for k in keys.tolist()}) == 6
    early = [jax.random.key_data(jax.random.fold_in(key, (beyond + k) % 2**31)).tolist() for k in range(6)]
    same = [k.tolist() == e for k, e in zip(keys, early, strict=True)]
    assert same == [beyond + k < 2**31 for k in range(6)]


WHOLE = np.arange(32.0).reshape(8, 4) / 7


def mesh(*shape: int) -> Any:
    types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(
        shape, ("a", "b")[: len(shape)], axis_types=types, devices=jax.devices()[: int(np.prod(shape))]
    )


EIGHT, FOUR_BY_TWO = mesh(8), mesh(4, 2)


def spread(where: Any, *axes: str) -> Any:
    return jax.device_put(WHOLE, NamedSharding(where, P(*axes)))


def spread_step(c: Any, _: Any) -> Any:
    x, n = c["x"], c["n"]
    x = jnp.sin(x) * 1.5 + 0.1 * n.astype(float)
    return {"x": x, "n": n + 1, "whole": c["whole"] + x.sum()}, x[0]


def run_spread(x: Any, directory: Any, length: int = 9, n: Any = 0, **options: Any) -> Any:
    init = {"x": x, "n": n, "whole": 0.0}
    options = {"chunk_steps": 2, "checkpoint_every": 4, **options}
    carry, ys = durable.scan(spread_step, init, length=length, directory=directory, **options)
    return carry, read_rows(ys)


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> Any:
    """The whole run on one device."""
    return run_spread(jnp.asarray(WHOLE), tmp_path_factory.mktemp("one"), **SELDOM)


@pytest.fixture(scope="module")
def of_eight(tmp_path_factory: Any) -> Any:
    """A run on eight devices that is not at its end."""
    path = tmp_path_factory.mktemp("eight") / "run"
    run_spread(spread(EIGHT, "a"), path, 5, **SELDOM)
    return path


def test_a_carry_keeps_its_sharding(one: Any, tmp_path: Any) -> None:
    """Mixed with scalars that are on one device; one program serves all chunks."""
    x = spread(FOUR_BY_TWO, "a", "b")
    numbers = []
    for length in (3, 9):
        with compilations() as compiled:
            carry, ys = run_spread(x, tmp_path / str(length), length)
        numbers.append(len(compiled))
    assert numbers[1] <= numbers[0]
    assert carry["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert not x.is_deleted()
    assert_close((carry, ys), one, 1e-12)


PLACES = {
    "eight": lambda: spread(EIGHT, "a"),
    "four by two": lambda: spread(FOUR_BY_TWO, "b", "a"),
    "another device": lambda: jax.device_put(WHOLE, jax.devices()[3]),
}


@pytest.mark.parametrize("then", PLACES)
def test_a_run_goes_on_on_other_devices(then: str, one: Any, of_eight: Any, tmp_path: Any) -> None:
    shutil.copytree(of_eight, tmp_path / "run")
    x = PLACES[then]()
    carry, ys = run_spread(x, tmp_path / "run", 9, **SELDOM)
    assert carry["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert_close((carry, ys), one, 1e-12)
