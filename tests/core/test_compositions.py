"""Every kind in every loop under every transformation, against one `lax.scan`.

What lanes, loops, kinds and transformations do to each other is tested here; other files have what one of them does.
"""

import functools as ft
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src import history
from tests.kinds.reversible import Reversible
from tests.support.derivatives import FORMS, Cut, steps_taken
from tests.support.op_by_op import op_by_op
from tests.support.problem import (
    BOUND,
    HALVES,
    LOOPS,
    LOSSY,
    PLAIN,
    UNBOUNDED,
    XS,
    H,
    Make,
    Program,
    Step,
    W,
    expected_gradient,
    mixed,
    rollout_program,
)
from tests.support.reference import assert_close

slow = pytest.mark.slow
ALL = (0, 1, 2)
ARGS, DOTS = (W, H, XS), (W * 0.3, H + 1.0, XS * 0.7)


class Case(NamedTuple):
    """A kind, the step that it needs, and where the derivative ends."""

    kind: lx.Kind | Make
    step: Step = PLAIN
    cut: Cut = Cut()

    @property
    def derivative(self) -> lx.Truncated | None:
        return lx.Truncated(*self.cut) if any(self.cut) else None


def taped(**options: Any) -> Make:
    return lambda inverse, record: lx.Reversible(inverse, record=record, **options)


KINDS = {
    "Checkpointed": Case(lx.Checkpointed()),
    "slots": Case(lx.Checkpointed(3)),
    "Bounded": Case(lx.Bounded()),
    "Residuals": Case(lx.Residuals()),
    "inverse": Case(lambda inverse, _: Reversible(inverse), HALVES),
    "Reversible": Case(lambda inverse, _: lx.Reversible(inverse, checkpoints=3, rtol=1e-9), HALVES),
    "tape": Case(taped(rtol=1e-9), LOSSY),
    "tape in parts": Case(taped(checkpoints=2), LOSSY),
    "last": Case(lx.Auto(), cut=Cut(last=3)),
    "window": Case(lx.Bounded(), cut=Cut(window=4)),
    "last of a tape": Case(taped(), LOSSY, Cut(last=4)),
    "window of a tape": Case(taped(), LOSSY, Cut(window=3)),
}
WITHOUT_A_BOUND = ("Checkpointed", "slots", "inverse", "last")
BOUNDED = {name: make for name, (make, _) in LOOPS.items()} | {"rollout": rollout_program}
ALL_LOOPS = BOUNDED | UNBOUNDED


def program(loop: str, kind: str, lanes: Any = "lockstep") -> Program:
    case = KINDS[kind]
    return ALL_LOOPS[loop](case.kind, step=case.step, lanes=lanes, derivative=case.derivative)


# ---- values and gradients, of every number of steps

# A block has 4 steps: none, one, within, at and around the ends of blocks, and at the bound.
COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, BOUND]
EACH_LOOP = [(loop, kind) for kind in KINDS for loop in BOUNDED]
EACH_LOOP += [(loop, kind) for kind in WITHOUT_A_BOUND for loop in UNBOUNDED]
IN_FULL = ("Checkpointed", "slots", "Bounded", "Residuals")


@ft.cache
def reference(step: Step, cut: Cut) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(partial(steps_taken, step=step, cut=cut), (1, 2, 3)))


def few(loop: str, kind: str) -> Any:
    """Of the kinds with an inverse or another derivative, every third loop is in the fast part."""
    number = list(ALL_LOOPS).index(loop) + list(KINDS).index(kind)
    return pytest.param(loop, kind, marks=() if kind in IN_FULL or number % 3 == 0 else slow)


@pytest.mark.parametrize(("loop", "kind"), [few(*case) for case in EACH_LOOP])
def test_values_and_gradients(loop: str, kind: str) -> None:
    found = jax.jit(jax.value_and_grad(program(loop, kind), ALL))
    expected = reference(KINDS[kind].step, KINDS[kind].cut)
    for n in map(np.int64, COUNTS if loop != "unbounded stop" else COUNTS[1:]):
        assert_close(found(*ARGS, n), expected(FORMS[loop], *ARGS, n))


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_expected_is_what_python_loops_give(loop: str) -> None:
    for n in (0, 1, 6, BOUND):
        assert_close(reference(PLAIN, Cut())(FORMS[loop], *ARGS, np.int64(n)), expected_gradient(loop, n))


@pytest.mark.parametrize("kind", [*IN_FULL, "last"])
def test_lengths_that_are_static(kind: str) -> None:
    lengths = (0, 1, 6, BOUND)
    gradient = jax.value_and_grad(program("scan", kind), ALL)
    found = jax.jit(lambda *args: [gradient(*args, n) for n in lengths])(*ARGS)
    expected = reference(PLAIN, KINDS[kind].cut)
    assert_close(found, [expected(FORMS["scan"], *ARGS, np.int64(n)) for n in lengths])


OPTIONS = [("Checkpointed", {"unroll": 3}), ("slots", {"unroll": 2}), ("Bounded", {"unroll": 3})]
OPTIONS += [("Residuals", {"unroll": 16}), *((kind, {"max_steps": 6}) for kind in IN_FULL)]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_several_steps_at_a_time_and_a_bound_below_the_rows(kind: str, options: dict[str, int]) -> None:
    found = jax.jit(jax.value_and_grad(LOOPS["scan"][0](KINDS[kind].kind, **options), ALL))
    for n in map(np.int64, (0, 1, 4, 5, 6, *([BOUND] if "unroll" in options else []))):
        assert_close(found(*ARGS, n), reference(PLAIN, Cut())(FORMS["scan"], *ARGS, n))


# ---- transformations

# Five lanes: groups of two and three, so that a place is left over, and stages of five, three and two.
STARTS, LENGTHS = jnp.stack([H, -H, 0.5 * H, 2.0 * H, H - 0.1]), jnp.array([0, 3, BOUND, 1, 5])
WEIGHTS = np.array([1.0, -2.0, 0.5, 3.0, 1.5])
COMPACT = lx.Compact(min_lanes=2, shrink=2)
LANE = (None, 0, None, 0)


def in_lanes(f: Any) -> Any:
    """Lanes with starts and lengths of their own."""
    return lambda w, starts, xs: jax.vmap(f, LANE)(w, starts, xs, LENGTHS)


def total(f: Any, w: Any = W, starts: Any = STARTS, xs: Any = XS) -> Any:
    return WEIGHTS @ in_lanes(f)(w, starts, xs)


def jvp(f: Any, args: Any = ARGS, dots: Any = DOTS) -> Any:
    return jax.jvp(f, args, dots)[1]


def dot(tree: Any, other: Any) -> Any:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def transposed(linear: Any, like: Any, ct: Any) -> Any:
    return jax.linear_transpose(linear, *like)(ct)


def stacked_pullbacks(f: Any, n: Any) -> Any:
    """Loops that ran apart and are differentiated together have not saved before the same rows."""
    pullback = lambda args: jax.vjp(lambda h: f(W, h, XS, args[1]), args[0])[1]
    return jax.vmap(lambda pullback: pullback(1.0)[0])(lax.map(pullback, (STARTS, n - 3 + LENGTHS % 4)))


def third(f: Any) -> Any:
    return jax.grad(lambda h: jax.grad(lambda h: jax.grad(f)(h).sum())(h) @ h)(H)


# (a function of w, h and xs; one of h; the program) -> what is computed
COMPOSITIONS: dict[str, Callable[[Any, Any, Program, Any], Any]] = {
    "forward": lambda f, g, p, n: jax.jvp(f, ARGS, DOTS),
    "forward over forward": lambda f, g, p, n: jvp(lambda *args: jvp(f, args)),
    "forward over reverse": lambda f, g, p, n: jvp(jax.grad(f, ALL)),
    "reverse over forward": lambda f, g, p, n: jax.grad(lambda *args: jvp(f, args), ALL)(*ARGS),
    "reverse over reverse": lambda f, g, p, n: jax.grad(lambda *args: dot(jax.grad(f, ALL)(*args), DOTS), ALL)(*ARGS),
    "third": lambda f, g, p, n: third(g),
    "hessian": lambda f, g, p, n: jax.hessian(g)(H),
    "jacrev of jacrev": lambda f, g, p, n: jax.jacrev(jax.jacrev(g))(H),
    "linearize": lambda f, g, p, n: jax.linearize(f, *ARGS)[1](*DOTS),
    "vmap of linearize": lambda f, g, p, n: jax.vmap(jax.linearize(g, H)[1])(jnp.eye(3)),
    "transpose of linearize": lambda f, g, p, n: transposed(jax.linearize(f, *ARGS)[1], ARGS, 1.0),
    "transpose of a batch": lambda f, g, p, n: transposed(
        jax.vmap(jax.linearize(g, H)[1]), (STARTS,), jnp.asarray(WEIGHTS)
    ),
    "grad of linearize": lambda f, g, p, n: jax.grad(lambda h: jax.linearize(g, h)[1](jnp.cos(h)))(H),
    "linearize of grad": lambda f, g, p, n: jax.vmap(jax.linearize(jax.grad(g), H)[1])(jnp.eye(3)),
    "transpose of a linearized grad": lambda f, g, p, n: transposed(jax.linearize(jax.grad(g), H)[1], (H,), H),
    "vmap of a pullback": lambda f, g, p, n: jax.vmap(jax.vjp(f, *ARGS)[1])(jnp.arange(3.0)),
    "stacked pullbacks": lambda f, g, p, n: stacked_pullbacks(p, n),
    "checkpoint": lambda f, g, p, n: jax.grad(jax.checkpoint(f), ALL)(*ARGS),
    "checkpoint of products": lambda f, g, p, n: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), ALL
    )(*ARGS),
    "checkpoint of everything": lambda f, g, p, n: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable), ALL
    )(*ARGS),
    "hessian of checkpoint": lambda f, g, p, n: jax.hessian(jax.checkpoint(g))(H),
    "jacrev of jacrev of checkpoint": lambda f, g, p, n: jax.jacrev(jax.jacrev(jax.checkpoint(g)))(H),
    "grad of a checkpoint of grad": lambda f, g, p, n: jax.grad(jax.checkpoint(lambda h: jax.grad(g)(h) @ jnp.cos(h)))(
        H
    ),
    "in lax.scan": lambda f, g, p, n: jax.hessian(
        lambda h: lax.scan(lambda s, _: (H + jnp.sin(s * g(s)), None), h, None, length=2)[0].sum()
    )(H),
    "in lax.cond": lambda f, g, p, n: jax.vmap(jax.grad(lambda h: lax.cond(h[0] > 0, g, jnp.sum, h)))(STARTS),
    "in a loop": lambda f, g, p, n: jax.hessian(
        lambda h: lx.fori_loop(0, 2, lambda i, h: H + jnp.sin(h * g(h)), h, kind=lx.Checkpointed(1)).sum()
    )(H),
}
BATCHES: dict[str, Callable[[Any, Any, Program, Any], Any]] = {
    "vmap of grad": lambda f, g, p, n: in_lanes(jax.value_and_grad(p, ALL))(W, STARTS, XS),
    "grad of vmap": lambda f, g, p, n: jax.value_and_grad(partial(total, p), ALL)(W, STARTS, XS),
    "grad of vmap of one length": lambda f, g, p, n: jax.grad(
        lambda *args: WEIGHTS @ jax.vmap(f, (None, 0, None))(*args), ALL
    )(W, STARTS, XS),
    "jvp of vmap of grad": lambda f, g, p, n: jvp(in_lanes(jax.grad(p, 1)), (W, STARTS, XS), (DOTS[0], STARTS, XS)),
    "vmap of hessian": lambda f, g, p, n: in_lanes(jax.hessian(p, 1))(W, STARTS, XS),
    "vmap of jacrev of jacrev": lambda f, g, p, n: in_lanes(jax.jacrev(jax.jacrev(p, 1), 1))(W, STARTS, XS),
    "hessian of vmap": lambda f, g, p, n: jax.hessian(partial(total, p))(W),
    "grad of vmap of grad": lambda f, g, p, n: jax.grad(lambda s: mixed(in_lanes(jax.grad(p, 1))(W, s, XS)))(STARTS),
    "checkpoint of vmap": lambda f, g, p, n: jax.grad(jax.checkpoint(partial(total, p)), ALL)(W, STARTS, XS),
    "vmap of checkpoint": lambda f, g, p, n: in_lanes(jax.grad(jax.checkpoint(p), 1))(W, STARTS, XS),
    "linearize of vmap": lambda f, g, p, n: jax.linearize(in_lanes(p), W, STARTS, XS)[1](W, STARTS, XS),
    "two vmaps": lambda f, g, p, n: jax.vmap(in_lanes(jax.grad(p)), (0, None, None))(jnp.stack([W, -W]), STARTS, XS),
    "grad of two vmaps": lambda f, g, p, n: jax.grad(lambda ws: jax.vmap(partial(total, p))(ws).sum())(
        jnp.stack([W, -W])
    ),
    "no lanes": lambda f, g, p, n: jax.vmap(jax.grad(p), LANE)(W, STARTS[:0], XS, LENGTHS[:0]),
    "one lane": lambda f, g, p, n: jax.vmap(jax.grad(p), LANE)(W, STARTS[2:3], XS, LENGTHS[2:3]),
    "lanes in lax.scan": lambda f, g, p, n: jax.hessian(
        lambda h: lax.scan(
            lambda s, _: (jnp.sin(s * in_lanes(p)(W, STARTS * s, XS).sum()), None), h[0], None, length=2
        )[0]
    )(H),
}
SCALES = (1.0, -1.0, 0.5, 2.0, 0.1)
STACKED = {
    "w": jnp.stack([s * W for s in SCALES]),
    "h": STARTS,
    "xs": jnp.stack([s * XS for s in SCALES]),
    "n": LENGTHS,
}


def with_lanes_of(order: str, *names: str) -> Callable[[Any, Any, Program, Any], Any]:
    """Operands that lanes have of their own, in both orders of `vmap` and `grad`."""

    def run(f: Any, g: Any, p: Program, n: Any) -> Any:
        given = {"w": W, "h": H, "xs": XS, "n": n} | {name: STACKED[name] for name in names}
        axes = tuple(0 if name in names else None for name in given)
        if order == "vmap of grad":
            return jax.vmap(jax.value_and_grad(p, ALL), axes)(*given.values())
        *args, n = given.values()
        return jax.grad(lambda *args: WEIGHTS @ jax.vmap(p, axes)(*args, n), ALL)(*args)

    return run


BATCHES |= {
    f"{order} by {' and '.join(names)}": with_lanes_of(order, *names)
    for order in ("vmap of grad", "grad of vmap")
    for names in (["w"], ["xs"], ["n"], ["w", "h", "xs", "n"])
}
EVERY = COMPOSITIONS | BATCHES
LONG = ("hessian of vmap", "vmap of jacrev of jacrev", "grad of vmap of grad", "lanes in lax.scan", "third")


def computed(composition: str, p: Program, n: Any) -> Any:
    f = lambda w, h, xs: p(w, h, xs, n)
    return EVERY[composition](f, lambda h: f(W, h, XS), p, n)


@ft.cache
def expected(composition: str, loop: str, step: Step, cut: Cut) -> Any:
    of_form = of_all_forms(composition, step, cut)
    return of_form(FORMS[loop], np.int64(6))


@ft.cache
def of_all_forms(composition: str, step: Step, cut: Cut) -> Any:
    """One program for all loops."""
    return jax.jit(lambda form, n: computed(composition, partial(steps_taken, form, step=step, cut=cut), n))


def cases() -> Any:
    """Each transformation with two of the four kinds, of which one is in the fast part, and with two of the others.

    Loops take turns, and so do other lanes, which are in the fast part for every fourth transformation.
    """
    for i, composition in enumerate(EVERY):
        for k, kind in enumerate(KINDS):
            loops = list(ALL_LOOPS if kind in WITHOUT_A_BOUND else BOUNDED)
            loops = loops[:-1] if composition in BATCHES and kind in WITHOUT_A_BOUND else loops
            loop, of_four = loops[(i + 3 * k) % len(loops)], k < len(IN_FULL)
            if (i + k) % (2 if of_four else 4) == 0:
                fast = (i + k) % (4 if of_four else 16) == 0
                yield pytest.param(composition, loop, kind, "lockstep", marks=() if fast else slow)
            if composition in BATCHES and k in (i % 4, 4 + i % 8):
                lanes = "sequential" if of_four and i % 2 else "compact"
                fast = of_four and i % 4 < 2 and composition not in LONG
                yield pytest.param(composition, loop, kind, lanes, marks=() if fast else slow)
    # Lanes that a condition stops are walked back over their own steps: what is checked there is seen nowhere else.
    yield "grad of vmap", "while", "Reversible", "lockstep"
    yield "grad of vmap", "while", "tape", "lockstep"
    yield "vmap of grad", "reverse_stop", "Reversible", "lockstep"


@pytest.mark.parametrize(("composition", "loop", "kind", "lanes"), list(cases()))
def test_compositions(composition: str, loop: str, kind: str, lanes: Any) -> None:
    run = program(loop, kind, COMPACT if lanes == "compact" else lanes)
    found = jax.jit(lambda n: computed(composition, run, n))(np.int64(6))
    assert_close(found, expected(composition, loop, KINDS[kind].step, KINDS[kind].cut))


# ---- without a compiler

EAGER = [*zip(LOOPS, [*IN_FULL, "Reversible", "tape"], strict=True), ("scan", "last")]


@pytest.mark.parametrize(("loop", "kind"), EAGER)
def test_without_jit(loop: str, kind: str) -> None:
    found = jax.value_and_grad(program(loop, kind), ALL)(*ARGS, 6)
    assert_close(found, reference(KINDS[kind].step, KINDS[kind].cut)(FORMS[loop], *ARGS, np.int64(6)))


OPERATIONS = [("while", "slots"), ("fori", "Bounded"), ("scan", "Residuals")]
OPERATIONS += [("scan", "Checkpointed"), ("unbounded while", "slots"), ("unbounded fori", "slots"), ("scan", "inverse")]


@pytest.mark.parametrize(
    ("loop", "kind"), [pytest.param(*case, marks=slow if i > 2 else ()) for i, case in enumerate(OPERATIONS)]
)
def test_operation_by_operation(loop: str, kind: str) -> None:
    found = op_by_op(jax.value_and_grad(program(loop, kind), ALL))(*ARGS, np.int64(3))
    assert_close(found, reference(KINDS[kind].step, KINDS[kind].cut)(FORMS[loop], *ARGS, np.int64(3)))


# ---- rows that a loop pushes to a window or appends to a buffer, against arrays in the carry; branches


def next_row(w: Any, oldest: Any, middle: Any, newest: Any, x: Any) -> Any:
    return jnp.sin(w @ oldest) + 0.5 * jnp.sin(newest * middle) + x


def with_history(options: Any, w: Any, h: Any, xs: Any, n: Any) -> Any:
    body = lambda i, window: window.push(next_row(w, window[0], window[1], window[-1], xs[i]))
    window = lx.fori_loop(0, n, body, lx.History(3, xs[:3] * h[None]), max_steps=BOUND, **options)
    return mixed((window.rows, window[-2]))


def with_shifted_array(w: Any, h: Any, xs: Any, n: Any) -> Any:
    def step(i: Any, rows: Any) -> Any:
        return jnp.concatenate([rows[1:], next_row(w, rows[0], rows[1], rows[2], xs[i])[None]])

    rows = masked(step, xs[:3] * h[None], n)
    return mixed((rows, rows[1]))


def with_buffer(options: Any, w: Any, h: Any, xs: Any, n: Any) -> Any:
    """Appends every third state, and reads the first and the last row."""

    def body(i: Any, c: Any) -> Any:
        buffer, h = c
        h = next_row(w, buffer[0], h, buffer[-1], xs[i])
        return buffer.append(h, when=i % 3 == 0), h

    buffer, h = lx.fori_loop(0, n, body, (lx.Buffer(6, like=h).append(h), h), max_steps=BOUND, **options)
    return mixed((buffer.rows, h))


def with_array_and_count(w: Any, h: Any, xs: Any, n: Any) -> Any:
    def step(i: Any, c: Any) -> Any:
        rows, count, h = c
        h = next_row(w, rows[0], h, rows[count - 1], xs[i])
        appended = rows.at[count].set(h), count + 1
        return *jax.tree.map(lambda new, old: jnp.where(i % 3 == 0, new, old), appended, (rows, count)), h

    rows, _, h = masked(step, (jnp.zeros((6, 3)).at[0].set(h), jnp.int64(1), h), n)
    return mixed((rows, h))


def masked(step: Any, carry: Any, n: Any) -> Any:
    keep = lambda i, new, old: jax.tree.map(lambda a, b: jnp.where(i < n, a, b), new, old)
    return lax.scan(lambda c, i: (keep(i, step(i, c), c), None), carry, jnp.arange(BOUND))[0]


def with_switch(options: Any, w: Any, h: Any, xs: Any, n: Any) -> Any:
    branches = [
        lambda x: jnp.tanh(w @ x),
        lambda x: lx.fori_loop(0, 2, lambda _, x: jnp.sin(w @ x) + x, x, kind=options["kind"]),
        lambda x: lax.scan(lambda x, _: (x * jnp.cos(x), None), x, None, length=3)[0],
    ]
    return mixed(lx.switch(n // 2 - 1, branches, h, lanes=options["lanes"]))


def with_switch_of_lax(w: Any, h: Any, xs: Any, n: Any) -> Any:
    twice = lambda x: jnp.sin(w @ (jnp.sin(w @ x) + x)) + jnp.sin(w @ x) + x
    thrice = lambda x: lax.scan(lambda x, _: (x * jnp.cos(x), None), x, None, length=3)[0]
    return mixed(lax.switch(n // 2 - 1, [lambda x: jnp.tanh(w @ x), twice, thrice], h))


OTHERS = {
    "shifted": (with_history, with_shifted_array),
    "ring": (with_history, with_shifted_array),
    "buffer": (with_buffer, with_array_and_count),
    "switch": (with_switch, with_switch_of_lax),
}
OF_OTHERS = ["forward", "forward over reverse", "reverse over reverse", "vmap of grad", "grad of vmap"]
OF_OTHERS += ["grad of vmap of one length", "vmap of hessian", "checkpoint", "linearize", "reverse over forward"]
OF_OTHERS += ["in lax.scan", "in a loop", "two vmaps", "forward over forward"]


def cases_of_others() -> Any:
    """Each with two kinds, and with one in the fast part, where a shifted window is an array as any other."""
    for i, composition in enumerate(OF_OTHERS):
        for o, other in enumerate(OTHERS):
            for k, kind in enumerate(IN_FULL):
                lanes = "compact" if composition in BATCHES and (i + k // 2) % 2 else "lockstep"
                if (i + k + o) % 2 == 0:
                    fast = (i + k + o) % 4 == 0 and other != "shifted" and (i < 8 or other == "switch")
                    yield pytest.param(composition, other, kind, lanes, marks=() if fast else slow)


@ft.cache
def expected_of_others(composition: str, other: str) -> Any:
    return jax.jit(lambda n: computed(composition, OTHERS[other][1], n))(np.int64(6))


@pytest.mark.parametrize(("composition", "other", "kind", "lanes"), list(cases_of_others()))
def test_rows_that_loops_write_and_branches(
    composition: str, other: str, kind: str, lanes: Any, monkeypatch: Any
) -> None:
    if other == "ring":  # small windows are shifted
        monkeypatch.setattr(history, "RING_BYTES", 0)
    case, lanes = KINDS[kind], COMPACT if lanes == "compact" else lanes
    options = {"kind": case.kind, "derivative": case.derivative, "lanes": lanes}
    found = jax.jit(lambda n: computed(composition, partial(OTHERS[other][0], options), n))(np.int64(6))
    assert_close(found, expected_of_others(composition, other))
