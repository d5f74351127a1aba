"""Values that Python has to know, which JAX refuses, and tracers that have leaked."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import leave_tracer

# ---- values that Python has to know, which JAX refuses


def indexed(value: Any) -> Any:
    return [0, 1, 2][value]


class Doubling(eqx.Module):
    def __call__(self, twice: Any) -> Any:
        return 2 * int(twice)

    def method(self, by: Any, me: Any) -> Any:
        return by * int(me)


def in_body(c: Any) -> Any:
    return {**c, "n": c["n"] + (1 if c["a"][0] else 2)}


def row_of_scan(c: Any, rows: Any) -> Any:
    return c + indexed(rows["n"]), None


def index_of_loop(step: Any, c: Any) -> Any:
    return c + np.asarray(step)


def drawn(c: Any, key: Any) -> Any:
    return c + float(jax.random.uniform(key))


def model(state: Any, now: Any) -> Any:
    return state, int(state["h"]) + now


def limit(c: Any) -> Any:
    return bool(c < 3)


def last(c: Any, _: Any) -> Any:
    return bool(c > 3)


def item(x: Any) -> Any:
    return int(x["k"])


FLAG = {"n": 0, "a": (jnp.array(True),)}
ROWS = jnp.arange(3)
REFUSED: dict[str, tuple[Callable[[], Any], list[Any], str]] = {
    "while_loop": (lambda: lx.while_loop(lambda c: c["n"] < 3, in_body, FLAG), [in_body], "c['a'][0]"),
    "cond_fun of while_loop": (lambda: lx.while_loop(limit, lambda c: c + 1, 0), [limit], "c"),
    "fori_loop": (lambda: lx.fori_loop(2, 5, index_of_loop, 0), [index_of_loop], "step and lower"),
    "scan": (lambda: lx.scan(row_of_scan, 0, {"n": ROWS}), [row_of_scan], "rows['n']"),
    "stop of scan": (lambda: lx.scan(lambda c, x: (c + x, x), 0, ROWS, stop=last), [last], "c and x"),
    "key": (lambda: lx.while_loop(lambda c: c < 3, drawn, 0.0, key=jax.random.key(0)), [drawn], "i and key"),
    "rollout": (lambda: lx.rollout(model, {"h": 0}, inputs=ROWS), [model], "carry.state['h']"),
    "lanes_map": (lambda: lx.lanes_map(item, {"k": ROWS}), [item], "x['k']"),
    "explain": (lambda: lx.explain(item, {"k": jnp.ones(())}), [item], "x['k']"),
    "rewrite_loops": (lambda: lx.rewrite_loops(item)(x={"k": ROWS[0]}), [item], "x['k']"),
    "a module": (lambda: lx.while_loop(limit, Doubling(), 0), [Doubling.__call__, limit], "twice"),
    "a partial method": (
        lambda: lx.fori_loop(0, 2, lambda i, c: lx.fori_loop(0, 2, partial(Doubling().method), c), 0),
        [Doubling.method],
        "me",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_about_a_traced_value_names_the_function_and_the_path(case: str) -> None:
    run, functions, path = REFUSED[case]
    with pytest.raises((TypeError, jax.errors.TracerIntegerConversionError)) as error:
        run()
    message = str(error.value)
    for function in functions:
        code = inspect.unwrap(function).__code__
        assert f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" in message
    assert re.search(rf"depends on the values? of the arguments? {re.escape(path)}\.", message)
    assert "loopax/_" not in message


# ---- tracers that have leaked


def test_leaked_tracers_in_a_body_and_in_a_carry() -> None:
    tracer = leave_tracer()
    with pytest.raises(jax.errors.UnexpectedTracerError):
        lx.scan(lambda x, _: (x + tracer, None), 0.0, length=3)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        lx.fori_loop(0, 3, lambda _, x: x + 1.0, tracer)


def lines_where_made(run: Callable[[Callable[..., Any]], Any]) -> set[str]:
    """What JAX says about values that a function was given and has kept: the function, and where it stands."""
    kept: list[Any] = []

    def keep(*args: Any, **keywords: Any) -> Any:
        kept.extend(jax.tree.leaves((args, keywords)))
        return args[-1] + 1.0

    run(keep)
    assert kept
    said: set[str] = set()
    for tracer in kept:
        with pytest.raises(jax.errors.UnexpectedTracerError) as error:
            jax.random.key_data(tracer) if jnp.issubdtype(tracer.dtype, jax.dtypes.prng_key) else tracer + 1
        said.update(re.findall(r"was created on line (.*)\. ?\n", str(error.value)))
    return said


CALLS: Any = [
    lambda f: lx.while_loop(lambda x: x < 3.0, f, 0.0, key=jax.random.key(0)),
    lambda f: lx.fori_loop(0, 3, f, 0.0, key=jax.random.key(0)),
    lambda f: lx.scan(lambda c, x: (f(c, x), None), 0.0, jnp.arange(3.0)),
    lambda f: lx.scan(lambda c, x: (c, f(x, c)), 0.0, jax.random.split(jax.random.key(0), 3)),
    lambda f: lx.rollout(lambda s: (f(s), s), 0.0, 3),
    lambda f: lx.cond(True, f, f, 1.0),
    lambda f: lx.switch(1, [f, f], 1.0),
    lambda f: lx.lanes_map(lambda x: lx.fori_loop(0, 2, lambda i, c: 2 * c, f(x)), jnp.ones(3)),
    lambda f: jax.jit(jax.grad(lambda x: lx.fori_loop(0, 2, f, x)))(1.0),
]


@pytest.mark.parametrize("run", CALLS)
def test_a_value_that_a_function_has_kept_was_made_in_the_call(run: Any) -> None:
    assert {line.partition(":")[0] for line in lines_where_made(run)} == {__file__}


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))])
def test_loops_leak_no_tracers(transform: Any) -> None:
    loss = lambda x: lx.fori_loop(0, 3, lambda _, y: lx.fori_loop(0, 2, lambda _, z: z * x, y), x)
    with jax.checking_leaks():
        out = jax.jit(transform(loss))(1.0)
    assert jnp.all(out == (7.0 if transform is jax.grad else 1.0))
