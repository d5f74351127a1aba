"""Effects and collectives that a derivative or a batch cannot have are refused; others work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.core.effects.log import EFFECTS, Log
from tests.support.limited_loops import KINDS, raises
from tests.support.reference import assert_close

REFUSED = [name for name in EFFECTS if name != "callback"]  # which has no order and no result


def with_effect(effect: str, kind: Any = "auto") -> Any:
    def body(_: Any, x: Any) -> Any:
        EFFECTS[effect](Log(), lax.stop_gradient(x))
        return 2.0 * x

    return lambda x: lx.fori_loop(0, 3, body, x, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effect", REFUSED)
def test_derivatives_refuse_effects(effect: str, kind: Any) -> None:
    loop = with_effect(effect, kind)
    for derivative in (jax.grad(loop), jax.grad(jax.jit(loop)), lambda x: jax.jvp(loop, (x,), (x,))):
        with raises(NotImplementedError, "a loop is differentiated", "effects", "io_callback", "jax.pure_callback"):
            derivative(1.0)


@pytest.mark.parametrize("effect", REFUSED)
def test_effects_outside_of_derivatives_are_allowed(effect: str) -> None:
    loop = with_effect(effect)
    assert loop(1.0) == 8.0
    assert jax.grad(lambda x: x * loop(lax.stop_gradient(x)))(1.0) == 8.0
    jax.effects_barrier()


def total(steps: Any, x: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: lax.psum(x, "lanes"), x, **options)


def total_in_inner_loop(steps: Any, x: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: total(1, x), x)


def total_while(steps: Any, x: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, lax.psum(c[1], "lanes")), (0, x))[1]


TOTALS = pytest.mark.parametrize("loop", [total, total_in_inner_loop, total_while])


@TOTALS
def test_collective_under_counts_per_lane_is_refused(loop: Any) -> None:
    with raises(NotImplementedError, "communicates", "'lanes'", "different numbers of steps"):
        jax.vmap(loop, axis_name="lanes")(jnp.array([1, 2]), jnp.array([1.0, 2.0]))


@TOTALS
def test_collective_under_one_count_for_all_lanes_is_allowed(loop: Any) -> None:
    lanes = jax.jit(jax.vmap(loop, in_axes=(None, 0), axis_name="lanes"))
    assert lanes(3, jnp.array([1.0, 2.0])).tolist() == [12.0, 12.0]


def test_condition_that_all_lanes_agree_on_by_a_collective_is_allowed() -> None:
    def agree(x: Any) -> Any:
        return lx.while_loop(lambda x: lax.psum(x, "lanes") < 9.0, lambda x: 2.0 * x, x)

    assert jax.vmap(agree, axis_name="lanes")(jnp.array([1.0, 2.0])).tolist() == [4.0, 8.0]


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_place_of_a_lane_under_counts_per_lane(lanes: Any) -> None:
    def place(steps: Any, x: Any) -> Any:
        def lane() -> Any:
            return lax.axis_index("lanes").astype(float)

        def body(c: Any) -> Any:
            inner = lx.fori_loop(0, c[0], lambda _, x: x * jnp.sin(lane() + 1.0), c[1], max_steps=5)
            return c[0] + 1, inner + lane()

        return lx.while_loop(lambda c: c[0] < steps, body, (0, x), max_steps=5, lanes=lanes)[1]

    def alone(lane: int, steps: int, x: Any) -> Any:
        for i in range(steps):
            x = x * jnp.sin(lane + 1.0) ** i + lane
        return x

    steps, xs = [3, 0, 5], [0.5, 2.0, 3.0]
    actual = jax.vmap(jax.value_and_grad(place, 1), axis_name="lanes")(jnp.array(steps), jnp.array(xs))
    alones = [jax.value_and_grad(alone, 2)(i, n, x) for i, (n, x) in enumerate(zip(steps, xs, strict=True))]
    assert_close(actual, jax.tree.map(lambda *lanes: jnp.stack(lanes), *alones))


@jax.custom_batching.custom_vmap
def centred(x: Any) -> Any:
    jax.debug.callback(lambda _: None, x)
    return x


@centred.def_vmap
def centred_together(size: int, mapped: Any, x: Any) -> Any:
    jax.debug.callback(lambda _: None, x)
    return x - x.mean(), True


def test_effects_of_a_rule_that_mixes_lanes() -> None:
    """In lanes of the same length, the rule is JAX's; else it is refused, as the effect has to be one of each lane."""
    starts = jnp.array([1.0, 2.0, 3.0, 6.0])
    run = lambda x, n: lx.fori_loop(0, n, lambda _, c: centred(c) + 1.0, x)
    np.testing.assert_array_equal(jax.vmap(lambda x: run(x, 2))(starts), [-1.0, 0.0, 1.0, 4.0])
    with raises(NotImplementedError, "custom_vmap_call", "several lanes", "different numbers of steps"):
        jax.vmap(run)(starts, jnp.array([1, 2, 2, 0]))
