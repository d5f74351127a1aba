"""Branches: lanes that take different ones, a lane alone, and experts that are chosen for each token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

LANES, UNITS, STEPS, RARE = 1024, 64, 64, 100
MANY = 65536
ALONE_UNITS, ALONE_STEPS = 256, 20
EXPERTS, TOKENS, WIDTH = 16, 4096, 256
SIZES = (32, 64, 128)  # rows of a group that is padded by hand
COMPILATIONS, TO_COMPILE = 3, 4.0

COMPACT, LOCKSTEP, LAX = "loopax cond, lanes compact", "loopax cond", "lax.cond"
VMAPPED, SELECT = "vmapped lax.cond", "both branches and jnp.where, by hand"
EXPERTS_COMPACT = "loopax switch, lanes compact"
EXPERTS_OF_STACK = "loopax switch, lanes compact, W[k] in the branch"
STACKED = "one stacked einsum over all experts"
BY_HAND = {size: f"sorted and padded to groups of {size}, by hand" for size in SIZES}

Cond = Callable[..., Any]


def select(pred: Array, true_fun: Any, false_fun: Any, *operands: Any) -> Any:
    """Both results, of which one is taken: `lax.cond` under vmap, which repeats the operands for each lane besides."""
    return jnp.where(pred, true_fun(*operands), false_fun(*operands))


CONDS: dict[str, Cond] = {
    COMPACT: partial(lx.cond, lanes="compact"),
    LOCKSTEP: lx.cond,
    VMAPPED: lax.cond,
    SELECT: select,
}


def to_compile(of: str, to: str) -> Target:
    """To trace and compile is not much more than with JAX alone."""
    return Target("trace and compile", of, to, TO_COMPILE, "compile_seconds")


# ---- lanes that take different branches


def recurrent(weights: Array, h: Array, num_steps: int = STEPS) -> Array:
    """A costly branch."""
    return lax.scan(lambda h, _: (jnp.tanh(weights @ h), None), h, length=num_steps)[0]


def states(size: int = LANES) -> Array:
    """One of each lane."""
    return jax.random.normal(jax.random.key(1), (size, UNITS))


def matrix(seed: int, units: int = UNITS) -> Array:
    """Weights that keep the size of a state."""
    return jax.random.normal(jax.random.key(seed), (units, units)) / jnp.sqrt(units)


def _in_conds(title: str, run: Callable[[Cond], Any], arguments: Any, bounds: tuple[float, float]) -> list[Group]:
    """Forward, and the gradient with respect to the first argument, which are the weights."""
    gradient = lambda c: jax.grad(lambda *arguments: (run(c)(*arguments) ** 2).sum())
    return [
        Group(
            f"Branches: {title}, {name}",
            [Case(of, program(c), arguments) for of, c in CONDS.items()],
            [
                Target("time", COMPACT, VMAPPED, bound),
                Target("time", COMPACT, SELECT, bound),
                to_compile(COMPACT, VMAPPED),
            ],
            rounds=7,
            compilations=COMPILATIONS,
        )
        for (name, program), bound in zip({"forward": run, "gradient": gradient}.items(), bounds, strict=True)
    ]


def rare() -> list[Group]:
    """One lane of a hundred takes a costly branch, and the others do nothing."""

    def run(cond: Cond) -> Any:
        one = lambda pred, weights, h: cond(pred, recurrent, lambda _, h: h, weights, h)
        return lambda weights, preds, hs: jax.vmap(one, (0, None, 0))(preds, weights, hs)

    is_rare = jnp.arange(LANES) % RARE == 0
    title = f"{int(is_rare.sum())} of {LANES} lanes take {STEPS} steps of an MLP"
    return _in_conds(title, run, (matrix(0), is_rare, states()), (1 / 10, 1 / 8))


def split() -> list[Group]:
    """Half of the lanes take one costly branch, half another."""

    def run(cond: Cond) -> Any:
        one = lambda pred, weights, h: cond(
            pred, lambda w, h: recurrent(w[0], h), lambda w, h: recurrent(w[1], h), weights, h
        )
        return lambda weights, preds, hs: jax.vmap(one, (0, None, 0))(preds, weights, hs)

    is_first = jax.random.permutation(jax.random.key(2), jnp.arange(LANES) % 2 == 0)
    title = f"{LANES} lanes in halves, {STEPS} steps of two MLPs"
    return _in_conds(title, run, ((matrix(0), matrix(1)), is_first, states()), (0.65, 0.65))


def cheap() -> list[Group]:
    """Branches of a few operations, which cost less than to say who takes them."""

    def run(cond: Cond) -> Any:
        one = lambda x: cond(x > 0, lambda x: jnp.sqrt(x) + jnp.sin(x), lambda x: x * 2.0, x)
        return jax.vmap(one)

    conds = {name: CONDS[name] for name in (LOCKSTEP, VMAPPED)}
    gradient = lambda c: jax.grad(lambda xs: run(c)(xs).sum())
    return [
        Group(
            f"Branches: elementwise, {MANY} lanes, {name}",
            [Case(of, program(c), (jnp.linspace(-1.0, 1.0, MANY),)) for of, c in conds.items()],
            [Target("time", LOCKSTEP, VMAPPED, 1.3), to_compile(LOCKSTEP, VMAPPED)],
            rounds=31,
            compilations=COMPILATIONS,
        )
        for name, program in {"forward": run, "gradient": gradient}.items()
    ]


# ---- lanes that all take the same branch


def one_for_all() -> list[Group]:
    """One lane, and a batch with one predicate: what lax.cond does well."""
    weights, h = matrix(0, ALONE_UNITS), jnp.ones(ALONE_UNITS)
    hs = jax.random.normal(jax.random.key(1), (64, ALONE_UNITS))
    conds = {LOCKSTEP: lx.cond, LAX: lax.cond}

    def one(cond: Cond) -> Any:
        costly = partial(recurrent, num_steps=ALONE_STEPS)
        return lambda weights, pred, h: cond(pred, costly, lambda _, h: h, weights, h)

    def batch(cond: Cond) -> Any:
        return jax.vmap(one(cond), (None, None, 0))

    def gradient(run: Any) -> Any:
        return jax.grad(lambda weights, pred, h: (run(weights, pred, h) ** 2).sum())

    programs = {
        "one lane, forward": (one, h),
        "one lane, gradient": (lambda c: gradient(one(c)), h),
        "one predicate for 64 lanes, forward": (batch, hs),
        "one predicate for 64 lanes, gradient": (lambda c: gradient(batch(c)), hs),
    }
    return [
        Group(
            f"Branches: {title}",
            [Case(name, program(c), (weights, jnp.asarray(True), start)) for name, c in conds.items()],
            [Target("time", LOCKSTEP, LAX, 1.05), to_compile(LOCKSTEP, LAX)],
            rounds=31,
            compilations=COMPILATIONS,
        )
        for title, (program, start) in programs.items()
    ]


# ---- experts


def expert(inward: Array, outward: Array, x: Array) -> Array:
    """A network of one hidden layer; x: one token or several."""
    return jnp.tanh(x @ inward) @ outward


def by_switch(inward: Array, outward: Array, xs: Array, routes: Array) -> Array:
    """For each token the expert that it is sent to."""
    weights = zip(jnp.unstack(inward), jnp.unstack(outward), strict=True)
    experts = [partial(expert, *of_expert) for of_expert in weights]
    return jax.vmap(lambda x, route: lx.switch(route, experts, x, lanes="compact"))(xs, routes)


def by_switch_of_stack(inward: Array, outward: Array, xs: Array, routes: Array) -> Array:
    """For each token the expert that it is sent to; a branch reads the weights of its expert out of the stack."""
    experts = [lambda x, k=k: expert(inward[k], outward[k], x) for k in range(EXPERTS)]
    return jax.vmap(lambda x, route: lx.switch(route, experts, x, lanes="compact"))(xs, routes)


def stacked(inward: Array, outward: Array, xs: Array, routes: Array) -> Array:
    """All experts for all tokens."""
    hidden = jnp.tanh(jnp.einsum("nd,edh->neh", xs, inward))
    found = jnp.einsum("neh,ehd->ned", hidden, outward)
    return jnp.take_along_axis(found, routes[:, None, None], 1)[:, 0]


def by_hand(size: int) -> Any:
    """Tokens sorted by expert; the tokens of each fill groups of one size, which are padded."""
    most = TOKENS // size + EXPERTS

    def run(inward: Array, outward: Array, xs: Array, routes: Array) -> Array:
        order, counts = jnp.argsort(routes), jnp.bincount(routes, length=EXPERTS)
        groups = -(-counts // size)
        first_group, first = jnp.cumsum(groups) - groups, jnp.cumsum(counts) - counts
        ordered = routes[order]
        place = first_group[ordered] * size + jnp.arange(TOKENS) - first[ordered]
        padded = jnp.zeros((most * size, WIDTH)).at[place].set(xs[order]).reshape(most, size, WIDTH)
        of_group = jnp.searchsorted(jnp.cumsum(groups), jnp.arange(most), side="right").clip(0, EXPERTS - 1)
        found = lax.map(lambda group: expert(inward[group[0]], outward[group[0]], group[1]), (of_group, padded))
        return jnp.zeros((TOKENS, WIDTH)).at[order].set(found.reshape(most * size, WIDTH)[place])

    return run


def experts() -> list[Group]:
    """A layer of experts, with tokens spread evenly and unevenly.

    The vmapped `lax.switch` is missing: it repeats the weights of all experts for each token, which takes 32 GiB.
    """
    inward, outward, xs = (
        jax.random.normal(jax.random.key(seed), shape) / scale
        for seed, (shape, scale) in enumerate(
            [((EXPERTS, WIDTH, WIDTH), 16.0), ((EXPERTS, WIDTH, WIDTH), 16.0), ((TOKENS, WIDTH), 1.0)]
        )
    )
    zipf = 1 / np.arange(1, EXPERTS + 1)
    random = np.random.RandomState(0)
    routings = {
        "balanced": random.randint(0, EXPERTS, TOKENS),
        "Zipf": random.choice(EXPERTS, TOKENS, p=zipf / zipf.sum()),
    }
    runs = {
        EXPERTS_COMPACT: by_switch,
        EXPERTS_OF_STACK: by_switch_of_stack,
        **{BY_HAND[size]: by_hand(size) for size in SIZES},
        STACKED: stacked,
    }

    def gradient(run: Any) -> Any:
        return jax.grad(lambda *arguments: (run(*arguments) ** 2).sum(), (0, 1, 2))

    return [
        Group(
            f"Branches: {EXPERTS} experts, {TOKENS} tokens, width {WIDTH}, {routing}, {name}",
            [Case(of, program(run), (inward, outward, xs, jnp.asarray(routes, jnp.int32))) for of, run in runs.items()],
            [
                Target("time", EXPERTS_COMPACT, STACKED, bound),
                Target("time", EXPERTS_COMPACT, tuple(BY_HAND.values()), 1.25),
                Target("time", EXPERTS_OF_STACK, tuple(BY_HAND.values()), 1.1),
            ],
            rounds=5,
        )
        for routing, routes in routings.items()
        for name, program, bound in (("forward", lambda run: run, 1 / 6), ("gradient", gradient, 1 / 5))
    ]


def groups() -> list[Group]:
    """All tables."""
    return [*rare(), *split(), *cheap(), *one_for_all(), *experts()]
