"""What makes a program another one for a stored run, and what does not. Nothing is compiled here."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import core
from loopax._src.durable import equations
from loopax._src.durable.equations import fingerprint
from loopax._src.durable.wording import write
from loopax._src.frontend.checks import collecting
from loopax._src.jax_internals import Primitive, keep_bits_p

X = jnp.array([1.0, -0.5, 2.0])
TABLE = np.arange(3.0)
TWO = jnp.asarray(2.0)
LANES = jnp.arange(3, dtype=jnp.int32)


def text_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    closed = jax.make_jaxpr(function)(*(arguments or (X,)))
    return write(closed, [f"input {i}" for i in range(len(closed.in_avals))], {}, []).lines


def renamed(x: Any) -> Any:
    return jnp.sin(x) * 2.0


@jax.custom_jvp
def ruled(x: Any) -> Any:
    return jnp.sin(x) * 2.0


ruled.defjvp(lambda x, t: (ruled(x[0]), t[0]))


def shown(x: Any) -> Any:
    jax.debug.print("{x} {y}", x=x, y=x.sum())
    unused = jnp.cos(x)
    jax.debug.callback(lambda _: None, unused, ordered=True)
    return jnp.sin(x) * 2.0


def while_of(x: Any, **how: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 9, **how}
    return lx.while_loop(lambda x: x[0] < 4, lambda x: x + 1.0, x, **options)


def fori_of(x: Any, n: Any = 3, **how: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, **how)


def lanes_of(x: Any, **how: Any) -> Any:
    return jax.vmap(partial(fori_of, max_steps=4, **how))(x, LANES)


def showing(x: Any, show: Callable[[Any], Any]) -> Any:
    def body(_: Any, x: Any) -> Any:
        show(x)
        return jnp.sin(x)

    return jax.vmap(lambda x, n: lx.fori_loop(0, n, body, x, max_steps=4))(x, LANES)


def lax_scan_of(x: Any, **how: Any) -> Any:
    return jax.lax.scan(lambda c, y: (c + y, c), x, jnp.stack([x, x]), **how)


SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a name": (lambda x: jnp.sin(x) * 2.0, renamed),
    "jit": (renamed, jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2.0)),
    "checkpoint": (renamed, jax.checkpoint(renamed)),
    "a rule for derivatives": (renamed, ruled),
    "what is shown": (renamed, shown),
    "what lanes show": (lambda x: showing(x, lambda _: None), lambda x: showing(x, lambda x: jax.debug.print("{}", x))),
    "stop_gradient": (renamed, lambda x: jax.lax.stop_gradient(renamed(x))),
    "a device": (renamed, lambda x: jax.device_put(jax.lax.optimization_barrier((x, renamed(x)))[1])),
    "a Python number": (renamed, lambda x: jnp.sin(x) * np.float64(2.0)),
    "a scalar closed over": (renamed, lambda x: jnp.sin(x) * TWO),
    "how a loop is differentiated": (while_of, lambda x: while_of(x, kind="bounded")),
    "steps in an iteration": (fori_of, lambda x: fori_of(x, unroll=2)),
    "steps in an iteration of lax": (lax_scan_of, lambda x: lax_scan_of(x, unroll=2)),
    "a check": (while_of, lambda x: while_of(x, throw=False)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_what_changes_no_value_does_not_count(one: Any, other: Any) -> None:
    checks_apart = lambda f: lambda x: unchecked(f, x)
    assert text_of(checks_apart(one)) == text_of(checks_apart(other))


def unchecked(function: Callable[..., Any], x: Any) -> Any:
    """The results as a durable loop sees them: checks are handed over to it."""
    with collecting():
        return function(x)


OTHER: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "an operation": (jnp.sin, jnp.cos),
    "a number": (lambda x: x * 2.0, lambda x: x * 2.0000000000000004),
    "a type": (lambda x: x, lambda x: x.astype(jnp.float32).astype(float)),
    "an order": (lambda x: x - TABLE, lambda x: TABLE - x),
    "a result": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "an axis": (lambda x: jnp.outer(x, x).sum(0), lambda x: jnp.outer(x, x).sum(1)),
    "a bound": (while_of, lambda x: while_of(x, max_steps=8)),
    "a condition": (while_of, lambda x: lx.while_loop(lambda x: x[0] < 5, lambda x: x + 1.0, x, max_steps=9)),
    "a body": (fori_of, lambda x: lx.fori_loop(0, 3, lambda _, x: jnp.cos(x), x)),
    "a number of steps": (fori_of, lambda x: fori_of(x, 4)),
    "the direction of lax": (lax_scan_of, lambda x: lax_scan_of(x, reverse=True)),
    "the direction": (
        lambda x: lx.scan(lambda c, y: (c - y, c), x, jnp.stack([x, x])),
        lambda x: lx.scan(lambda c, y: (c - y, c), x, jnp.stack([x, x]), reverse=True),
    ),
    "a branch": (
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ),
    "a gradient": (jax.grad(lambda x: while_of(x).sum()), while_of),
    "lanes": (lambda x: jax.vmap(lambda n: fori_of(x, n, max_steps=4))(LANES), lambda x: lanes_of(x[:, None])),
    "compact lanes": (
        lambda x: lanes_of(x, lanes="compact"),
        lambda x: jax.vmap(lambda x, n: lx.fori_loop(0, n, lambda _, x: jnp.cos(x), x, max_steps=4, lanes="compact"))(
            x, LANES
        ),
    ),
    "a searched side": (
        lambda x: jnp.searchsorted(TABLE, x),
        lambda x: jnp.searchsorted(TABLE, x, side="right"),
    ),
}


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_changes_a_value_counts(one: Any, other: Any) -> None:
    assert text_of(one) != text_of(other)


def everything(x: Any) -> Any:
    """A program with every primitive that loopax has and a durable loop can meet."""
    kinds = (lx.Checkpointed(), lx.Checkpointed(2), "bounded", "residuals")
    outs = [jax.grad(partial(lambda kind, x: while_of(x, kind=kind).sum(), kind))(x) for kind in kinds]
    outs += [jax.hessian(lambda x: while_of(x).sum())(x), jax.linearize(while_of, x)[1](x)]
    for lanes in ("lockstep", "compact"):
        of_lane = partial(lambda how, x, n: fori_of(x, n, max_steps=4, lanes=how).sum(), lanes)
        outs.append(jax.vmap(jax.grad(of_lane))(x[:, None], LANES))
    return [*outs, jax.vmap(jax.grad(with_a_buffer))(x)]


def with_a_buffer(x: Any) -> Any:
    """Rows that are appended in a loop, and read there."""
    start = lx.Buffer(4, like=x).append(x)
    return lx.fori_loop(0, 3, lambda i, b: b.append(b[i] * 2.0), start).rows.sum()


def primitives() -> list[Primitive]:
    """Those of loopax."""
    found = {}
    for info in pkgutil.walk_packages(core.__path__, "loopax._src.core."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Primitive) and not value.name.startswith(("jit", "pjit")):
                found[id(value)] = value
    return list(found.values())


def test_the_text_does_not_depend_on_the_names_of_loopaxs_primitives(monkeypatch: Any) -> None:
    expected = text_of(everything)
    own = [
        p
        for p in primitives()
        if p in equations.OWN or p in (equations.retyped_p, equations.fill_inactive_p, keep_bits_p)
    ]
    assert {p.name for p in primitives()} == {p.name for p in own}  # each has a meaning
    for i, primitive in enumerate(own):
        monkeypatch.setattr(primitive, "name", f"renamed_{i}")
    assert text_of(everything) == expected
    assert not [line for line in expected if "renamed" in line]


# ---- callbacks


def helper(x: Any) -> Any:
    return x + 1.0


def calls_a_helper(x: Any) -> Any:
    return helper(x)


def of_code(source: str) -> Any:
    """A function of a module of this text."""
    scope: dict[str, Any] = {"__name__": "somewhere"}
    exec(source, scope)
    return scope["work"]


class Work:
    """An object with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self, x: Any) -> Any:
        return x * 2.0

    def method(self, x: Any) -> Any:
        return x * 3.0

    def applied(self, x: Any, how: Any) -> Any:
        return how(x)


def closing_over(value: Any, function: Any) -> Any:
    return lambda x: function(x) + value


def scaled(x: Any, scale: Any) -> Any:
    return x * scale


def code(function: Any) -> str:
    closed = jax.make_jaxpr(lambda x: jax.pure_callback(function, jax.ShapeDtypeStruct((3,), float), x))(X)
    return write(closed, ["x"], {}, []).callbacks["callback 0"]["code"]


def test_functions_with_the_same_code_are_the_same() -> None:
    plain = "def work(x): return help(x)\ndef help(x): return x + 1.0\n"
    moved = f"# a line above\n\n{plain}\nOTHER = 3\n"
    same = [
        (of_code(plain), of_code(moved)),
        (closing_over(1.0, helper), closing_over(2.0, helper)),  # a number of a file, say
        (Work(1), Work(2)),
        (Work(1).method, Work(2).method),
        (partial(scaled, scale=(1, np.float32(2))), partial(scaled, scale=(1, np.float32(2)))),
        (partial(scaled, scale=Work(1)), partial(scaled, scale=Work(2))),
    ]
    for one, other in same:
        assert code(one) == code(other) != ""
    other = [
        (of_code(plain), of_code(plain.replace("1.0", "1.5"))),  # what it calls
        (of_code(plain), of_code(plain.replace("help(x)\n", "-help(x)\n"))),
        (of_code("def work(x): return x.sin()"), of_code("def work(x): return x.cos()")),
        (closing_over(1.0, helper), closing_over(1.0, calls_a_helper)),
        (Work(1), Work(1).method),
        (partial(helper), partial(calls_a_helper)),
        (partial(scaled, scale=1.0), partial(scaled, scale=2.0)),
        (partial(scaled, scale=np.arange(3.0)), partial(scaled, scale=np.arange(3.0) + 1)),
        (of_code("def work(x, a=1): return x * a"), of_code("def work(x, a=2): return x * a")),
        (of_code("def work(x, *, a='b'): return x"), of_code("def work(x, *, a='c'): return x")),
        (partial(Work(1).applied, how=helper), partial(Work(1).applied, how=calls_a_helper)),
        (lambda x: [y - 1 for y in x], lambda x: [y + 1 for y in x]),
    ]
    for one, two in other:
        assert code(one) != code(two)
    assert fingerprint(max) == {"name": "builtins.max", "code": ""}
    assert fingerprint(np.sin) != fingerprint(np.cos)


def test_the_message_of_a_check_does_not_count() -> None:
    """What a library calls is looked through for functions of the user."""
    checked = lambda text: lambda x: eqx.error_if(x, x[0] > 3, text)
    assert text_of(checked("one")) == text_of(checked("another"))
    written = [write(jax.make_jaxpr(checked(text))(X), ["x"], {}, []) for text in ("one", "another")]
    assert written[0].callbacks == written[1].callbacks
