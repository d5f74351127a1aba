"""`Truncated` against Python loops with `jax.lax.stop_gradient`, in both modes, and what it evaluates and stores."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import loopax as lx
from loopax import Truncated
from tests.support.compiled import temporary as temporary_bytes
from tests.support.counted import counting, evaluations
from tests.support.problem import BOUND, XS, H, Program, W, mixed, scan_step
from tests.support.reference import assert_close

ALL = (0, 1, 2)
OPTIONS: list[dict[str, Any]] = [
    {"last": 1},
    {"last": 7},
    {"last": BOUND + 5},
    {"window": 1},
    {"window": 4},
    {"window": BOUND + 5},
]


def small(c: Any, y: Any) -> Array:
    return c[0].sum() < -0.4


def program(kind: lx.Kind, **options: Any) -> Program:
    def run(w: Array, h: Array, xs: Array, n: Any) -> Array:
        (h, _), ys = lx.scan(scan_step(w), (h, 0), xs, length=n, kind=kind, **options)
        return mixed((h, ys))

    return run


def by_python(
    last: int | None = None, window: int = 1, reverse: bool = False, stop: Any = None
) -> Callable[..., Array]:
    """The same as a Python loop; its number of steps is known."""

    def run(w: Array, h: Array, xs: Array, n: int) -> Array:
        rows = list(range(n))[:: -1 if reverse else 1]
        total = steps_taken(w, h, xs, rows, stop)
        carry, ys = (h, 0), [jax.tree.map(jnp.zeros_like, scan_step(w)((h, 0), xs[0])[1])] * BOUND
        for number, row in enumerate(rows[:total]):
            hold = lax.stop_gradient
            if last is not None and number < total - last:
                carry, ys[row] = hold(scan_step(hold(w))(hold(carry), hold(xs[row])))
                continue
            cut = number == total - last and number > 0 if last is not None else number > 0 and number % window == 0
            carry, ys[row] = scan_step(w)(hold(carry) if cut else carry, xs[row])
        return mixed((carry[0], jax.tree.map(lambda *y: jnp.stack(y), *ys)))

    return run


def steps_taken(w: Array, h: Array, xs: Array, rows: list[int], stop: Any) -> int:
    carry = (h, 0)
    for number, row in enumerate(rows):
        carry, y = scan_step(w)(carry, xs[row])
        if stop is not None and stop(carry, y):
            return number + 1
    return len(rows)


FORMS = [
    pytest.param({"reverse": True, "stop": small}, id="reverse and stop"),
    pytest.param({}, id="scan", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_scans(options: dict[str, Any], form: dict[str, Any]) -> None:
    found = jax.jit(jax.value_and_grad(program(Truncated(**options), **form), ALL))
    for n in (0, 1, BOUND):
        expected = jax.value_and_grad(by_python(**options, **form), ALL)(W, H, XS, n)
        assert_close(found(W, H, XS, n), expected)
    static = jax.jit(jax.value_and_grad(lambda *args: program(Truncated(**options), **form)(*args, 6), ALL))
    assert_close(static(W, H, XS), jax.value_and_grad(by_python(**options, **form), ALL)(W, H, XS, 6))


MODES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda f: jax.jacfwd(f, 0),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 0),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f, 1), 0),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, 1), 0),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, 1), 0),
}
FAST_MODES = {"forward"}


@pytest.mark.parametrize("options", [{"last": 3}, {"window": 4}], ids=str)
@pytest.mark.parametrize("mode", [m if m in FAST_MODES else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_modes(options: dict[str, Any], mode: str) -> None:
    for form in ({}, {"reverse": True}):
        found = jax.jit(MODES[mode](program(Truncated(**options), **form)))(W, H, XS, 6)
        assert_close(
            found, MODES[mode](lambda w, h, xs, form=form: by_python(**options, **form)(w, h, xs, 6))(W, H, XS)
        )


LENGTHS = [0, 3, BOUND]
STARTS = jnp.stack([H, -H, 0.5 * H])


@pytest.mark.parametrize("options", [{"last": 3}, {"window": 4}], ids=str)
@pytest.mark.parametrize("lanes", ["lockstep", lx.Compact(min_lanes=1, shrink=2)], ids=str)
def test_lanes_with_lengths_of_their_own(options: dict[str, Any], lanes: Any) -> None:
    kind = Truncated(**options, kind=lx.Bounded())
    of_batch = jax.vmap(program(kind, lanes=lanes), (None, 0, None, 0))
    found = jax.jit(jax.grad(lambda w, h: of_batch(w, h, XS, jnp.array(LENGTHS)).sum(), (0, 1)))(W, STARTS)
    each = [jax.grad(by_python(**options), (0, 1))(W, start, XS, n) for start, n in zip(STARTS, LENGTHS, strict=True)]
    assert_close(found, (sum(w for w, _ in each), jnp.stack([h for _, h in each])))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("transform", [jax.jit, pytest.param(jax.checkpoint, marks=pytest.mark.slow)])
def test_lanes_of_a_program_that_has_been_traced(transform: Any, reverse: bool) -> None:
    """JAX takes a rule for lanes where the function has them. There are as many lanes as rows: shapes are the same."""
    lengths, weights = jnp.array([0, 4, 1, 3]), jnp.arange(16.0).reshape(4, 4)
    step = lambda c, x: ((new := jnp.sin(c * x)), new)

    def loss(h: Array, length: Any, weights: Array) -> Array:
        return (lx.scan(step, h, XS[:4, 0], length=length, reverse=reverse, kind=Truncated(last=2))[1] * weights).sum()

    args = jnp.arange(1.0, 5.0), lengths, weights
    of_batch = lambda f: jax.jit(jax.grad(lambda h: jax.vmap(f)(h, *args[1:]).sum()))(args[0])
    each = jnp.stack([jax.grad(loss)(*lane) for lane in zip(*args, strict=True)])
    assert_close(of_batch(transform(loss)), each)


@pytest.mark.parametrize("options", [{"last": 3}, {"window": 4}], ids=str)
@pytest.mark.parametrize("is_static", [True, False])
def test_indices_and_keys_are_those_of_the_loop(options: dict[str, Any], is_static: bool) -> None:
    """A `fori_loop` and a reversed `scan` with keys, against scans of the numbers that they read."""
    kind, key, n = Truncated(**options), jax.random.key(0), 9
    numbers = jnp.arange(2.0, n + 2)
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(n))

    def scan(a: Array, xs: Array, reverse: bool) -> Array:
        return lx.scan(lambda h, x: (jnp.sin(a * x * h), None), 0.3, xs, kind=kind, reverse=reverse)[0]

    def by_index(a: Array, n: Any) -> Array:
        body = lambda i, h: jnp.sin(a * i * h)
        return lx.fori_loop(2, n + 2, body, 0.3, max_steps=9 if is_static else 12, kind=kind)

    def by_key(a: Array, n: Any) -> Array:
        body = lambda h, _, *, key: (jnp.sin(a * jax.random.normal(key) * h), None)
        bound = None if is_static else 12
        return lx.scan(body, 0.3, length=n, max_steps=bound, reverse=True, key=key, kind=kind)[0]

    length = n if is_static else jnp.int32(n)
    assert_close(jax.value_and_grad(by_index)(0.9, length), jax.value_and_grad(scan)(0.9, numbers, False))
    assert_close(jax.value_and_grad(by_key)(0.9, length), jax.value_and_grad(scan)(0.9, noise, True))


def test_while_loops_without_a_bound() -> None:
    def value(w: Array, kind: Any) -> Array:
        body = lambda c: (jnp.tanh(w @ c[0] + 0.1), c[1] + 1)
        return mixed(lx.while_loop(lambda c: c[1] < 9, body, (H, 0), kind=kind)[0])

    for options in ({"last": 3}, {"window": 4}):
        kept = 3 if "last" in options else 1
        held = lx.fori_loop(0, 9 - kept, lambda i, h: jnp.tanh(W @ h + 0.1), H)

        def rest(w: Array, held: Array = held, kept: int = kept) -> Array:
            return mixed(lx.fori_loop(0, kept, lambda i, h: jnp.tanh(w @ h + 0.1), held))

        assert_close(jax.jit(jax.grad(lambda w, o=options: value(w, Truncated(**o))))(W), jax.grad(rest)(W))


def test_inside_a_loop_whose_gradient_is_taken() -> None:
    def value(w: Array, inner: Callable[[Array, Array], Array]) -> Array:
        return lx.fori_loop(0, 3, lambda i, h: inner(w, h), H, kind=lx.Bounded()).sum()

    def truncated(w: Array, h: Array) -> Array:
        return lx.scan(lambda c, x: (jnp.tanh(w @ c + x), None), h, XS, length=jnp.int32(5), kind=Truncated(last=2))[0]

    def expected(w: Array, h: Array) -> Array:
        held = lax.stop_gradient(lax.scan(lambda c, x: (jnp.tanh(w @ c + x), None), h, XS[:3])[0])
        return lax.scan(lambda c, x: (jnp.tanh(w @ c + x), None), held, XS[3:5])[0]

    assert_close(jax.jit(jax.grad(lambda w: value(w, truncated)))(W), jax.grad(lambda w: value(w, expected))(W))


class TestCosts:
    @pytest.mark.parametrize(("is_static", "expected"), [(True, 20), (False, 20 + 5)])
    def test_steps_are_evaluated(self, is_static: bool, expected: int) -> None:
        """The last five once more where the length is known only when the loop runs."""

        def gradient(count: Callable[[], None], n: Any) -> Any:
            def body(h: Array, x: Array) -> Any:
                return jnp.tanh(W @ counting(count, h) + x), None

            xs = jnp.zeros((20, 3))
            return jax.grad(lambda h: lx.scan(body, h, xs, length=n, kind=Truncated(last=5))[0].sum())(H)

        assert evaluations(gradient, None if is_static else jnp.int32(20)) == expected

    def test_a_value_alone_costs_nothing_more(self) -> None:
        def value(count: Callable[[], None]) -> Any:
            def body(h: Array) -> Any:
                return counting(count, h) + 1

            return lx.while_loop(lambda h: h.sum() < 20, body, jnp.zeros(2), kind=Truncated(last=5))

        assert evaluations(value) == 10

    @pytest.mark.parametrize("is_static", [True, False])
    def test_memory_is_that_of_the_last_steps(self, is_static: bool) -> None:
        def temporary(rows: int) -> int:
            def loss(w: Array, h: Array, n: Any) -> Array:
                body = lambda i, h: jnp.tanh(w @ h)
                return lx.fori_loop(0, rows if is_static else n, body, h, max_steps=rows, kind=Truncated(last=5)).sum()

            args = jnp.eye(64), jnp.ones(64), jnp.int32(rows)
            return temporary_bytes(jax.jit(jax.grad(loss)).lower(*args).compile())

        assert temporary(10_000) <= temporary(100) + 64

    def test_rows_before_the_last_steps_are_not_copied(self) -> None:
        def loss(xs: Array) -> Array:
            body = lambda h, x: ((h := jnp.tanh(h + x)), h)
            return (lx.scan(body, jnp.zeros(64), xs, kind=Truncated(last=5))[1] ** 2).sum()

        xs = jnp.ones((1000, 64))
        assert temporary_bytes(jax.jit(jax.grad(loss)).lower(xs).compile()) <= 0.2 * xs.nbytes


class TestBadInput:
    @pytest.mark.parametrize(("options", "got"), [({}, "neither of"), ({"last": 1, "window": 2}, "both")])
    def test_one_of_the_two(self, options: dict[str, Any], got: str) -> None:
        with pytest.raises(TypeError, match=rf"Truncated\(...\): got {got} last and window, expected one"):
            Truncated(**options)

    def test_at_least_one_step(self) -> None:
        with pytest.raises(ValueError, match=r"Truncated\(last=...\): got 0, expected at least 1"):
            Truncated(last=0)
        with pytest.raises(ValueError, match=r"Truncated\(window=...\): got -1, expected at least 1"):
            Truncated(window=-1)

    @pytest.mark.parametrize("kind", [lx.Implicit(), Truncated(last=1)], ids=repr)
    def test_a_kind_with_another_derivative(self, kind: lx.Kind) -> None:
        with pytest.raises(
            ValueError, match=r"Truncated\(kind=...\): got .*, whose derivative is not that of the steps"
        ):
            Truncated(last=2, kind=kind)

    def test_progress_of_windows(self) -> None:
        with pytest.raises(NotImplementedError, match="cannot show its progress"):
            lx.fori_loop(0, 9, lambda i, h: h, H, kind=Truncated(window=2), progress=True)

    def test_lanes_that_are_merged(self) -> None:
        with pytest.raises(NotImplementedError, match=r"fori_loop\(lanes='free'\) does not take kind=Truncated"):
            lx.fori_loop(0, 9, lambda i, h: h, H, kind=Truncated(last=2), lanes="free")
        with pytest.raises(NotImplementedError, match="does not take kind=Truncated"):
            lx.lanes_map(lambda h: lx.fori_loop(0, 9, lambda i, h: h * 2, h, kind=Truncated(last=2)), STARTS, lanes=2)


@pytest.mark.parametrize("kind", [lx.Truncated(last=2, kind="checkpointed"), lx.Implicit()])
def test_a_gradient_of_a_batch_whose_body_calls_a_custom_vjp(kind: lx.Kind) -> None:
    """JAX has no batch of such a derivative; alone there is one."""
    sine: Any = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    loop = lambda function, x, n: lx.fori_loop(0, 40 + n, lambda i, c: 0.5 * function(c) + x, x, kind=kind)
    assert_close(*(jax.jit(jax.grad(partial(loop, f)))(0.3, 3) for f in (sine, jnp.sin)))
    counts = jnp.array([1, 3])
    total = lambda function: jax.grad(lambda x: jax.vmap(partial(loop, function), (None, 0))(x, counts).sum())
    assert jnp.isfinite(total(jnp.sin)(0.3))
    with pytest.raises(TypeError, match="custom_vjp function") as raised:
        total(sine)(0.3)
    assert "Give the function a jax.custom_jvp" in raised.value.__notes__[0]
