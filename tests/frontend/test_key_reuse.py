"""`jax.debug_key_reuse` finds in loops and branches of loopax what it finds in those of `jax.lax`."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jax.errors import KeyReuseError

import loopax as lx

Program = Callable[[Any, Any, Any], Any]


def split_in_carry(m: Any, key: Any, used: Any = random.normal) -> Any:
    def step(key: Any, _: Any) -> Any:
        key, now = random.split(key)
        return key, used(now)

    key, rows = m.scan(step, key, None, 3)
    return key, rows.sum()


def add(x: Any, key: Any) -> Any:
    return x + random.normal(key), None


def add_twice(x: Any, key: Any) -> Any:
    return add(add(x, key)[0], key)[0]


def rows_twice(m: Any, key: Any, x: Any) -> Any:
    keys = random.split(key, 3)
    return m.scan(add, m.scan(add, x, keys)[0], keys)[0]


def handed_on(m: Any, key: Any) -> Any:
    """Each step returns the key as it came."""
    return m.fori_loop(0, 3, lambda _, c: (c[0] + 1.0, c[1]), (0.0, key))[1]


def handed_on_until(m: Any, key: Any) -> Any:
    return m.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, c[1]), (0.0, key))[1]


REUSING: dict[str, Program] = {
    "closed over": lambda m, k, x: m.fori_loop(0, 3, lambda _, x: add(x, k)[0], x),
    "carried": lambda m, k, x: m.scan(lambda k, _: (k, random.normal(k)), k, None, 3)[1].sum() * x,
    "used before": lambda m, k, x: x * random.normal(k) + split_in_carry(m, k)[1],
    "used behind": lambda m, k, x: x * split_in_carry(m, k)[1] + random.normal(k),
    "rows twice": rows_twice,
    "the last twice": lambda m, k, x: add_twice(x, split_in_carry(m, k)[0]),
    "used before and handed on": lambda m, k, x: add(add(x, k)[0], handed_on(m, k))[0],
    "handed on and used behind": lambda m, k, x: add(add(x, handed_on_until(m, k))[0], k)[0],
    "handed on by two": lambda m, k, x: add(add(x, handed_on(m, k))[0], handed_on_until(m, k))[0],
    "in one step": lambda m, k, x: x * split_in_carry(m, k, lambda k: random.normal(k) + random.uniform(k))[1],
    "with a condition": lambda m, k, x: m.while_loop(
        lambda c: c[0] < 3, lambda c: (add(c[0] + 1, c[1])[0], c[1]), (x, k)
    )[0],
    "in both loops": lambda m, k, x: m.fori_loop(0, 3, lambda _, x: m.fori_loop(0, 2, lambda _, y: add(y, k)[0], x), x),
    "branch and behind": lambda m, k, x: m.cond(x > 0, random.normal, lambda _: 0.0, k) + add(x, k)[0],
    "branch that closes over": lambda m, k, x: m.cond(x > 0, lambda: add(x, k)[0], lambda: 0.0) + random.normal(k),
    "branch in a step": lambda m, k, x: (
        x * split_in_carry(m, k, lambda k: m.cond(x > 0, lambda: random.normal(k), lambda: 0.0) + random.uniform(k))[1]
    ),
}
RIGHT: dict[str, Program] = {
    "split": lambda m, k, x: add(x, split_in_carry(m, k)[0])[0],
    "handed on": lambda m, k, x: add(x, handed_on_until(m, handed_on(m, k)))[0],
    "rows": lambda m, k, x: m.scan(add, x, random.split(k, 3))[0],
    "folded in": lambda m, k, x: m.fori_loop(0, 3, lambda i, x: add(x, random.fold_in(k, i))[0], x),
    "one branch or the other": lambda m, k, x: m.cond(x > 0, random.normal, random.uniform, k) + x,
    "closed over by both": lambda m, k, x: m.cond(x > 0, lambda: random.normal(k), lambda: random.uniform(k)) + x,
    "one of three": lambda m, k, x: m.switch(1, [random.normal, random.uniform, lambda _: 0.0], k) + x,
}
LANES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "gradient": lambda f: jax.jit(jax.value_and_grad(f, argnums=1)),
    "lanes": lambda f: jax.jit(lambda k, x: jax.vmap(f)(random.split(k, 2), jnp.array([x, -x]))),
}


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    with jax.debug_key_reuse(True):
        yield


def run(program: Program, m: Any, wrap: Any) -> Any:
    return wrap(lambda k, x: program(m, k, x))(random.key(0), 1.0)


@pytest.mark.parametrize("wrap", LANES)
@pytest.mark.parametrize("name", REUSING)
def test_reuse_is_an_error(name: str, wrap: str) -> None:
    with pytest.raises(KeyReuseError):
        run(REUSING[name], lx, LANES[wrap])


@pytest.mark.parametrize("name", REUSING)
def test_lax_says_so(name: str) -> None:
    with pytest.raises(KeyReuseError):
        run(REUSING[name], lax, jax.jit)


@pytest.mark.parametrize("wrap", LANES)
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_else_is(name: str, wrap: str) -> None:
    run(RIGHT[name], lx, LANES[wrap])


@pytest.mark.parametrize("kind", ["residuals", "checkpointed", lx.Checkpointed(2)])
def test_steps_that_are_evaluated_again_use_no_key_again(kind: Any) -> None:
    def f(x: Any, key: Any) -> Any:
        loop = lambda x, k: (x * random.normal(k), None)
        x = lx.scan(loop, x, random.split(key, 4), kind=kind)[0]
        return lx.cond(x > 0, lambda: x * random.normal(key_of_branch), lambda: x)

    key_of_branch, key = random.split(random.key(0))
    jax.grad(f)(1.0, key)


@pytest.mark.parametrize("wrap", LANES)
def test_the_key_of_a_loop_is_not_reused(wrap: str) -> None:
    def own(_: Any, k: Any, x: Any) -> Any:
        x = lx.fori_loop(0, 3, lambda _, x, key: add(x, key)[0], x, key=k)
        return lx.scan(lambda x, _, key: add(x, key), x, length=2, key=k)[0]

    run(own, lx, LANES[wrap])
    with pytest.raises(KeyReuseError):
        run(
            lambda _, k, x: lx.fori_loop(0, 3, lambda _, x, key: add(add(x, key)[0], key)[0], x, key=k), lx, LANES[wrap]
        )


def test_beside_other_values_that_a_body_closes_over() -> None:
    """The place of a lane, and a mutable array."""

    def in_lane(key: Any) -> Any:
        place = lambda: lax.axis_index("lanes").astype(float)
        return lx.fori_loop(0, 1, lambda _, x: x + place() * random.normal(key), 0.0)

    reference, key = jax.new_ref(jnp.zeros(())), random.key(0)

    def count(_: Any, x: Any) -> Any:
        reference[...] += 1
        return x + random.normal(key)

    with pytest.raises(KeyReuseError):
        jax.vmap(in_lane, axis_name="lanes")(random.split(random.key(0), 2))
    with pytest.raises(KeyReuseError):
        lx.fori_loop(0, 2, count, 0.0)


def test_what_to_do() -> None:
    with pytest.raises(KeyReuseError, match=r"body_fun of fori_loop consumes a PRNG key that it closes over.*`key=`"):
        run(REUSING["closed over"], lx, jax.jit)
    with pytest.raises(
        KeyReuseError, match=r"consumes the PRNG key carry\[1\], and returns no new one in its place. Split it"
    ):
        run(REUSING["with a condition"], lx, jax.jit)


@pytest.mark.slow
def test_nobody_pays_for_a_check_that_is_not_asked_for() -> None:
    loop = "lx.fori_loop(0, 3, lambda i, x: x, 0.0)"
    code = f"import loopax as lx, sys; {loop}; print([name for name in sys.modules if 'key_reuse._core' in name])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
