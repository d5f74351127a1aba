"""Carries that are spread over devices keep their sharding, on disk too, and go on on other devices."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from loopax import durable
from tests.durable.cases import SELDOM, read_rows
from tests.support.compiled import compilations
from tests.support.reference import assert_close

X = np.arange(32.0).reshape(8, 4) / 7


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


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> Any:
    """The whole run on one device."""
    return run(jnp.asarray(X), tmp_path_factory.mktemp("one"), **SELDOM)


@pytest.fixture(scope="module")
def of_eight(tmp_path_factory: Any) -> Any:
    """A run on eight devices that is not at its end."""
    path = tmp_path_factory.mktemp("eight") / "run"
    run(spread(EIGHT, "a"), path, 5, **SELDOM)
    return path


def test_a_carry_keeps_its_sharding(one: Any, tmp_path: Any) -> None:
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
    assert_close((carry, ys), one, 1e-12)


PLACES = {
    "eight": lambda: spread(EIGHT, "a"),
    "four by two": lambda: spread(FOUR_BY_TWO, "b", "a"),
    "another device": lambda: jax.device_put(X, jax.devices()[3]),
}


@pytest.mark.parametrize("then", PLACES)
def test_a_run_goes_on_on_other_devices(then: str, one: Any, of_eight: Any, tmp_path: Any) -> None:
    shutil.copytree(of_eight, tmp_path / "run")
    x = PLACES[then]()
    carry, ys = run(x, tmp_path / "run", 9, **SELDOM)
    assert carry["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert_close((carry, ys), one, 1e-12)
