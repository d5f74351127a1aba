"""What the error of a run-time check says: the call, its line and function, the problem; first, where that can be."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.frontend.raising import Line
from tests.support.limited_loops import RUN_TIME, eagerly

HERE = str(Line(__file__, 1, "")).split(":")[0]
STOPPED = "max_steps=3 stopped a loop that would have gone on"


def goes_on(x: Any) -> Any:
    return x < 100


def increment(x: Any) -> Any:
    return x + 1


def solve(x: Any) -> Any:
    return lx.while_loop(goes_on, increment, x, max_steps=3)


def solve_otherwise(x: Any) -> Any:
    """The same functions and bound: a step is traced once for both."""
    return lx.while_loop(goes_on, increment, x, max_steps=3)


def message(f: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(RUN_TIME) as raised:
        jax.block_until_ready(f(*arguments))
    return str(raised.value)


def line_of(f: Any, text: str = "lx.") -> int:
    lines, first = inspect.getsourcelines(f)
    return first + next(i for i, line in enumerate(lines) if text in line)


def at(f: Any) -> str:
    return f"at {HERE}:{line_of(f)} ({f.__name__}): "


# ---- under which transformation


@pytest.mark.parametrize("how", [lambda f: f, jax.vmap, jax.hessian, "without jit"])
def test_outside_of_jit_the_message_begins_with_the_call(how: Any) -> None:
    x = 0.0 if how is not jax.vmap else jnp.zeros(2)
    run = solve if how == "without jit" else how(solve)
    with jax.disable_jit(how == "without jit"), pytest.raises(eqx.EquinoxRuntimeError) as raised:
        run(x)
    assert str(raised.value).startswith(f"loopax.while_loop {at(solve)}{STOPPED}")


def test_under_filter_jit_each_caller_has_its_own_message_and_stack() -> None:
    def first(x: Any) -> Any:
        return solve(x)

    def second(x: Any) -> Any:
        return solve_otherwise(x)

    for caller, f in ((first, solve), (second, solve_otherwise)):
        text = message(eqx.filter_jit(caller), 0.0)
        assert f"EquinoxRuntimeError: loopax.while_loop {at(f)}{STOPPED}" in text
        assert re.findall(r"in .*\b(first|second|solve|solve_otherwise)\n", text) == [caller.__name__, f.__name__]


def test_lines_are_no_part_of_the_program() -> None:
    """A stored run of `durable` is recognised by the text of its program, and goes on after a line has been added."""
    first, second = (re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(f)(0.0))) for f in (solve, solve_otherwise))
    assert "callback" in first
    assert first == second


# ---- where in a batch


def rows(n: Any, **options: Any) -> Any:
    return lx.scan(lambda c, x: (c + x, None), 0.0, jnp.arange(3.0), n, **options)[0]


IN_A_BATCH: Any = {
    "vmap": (jax.vmap(rows), [1, 7, -2], " (7)", "1"),
    "vmap(vmap)": (jax.jit(jax.vmap(jax.vmap(rows))), [[1, 2, 0], [3, 2, 9]], " (9)", "(1, 2)"),
    "compact": (jax.vmap(lambda n: rows(n, lanes="compact")), [1, 7], " (7)", "1"),
    "in a loop": (jax.vmap(lambda n: lx.fori_loop(0, 2, lambda i, c: c + rows(n + i), 0.0)), [1, 7], " (7)", "1"),
    "lanes_map": (lambda n: lx.lanes_map(rows, n, num_lanes=2), [1, 2, 3, 7, 1], " (7)", "3"),
}


@pytest.mark.parametrize("case", IN_A_BATCH)
def test_a_batch_says_which_lane_failed_first_and_with_which_number(case: str) -> None:
    f, lengths, value, place = IN_A_BATCH[case]
    text = message(f, jnp.array(lengths))
    assert f"`length`{value} is negative, or more than there is (xs has 3 rows)." in text
    assert text.endswith(f"take what there is. First at index {place} of the batch.")


class Solver(eqx.Module):
    """Equinox wraps methods in functions of its own."""

    def __call__(self, x: Any) -> Any:
        return lx.while_loop(goes_on, increment, x, max_steps=3)


def append(i: Any, buffer: Any) -> Any:
    return buffer.append(i)


A_LAMBDA = "<lambda>"
FULL, TOO_LONG = "the buffer has room for 3 rows", "`length` (4) is negative"
# Functions of a number, of which 4 is too large.
CALLS: Any = {
    "loopax.fori_loop": (
        lambda n: lx.fori_loop(0, n, lambda _, x: x + 1, 0, max_steps=3),
        A_LAMBDA,
        "max_steps=3 stopped",
    ),
    "loopax.scan": (lambda n: lx.scan(lambda c, _: (c + 1, c), 0, jnp.arange(3), n), A_LAMBDA, TOO_LONG),
    "loopax.rollout": (
        lambda n: lx.rollout(lambda s: (s + 1, s), 0, n, max_steps=3).outputs,
        A_LAMBDA,
        "max_steps=3 stopped",
    ),
    "loopax.Buffer.append": (lambda n: lx.fori_loop(0, n, append, lx.Buffer(3, like=0)).count, "append", FULL),
    "loopax.Buffer[index]": (lambda n: lx.Buffer(3, like=0)[n], A_LAMBDA, "there is no such row (4) yet"),
    "loopax.History[index]": (lambda n: lx.History(3, like=0)[n], A_LAMBDA, "there are 3 rows"),
    "loopax.while_loop": (Solver(), "Solver.__call__", STOPPED),
    "loopax.while_loop (of rewrite_loops)": (
        lx.rewrite_loops(lambda x: jax.lax.while_loop(goes_on, increment, x), max_steps=3),
        A_LAMBDA,
        "max_steps=3 s",
    ),
    "loopax.stochtrace.estimate_trace": (
        lambda n: lx.stochtrace.estimate_trace(jnp.eye(3), jax.random.key(0), num_matvecs=n, max_matvecs=3),
        A_LAMBDA,
        "num_matvecs (4) is less than 1",
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("jit", [eqx.filter_jit, eagerly])
def test_the_call_and_its_line(name: str, jit: Any) -> None:
    f, function, problem = CALLS[name]
    if jit is eagerly:
        f = jax.vmap(f)  # for what is static outside of `jit`
    text = message(jit(f), jnp.array([4]) if jit is eagerly else jnp.int64(4))
    place = rf"{re.escape(HERE)}:\d+ \({re.escape(function)}\): "
    assert re.search(
        rf"(^|EquinoxRuntimeError: ){re.escape(name.partition(' ')[0])} at {place}{re.escape(problem)}", text
    )


# ---- of kinds, where a derivative is taken: it fails for x = 2


def reversible(x: Any) -> Any:
    return lx.fori_loop(0, 3, lambda i, y: 2 * y, x, kind=lx.Reversible(lambda i, y: y / jnp.where(y > 2, 3, 2)))


def drifted(x: Any) -> Any:
    inverse = lambda i, y: jnp.sqrt(y) * jnp.where(y > 8, 1.1, 1)
    return lx.fori_loop(0, 3, lambda i, y: y * y, x, kind=lx.Reversible(inverse, rtol=1e-4))


def contract(x: Any, z: Any) -> Any:
    return jnp.where(x > 1, 0.5, 0.0) * z + x


def ended_before(x: Any) -> Any:
    return lx.fori_loop(0, 3, lambda i, z: contract(x, z), x, derivative=lx.Implicit())


def unsolved(x: Any) -> Any:
    return lx.fori_loop(0, 20, lambda i, z: contract(x, z), x, derivative=lx.Implicit(lambda matvec, b: b))


def diverged(x: Any) -> Any:
    residual = lambda z: (z, jnp.where(z > 1, 3, 1) * (z - x))
    return lx.fori_loop(0, 3, lambda i, z: x, x, derivative=lx.Implicit(fixed_point=residual))


OF_KINDS: Any = {
    reversible: r"the inverse of kind=Reversible\(\) does not undo the first step \(0.167\).*Give what a step loses",
    drifted: r"on the way back of kind=Reversible\(\), .* beyond rtol=0.0001 \(0.000579\). Give checkpoints=",
    ended_before: r"derivative=Implicit\(\) .* ended before \(0.0333\).*Take more steps",
    unsolved: r"derivative=Implicit\(\) solves .* by a function .* \(0.5\).*more steps",
    diverged: r"derivative=Implicit\(\) solves .* did not converge .* \((inf|nan)\).*another solver",
}
EACH_OF_KINDS = pytest.mark.parametrize("f", OF_KINDS, ids=lambda f: f.__name__)


@EACH_OF_KINDS
def test_the_line_of_a_loop_whose_derivative_fails(f: Any) -> None:
    """Also where the derivative is taken elsewhere than the loop is called."""
    pattern = f"loopax.fori_loop {re.escape(at(f))}{OF_KINDS[f]}"
    for how in (jax.grad(f), eqx.filter_jit(jax.grad(f)), jax.grad(jax.jit(f))):
        assert re.search(pattern, message(how, 2.0))
        assert jnp.isfinite(how(0.5))
    assert f"line {line_of(f)}, in {f.__name__}" in message(jax.jit(jax.grad(f)), 2.0)


@EACH_OF_KINDS
def test_the_lane_whose_derivative_fails(f: Any) -> None:
    xs, of_batch = jnp.array([0.5, 0.25, 2.0, 0.5]), jax.jit(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))
    lane = "" if f is drifted else r".*First at index 2 of the batch\."  # its drift is that of all lanes
    assert re.search(OF_KINDS[f] + lane, message(of_batch, xs))
    of_two = message(jax.vmap(jax.vmap(jax.grad(f))), jnp.stack([0.1 * xs, xs]))
    assert re.search(OF_KINDS[f] + r".*First at index \(1, 2\) of the batch\.", of_two)
