"""Carries that are spread over devices keep their sharding, on disk too, and go on on other devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from loopax import durable
from tests.durable.cases import compilations, read_rows
from tests.support.reference import assert_close

X = jnp.arange(32.0).reshape(8, 4) / 7


def mesh(*shape: int) -> Any:
    types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(
        shape, ("a", "b")[: len(shape)], axis_types=types, devices=jax.devices()[: int(np.prod(shape))]
    )


EIGHT, FOUR_BY_TWO, ONE = mesh(8), mesh(4, 2), mesh(1)


def spread(where: Any, *axes: str) -> Any:
    return jax.device_put(X, NamedSharding(where, P(*axes)))


def f(c: Any, _: Any) -> Any:
    x, n = c["x"], c["n"]
    x = jnp.sin(x) * 1.5 + 0.1 * n.astype(float)
    return {"x": x, "n": n + 1, "whole": c["whole"] + x.sum()}, x[0]


def run(x: Any, directory: Any, length: int = 9, n: Any = 0, **options: Any) -> Any:
    init = {"x": x, "n": n, "whole": 0.0}
    options = {"chunk_steps": 2, "checkpoint_every": 4, **options}
    carry, ys = durable.scan(f, init, length=length, directory=directory, **options)
    return carry, read_rows(ys)


def test_a_carry_keeps_its_sharding(tmp_path: Any) -> None:
    """Mixed with scalars that are on one device; one program serves all chunks."""
    x = spread(FOUR_BY_TWO, "a", "b")
    numbers = []
    for length in (3, 9):
        with compilations() as compiled:
            carry, ys = run(x, tmp_path / str(length), length)
        numbers.append(len(compiled))
    assert numbers[1] <= numbers[0]
    assert carry["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert not x.is_deleted()
    assert_close((carry, ys), run(X, tmp_path / "one"), 1e-12)


PLACES = {
    "eight": lambda: spread(EIGHT, "a"),
    "four by two": lambda: spread(FOUR_BY_TWO, "b", "a"),
    "one": lambda: X,
    "a mesh of one": lambda: spread(ONE, "a"),
    "another device": lambda: jax.device_put(X, jax.devices()[3]),
}


@pytest.mark.parametrize("then", PLACES.values(), ids=PLACES)
def test_a_run_goes_on_on_other_devices(then: Any, tmp_path: Any) -> None:
    run(spread(EIGHT, "a"), tmp_path, 5)
    x = then()
    carry, ys = run(x, tmp_path, 9)
    assert carry["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert_close((carry, ys), run(X, tmp_path / "one"), 1e-12)


def test_values_that_are_closed_over_or_scanned_are_spread(tmp_path: Any) -> None:
    """And the carry is not, or less."""
    w = jax.device_put(jnp.eye(8) * 0.5, NamedSharding(EIGHT, P("a")))
    xs = jax.device_put(jnp.ones((12, 8)), NamedSharding(EIGHT, P(None, "a")))
    body = lambda c, x: (jnp.tanh(w @ c + x), c.sum())
    for name, init in (("one", jnp.ones(8)), ("spread", jax.device_put(jnp.ones(8), NamedSharding(EIGHT, P("a"))))):
        options: dict[str, Any] = {"directory": tmp_path / name, "chunk_steps": 2, "checkpoint_every": 4}
        durable.scan(body, init, xs, 6, **options)
        carry, ys = durable.scan(body, init, xs, **options)
        expected, expected_ys = jax.lax.scan(body, jnp.ones(8), xs)
        assert_close((carry, read_rows(ys)), (expected, expected_ys), 1e-12)
        again, _ = durable.scan(body, init, xs, **options)
        assert_close(again, expected, 1e-12)


def test_a_carry_on_another_device_than_the_first(tmp_path: Any) -> None:
    device = jax.devices()[5]
    carry, _ = run(jax.device_put(X, device), tmp_path / "run")
    assert carry["x"].devices() == {device}
    assert_close(carry, run(X, tmp_path / "one")[0], 1e-12)
