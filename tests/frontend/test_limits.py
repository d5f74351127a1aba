"""The limits of `fori_loop`, and the length of `scan`, in every integer dtype: no number wraps."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.jax_internals import to_weak
from tests.support.limited_loops import RUN_TIME, raises

NARROW = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
SAME = [(x64, t, t) for x64 in (False, True) for t in NARROW] + [(True, "int64", "int64"), (True, "uint64", "uint64")]
MIXED = [
    (False, "int32", "uint32"),
    (False, "uint32", "int32"),
    (True, "int32", "uint32"),
    (True, "uint8", "int8"),
    (True, "int16", "int64"),
]
WEAK = [(False, "int8", "weak"), (False, "weak", "uint32"), (True, "weak", "int8"), (True, "uint64", "weak")]
BOUND = 3


def dtype_of(name: str) -> Any:
    return jnp.asarray(0).dtype if name == "weak" else jnp.dtype(name)


def edges(dtype: Any) -> list[int]:
    """Numbers of this dtype at the ends of all dtypes, and in the middle."""
    ends = {end for bits in (8, 16, 32, 64) for end in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 2**bits - 1)}
    near = {end + step for end in ends | {0} for step in (-4, -3, -1, 0, 1, 3, 4)}
    limits = np.iinfo(dtype)
    return sorted(number for number in near if limits.min <= number <= limits.max)


def steps_in_python(dtype: Any, lower: int, upper: int) -> tuple[int, bool, int]:
    """Steps, whether there would be more, and the last index."""
    holds = np.iinfo(dtype)
    if not all(holds.min <= limit <= holds.max for limit in (lower, upper)):
        return 0, True, 0
    steps = min(max(upper - lower, 0), BOUND)
    return steps, upper - lower > BOUND, lower + steps - 1 if steps else 0


@pytest.mark.parametrize(("x64", "low", "high"), SAME + MIXED + WEAK)
def test_traced_limits_of_every_dtype(x64: bool, low: str, high: str) -> None:
    """Numbers at the ends of dtypes in all pairs, each in a lane of one program."""

    def run(lower: Any, upper: Any) -> Any:
        lower, upper = (to_weak(x) if t == "weak" else x for x, t in ((lower, low), (upper, high)))
        start = jnp.zeros((), dtype)
        last, info = lx.fori_loop(lower, upper, lambda i, _: i, start, max_steps=BOUND, throw=False, info=True)
        return info.num_steps, info.limit_reached, last

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*(dtype_of(name) for name in (low, high) if name != "weak"))
        pairs = list(product(edges(dtype_of(low)), edges(dtype_of(high))))
        lowers, uppers = (
            jnp.asarray(x, dtype_of(t)) for x, t in zip(zip(*pairs, strict=True), (low, high), strict=True)
        )
        found = jax.jit(jax.vmap(run))(lowers, uppers)
    expected = [steps_in_python(dtype, *pair) for pair in pairs]
    assert list(zip(*(np.asarray(x).tolist() for x in found), strict=True)) == expected


def loop(lower: Any, upper: Any, **options: Any) -> Any:
    return lx.fori_loop(lower, upper, lambda _, x: x + 1, 0, **options)


def test_limits_beyond_the_index() -> None:
    each: Any = [(0, 2**31 + 1), (-(2**31) - 1, 0), (2**40, 2**40 + 3), (0, np.uint32(2**31 + 1)), (0, 2**70)]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for limits in each:
            with raises(ValueError, "fori_loop(", "got", "beyond int32, the dtype of the index"):
                loop(*limits)
    # When the program runs: a weakly typed limit takes the dtype of the other.
    with raises(RUN_TIME, "lower is int64[] (weakly typed), upper is int8[]", "beyond int8, the dtype of the index"):
        jax.block_until_ready(jax.jit(loop)(-129, jnp.int8(3)))
    assert jax.jit(loop)(-128, jnp.int8(3)) == 131


def test_static_limits_further_apart_than_can_be_counted() -> None:
    far = -(2**31), 2**31 - 1
    with jax.enable_x64(False):
        with raises(ValueError, "fori_loop: 4294967295 steps are more than 2147483647"):
            loop(*far)
        with raises(ValueError, "max_steps=3 stopped a loop"):
            loop(*far, max_steps=3)
        assert loop(*far, max_steps=3, throw=False) == 3
        assert loop(2**31 - 3, 2**31) == 3
        assert loop(2**40, -(2**40)) == 0


# ---- more steps than can be counted: an error before the first of them


def refuse_to_run(x: Any) -> Any:
    """A step whose error tells that it was taken, where 2**31 of them would take an hour."""

    def fail(_: Any) -> Any:
        raise AssertionError("a step was taken")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x)


TOO_MANY: Any = {
    "fori_loop": (lambda n: lx.fori_loop(-n, n, lambda _, x: refuse_to_run(x), 0.0), "upper - lower is more than"),
    "fori_loop to n": (lambda n: lx.fori_loop(0, n, lambda _, x: refuse_to_run(x), 0.0), "upper - lower is more than"),
    "scan": (lambda n: lx.scan(lambda x, _: (refuse_to_run(x), None), 0.0, length=n), "step counts go to"),
    "rollout": (lambda n: lx.rollout(lambda x: (refuse_to_run(x), None), 0.0, n).state, "step counts go to"),
}


@pytest.mark.parametrize("program", TOO_MANY)
def test_too_many_steps_to_count_raise_before_the_first(program: str) -> None:
    run, message = TOO_MANY[program]
    with raises(RUN_TIME, message, str(2**31 - 1)):
        jax.block_until_ready(jax.jit(run)(jnp.int64(2**40)))
