"""Random nests of loops, of one to four levels, with branches: in free lanes, they are one loop."""

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx

LANES, FEATURES = 5, 3
Step = Callable[..., Any]  # (w, x, n) -> x, where the number n is another one in each lane

W = np.linspace(0.3, 0.9, LANES)
X = np.random.RandomState(0).uniform(0.1, 1, (LANES, FEATURES))
NUMBERS = np.array([2, 0, 5, 1, 3])


def nest(number: int) -> Callable[[str], Callable[..., Any]]:
    """The program with this number, by `lanes` of its outermost loop: (w, x, n) -> float."""
    random = Random(number)
    body, form, rounds = _body(random, random.randint(1, 3)), random.choice(FORMS), random.randint(2, 4)

    def of(lanes: str) -> Callable[..., Any]:
        def f(w: Any, x: Any, n: Any) -> Any:
            return (form(body, w, x, n, n % rounds + 1, lanes=lanes) ** 2).sum()

        return f

    return of


def _body(random: Random, depth: int) -> Step:
    """Some steps, one after another; the first has loops `depth` deep."""
    deep = _loop(random, depth)
    others = [_one(random, depth) for _ in range(random.randint(0, 2))]
    steps = [*others[:1], deep, *others[1:]]

    def body(w: Any, x: Any, n: Any) -> Any:
        for step in steps:
            x = step(w, x, n)
        return x

    return body


def _one(random: Random, depth: int) -> Step:
    """Arithmetic, cheap or dear, a branch, or another loop."""
    choice = random.randint(0, 4)
    if choice == 0:
        return _dear
    if choice == 1:
        return jax.jit(_loop(random, depth - 1)) if depth > 1 else _cheap
    if choice == 2:
        inner = _loop(random, depth - 1) if depth > 1 else _dear
        return lambda w, x, n: lx.cond(n % 2 == 0, lambda x: inner(w, x, n), lambda x: w * x, x)
    if choice == 3:
        inner = _loop(random, max(depth - 1, 1))
        branches = [_cheap, inner, _dear]
        return lambda w, x, n: lx.switch(n % 3, [lambda x, f=f: f(w, x, n) for f in branches], x)
    return _cheap


def _loop(random: Random, depth: int) -> Step:
    body = _body(random, depth - 1) if depth > 1 else random.choice([_cheap, _dear])
    form, add, most = random.choice(FORMS), random.randint(0, 3), random.randint(1, 4)
    return lambda w, x, n: form(body, w, x, n, (n + add) % (most + 1))


def _cheap(w: Any, x: Any, n: Any) -> Any:
    return jnp.sin(w * x) + 0.1 * (n % 2).astype(x.dtype)


def _dear(w: Any, x: Any, n: Any) -> Any:
    matrix = jnp.outer(x, jnp.cos(x)) + w
    for _ in range(4):
        matrix = jnp.tanh(matrix @ matrix)
    return 0.5 * x + 0.5 * matrix @ x + 0.01 * (n % 3).astype(x.dtype)


def _fori(body: Step, w: Any, x: Any, n: Any, steps: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda i, x: body(w, x, n + i), x, max_steps=6, **options)


def _finite(body: Step, w: Any, x: Any, n: Any, steps: Any, **options: Any) -> Any:
    """A step may break, and is then undone."""

    def step(i: Any, x: Any) -> Any:
        x = body(w, x, n + i)
        return jnp.where((n + i) % 4 == 3, jnp.log(-jnp.abs(x)), x)

    return lx.fori_loop(0, steps, step, x, max_steps=6, finite=True, throw=False, **options)


def _while(body: Step, w: Any, x: Any, n: Any, steps: Any, **options: Any) -> Any:
    step = lambda c: (body(w, c[0], n + c[1]), c[1] + 1)
    return lx.while_loop(lambda c: c[1] < steps, step, (x, jnp.zeros_like(steps)), **options)[0]


def _scan(body: Step, w: Any, x: Any, n: Any, steps: Any, reverse: bool = False, **options: Any) -> Any:
    def step(x: Any, row: Any) -> Any:
        x = body(w, x + row, n)
        return x, x * row

    rows = jnp.linspace(0.0, 0.4, 6) * w
    x, ys = lx.scan(step, x, rows, length=jnp.minimum(steps, 6), reverse=reverse, **options)
    return x + ys.sum(0)


def _reverse(body: Step, w: Any, x: Any, n: Any, steps: Any, **options: Any) -> Any:
    return _scan(body, w, x, n, steps, reverse=True, **options)


FORMS = [_fori, _while, _scan, _reverse, _finite]
