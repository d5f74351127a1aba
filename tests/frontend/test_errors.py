"""Bad options: each a clear error that names the argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    EACH_LOOP,
    fori_loop,
    raises,
    scan,
)

# ---- kinds and lanes


@EACH_LOOP
@pytest.mark.parametrize("kind", ["banana", "Auto", None, 3])
def test_unknown_kind_lists_the_choices(loop: Any, kind: Any) -> None:
    with raises(ValueError, f"kind={kind!r}", "'auto'", "'lax'", "'checkpointed'", "'bounded'", "'residuals'"):
        loop(3, kind=kind)


class Own(lx.Bounded):
    """A kind of a user's."""


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"kind": "reversible"}, "needs arguments: write kind=lx.Reversible(inverse)."),
        ({"kind": "Truncated"}, "needs arguments: write kind=lx.Truncated(last=5)."),
        ({"kind": "checkpoint"}, "Did you mean 'checkpointed'? Choose one of"),
        ({"kind": "Bounded"}, "Did you mean 'bounded'?"),
        (
            {"kind": lx.Checkpointed},
            "kind=Checkpointed is a class, and an object is expected: write kind=lx.Checkpointed().",
        ),
        ({"kind": lx.Reversible}, "is a class, and an object is expected: write kind=lx.Reversible(inverse)."),
        ({"kind": Own}, "is a class, and an object is expected: write kind=Own(...)."),
        ({"lanes": "compacted"}, "Did you mean 'compact'?"),
        ({"lanes": lx.Compact}, "is a class, and an object is expected: write lanes=lx.Compact()."),
    ],
    ids=str,
)
def test_what_is_nearly_a_kind_or_lanes(options: Any, advice: str) -> None:
    with raises(ValueError, advice):
        fori_loop(3, **options)


def test_implicit_has_a_name() -> None:
    loop = lambda a: lx.fori_loop(0, 30, lambda i, z: z / 2 + a, 0.0, kind="implicit")
    assert float(jax.grad(loop)(1.0)) == pytest.approx(2.0)


@EACH_LOOP
@pytest.mark.parametrize("lanes", ["banana", None, 3])
def test_unknown_lanes_lists_the_choices(loop: Any, lanes: Any) -> None:
    with raises(ValueError, f"lanes={lanes!r}", "'lockstep'", "'compact'", "'free'"):
        loop(3, lanes=lanes)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (lx.Lax, "checkpoints"),
        (lx.Lax, "memory"),
        (lx.Bounded, "checkpoints"),
        (lx.Residuals, "checkpoints"),
        (lx.Checkpointed, "memory"),
        (lx.Auto, "checkpoints"),
    ],
)
def test_option_that_the_kind_does_not_use(kind: Any, option: str) -> None:
    with raises(TypeError, option):
        kind(**{option: 3})


# ---- max_steps


@EACH_LOOP
@pytest.mark.parametrize("steps", [1.5, "3", True, (3,), np.ones(1), jnp.ones((), bool)])
def test_max_steps_that_is_not_an_int(loop: Any, steps: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(max_steps=...)", "got", "expected"):
        loop(3, max_steps=steps)


@EACH_LOOP
@pytest.mark.parametrize("steps", [-1, 2**31])
def test_max_steps_outside_of_its_range(loop: Any, steps: int) -> None:
    with raises(ValueError, f"{loop.__name__}(max_steps=...)", f"got {steps}", "from 0 to 2147483647"):
        loop(3, max_steps=steps)


@EACH_LOOP
def test_max_steps_may_be_a_numpy_integer(loop: Any) -> None:
    assert loop(3, max_steps=np.int64(3), info=True)[1].num_steps == 3


# ---- reverse mode where there is none

UNBOUNDED: Any = {
    "while_loop": lambda x, n, **o: lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] ** 2), (0, x), **o)[1],
    "fori_loop": lambda x, n, **o: lx.fori_loop(0, n, lambda _, x: x * x, x, **o),
    "scan": lambda x, n, **o: lx.scan(lambda c, _: (c * c, None), x, None, n, **o)[0],
}


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_reverse_mode_through_lax_names_the_kinds_that_have_it(loop: str, options: Any) -> None:
    with raises(ValueError, "reverse mode", "Lax()", "Checkpointed()", "Bounded()", "Residuals()"):
        jax.jit(jax.grad(lambda x, n: UNBOUNDED[loop](x, n, kind="lax", **options)))(2.0, 3)


BUDGETS = [(lx.Checkpointed, "checkpoints", "number of stored carries"), (lx.Auto, "memory", "number of bytes")]


@pytest.mark.parametrize(("kind", "name", "unit"), BUDGETS)
@pytest.mark.parametrize("value", [0, -1, np.int32(0)])
def test_budget_below_one(kind: Any, name: str, unit: str, value: Any) -> None:
    with raises(ValueError, f"{kind.__name__}({name}=...)", f"got {value}", "at least 1", unit):
        kind(value)


@pytest.mark.parametrize(("kind", "name", "unit"), BUDGETS)
@pytest.mark.parametrize("value", [1.5, 2.0, "3", True, (1,)])
def test_budget_that_is_not_an_integer(kind: Any, name: str, unit: str, value: Any) -> None:
    with raises(TypeError, f"{kind.__name__}({name}=...)", "expected an int", unit):
        kind(value)


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_memory_below_one_carry_says_how_much_the_least_is(loop: str, options: Any) -> None:
    gradient = jax.grad(lambda x, n: UNBOUNDED[loop](x, n, kind=lx.Auto(memory=7), **options))
    with raises(ValueError, "Auto(memory=7)", "at least one carry", "8 bytes", "Give memory=8 or more"):
        jax.jit(gradient)(2.0, 3)


@pytest.mark.parametrize("kind", ["bounded", "residuals"])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_kinds_that_need_a_bound_say_so_at_once(loop: str, kind: Any) -> None:
    with raises(ValueError, "kind=" + kind.capitalize(), "static bound", "max_steps="):
        jax.jit(lambda x, n: UNBOUNDED[loop](x, n, kind=kind))(2.0, 3)


@pytest.mark.parametrize("kind", ["auto", "lax", "checkpointed"])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_forward_mode_needs_no_bound(loop: str, kind: Any) -> None:
    tangent = jax.jit(lambda x, n: jax.jvp(lambda x: UNBOUNDED[loop](x, n, kind=kind), (x,), (x,))[1])
    assert tangent(2.0, 2) == 64.0


# ---- key, unroll, limits of fori_loop


@EACH_LOOP
@pytest.mark.parametrize(
    "key",
    [
        0,
        "key",
        jnp.zeros(2),
        jnp.zeros((), jnp.uint32),
        jnp.zeros(3, jnp.uint32),
        jnp.zeros((2, 2), jnp.uint32),
        jax.random.split(jax.random.key(0)),
    ],
    ids=lambda key: getattr(key, "dtype", key),
)
def test_key_that_is_not_one_key(loop: Any, key: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(key=...)", "expected one PRNG key"):
        loop(3, key=key)


@pytest.mark.parametrize("loop", [fori_loop, scan])
@pytest.mark.parametrize("unroll", ["a", 1.5, (2,), jnp.float32(2)])
def test_unroll_that_is_not_an_int(loop: Any, unroll: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(unroll=...)", "expected an int"):
        loop(3, unroll=unroll)


@pytest.mark.parametrize("loop", [fori_loop, scan])
def test_unroll_that_is_negative(loop: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll=...)", "got -1", "positive"):
        loop(3, unroll=-1)


@pytest.mark.parametrize("loop", [fori_loop, scan])
@pytest.mark.parametrize("unroll", [True, 0])
def test_unroll_true_with_traced_length(loop: Any, unroll: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll={unroll})", "static", "unroll=k"):
        jax.jit(lambda n: loop(n, unroll=unroll, max_steps=3))(3)


@pytest.mark.parametrize("unroll", [2, True])
def test_unroll_with_stop(unroll: Any) -> None:
    with raises(ValueError, f"scan(unroll={unroll}", "stop"):
        lx.scan(lambda c, _: (c + 1, c), 0, length=3, unroll=unroll, stop=lambda c, _: c > 1)


@pytest.mark.parametrize("name", ["lower", "upper"])
@pytest.mark.parametrize(
    "limit", [1.0, True, "3", None, np.float32(1), jnp.float32(1), jnp.asarray(True), jnp.ones(1, int)]
)
def test_limit_of_fori_loop_that_is_not_an_integer(name: str, limit: Any) -> None:
    limits: Any = {"lower": 0, "upper": 3, name: limit}
    with raises(TypeError, f"fori_loop({name}=...)", "got", "expected"):
        lx.fori_loop(limits["lower"], limits["upper"], lambda _, x: x, 0)
