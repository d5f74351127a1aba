"""Evaluations of the body for forward and gradient: loopax, Equinox, and the optimum of a known length."""

from collections.abc import Callable
from itertools import islice
from math import comb
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp

from benchmarks.counter import Counter
from benchmarks.groups import Findings
from loopax._src.schedule.binomial import evaluations, evaluations_from
from loopax._src.schedule.online import online

CHECKPOINTS = (3, 10, 20, 44)
LENGTHS = (10, 30, 60, 100, 200, 400, 700, 1000, 2000)
LONG = 100_000


def of_equinox(checkpoints: int) -> Callable[[int], int]:
    """Evaluations for a number of steps."""
    counter = Counter()

    def loop(x: Any, n: Any) -> Any:
        body = lambda state: (0.9 * counter(state[0]), state[1] + 1)
        go = lambda state: state[1] < n
        return eqxi.while_loop(go, body, (x, 0), kind="checkpointed", checkpoints=checkpoints)[0]

    gradient = jax.jit(jax.grad(loop))

    return lambda n: counter.of(gradient, jnp.float32(0.5), n)


def optimum(n: int, checkpoints: int) -> int:
    """The published optimum, r n - C(c + r, r - 1) + n: the last step is turned round without leaving the loop."""
    repetitions = next(r for r in range(n) if comb(checkpoints + r, r) >= n)
    return (repetitions + 1) * n - comb(checkpoints + repetitions, repetitions - 1)


def counted() -> list[dict[str, Any]]:
    """A row for each number of checkpoints; the tests hold the compiled loops to the schedules' counts."""
    rows = []
    for c in CHECKPOINTS:
        history = list(islice(online(c), LONG))
        unknown = {n: evaluations_from(history[n - 1], n, c) for n in (*LENGTHS, *range(1, LONG + 1, 37))}
        best = {n: evaluations(n, c) for n in unknown}
        equinox = of_equinox(c)
        rows.append(
            {
                "checkpoints": c,
                "optimum": optimum(1000, c) / 1000,
                "known length": best[1000] / 1000,
                "online": unknown[1000] / 1000,
                "Equinox": equinox(1000) / 1000,
                "online / optimum, worst to 100000": max(unknown[n] / best[n] for n in unknown),
                "online / Equinox, worst": max(unknown[n] / equinox(n) for n in LENGTHS),
            }
        )
    return rows


def tables() -> list[Findings]:
    """One table."""
    ours = ("known length", "online", "online / optimum, worst to 100000", "online / Equinox, worst")
    return [Findings("Evaluations per step, n = 1000", counted, counts=ours)]
