"""A loop is recognised by what it computes, not by the function that it was given."""

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.jaxpr.util import trace as traced_again
from loopax._src.frontend import trace
from loopax._src.jax_internals import jaxpr_as_fun, recognise, recognised
from loopax._src.jax_internals.recognise import ClosedJaxpr
from tests.fuzz.draw import program
from tests.fuzz.evaluate import function
from tests.fuzz.loops import WithLoopax

X = jnp.linspace(0.1, 0.9, 3)
MLP = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0), dtype=float)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2.0 * x


doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))

compiled: list[str] = []


def noted(event: str, duration_secs: float, **_: Any) -> None:
    if event.endswith("backend_compile_duration"):
        compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(noted)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    before = len(compiled)
    yield
    assert len(compiled) == before


SAVED = jax.checkpoint_policies.save_only_these_names

# Each call makes new functions of the same code.
BODIES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "a closed-over array": lambda: lambda x: jnp.sin(X * x),
    "a custom_jvp": lambda: lambda x: jax.nn.relu(x) - 0.1,
    "a custom_vjp": lambda: lambda x: 0.4 * doubled(x),
    "a batch of a custom_jvp": lambda: lambda x: MLP(x) + 0.0,
    "branches": lambda: lambda x: lax.cond(x[0] > 0.5, lambda: 0.9 * x, lambda: 1.1 * x),
    "branches of loopax": lambda: lambda x: lx.cond(x[0] > 0.5, lambda: 0.9 * x, lambda: 1.1 * x),
    "an inner loop": lambda: lambda x: lax.fori_loop(0, 2, lambda i, x: 0.9 * x, x),
    "an inner loop of loopax": lambda: lambda x: lx.fori_loop(0, 2, lambda i, x: 0.9 * x, x),
    "a checkpoint": lambda: lambda x: jax.checkpoint(lambda y: jnp.sin(y * x))(x),
    "a policy": lambda: lambda x: jax.checkpoint(jnp.sin, policy=SAVED("a"))(x) - 0.1,
    "a linear solve": lambda: lambda x: jnp.linalg.solve(jnp.eye(3) + 0.1 * x[:, None], x),
}


def looped(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lx.fori_loop(0, 3, lambda i, x: body(x), x).sum()


TRANSFORMATIONS = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "batch": lambda f: lambda x: jax.vmap(f)(x[None]),
    "gradient of a batch": lambda f: jax.grad(lambda x: jax.vmap(f)(x[None]).sum()),
    "hessian": jax.hessian,
}
slow = pytest.mark.slow
CASES = [(body, "gradient") for body in BODIES] + [("a custom_jvp", name) for name in TRANSFORMATIONS]
CASES += [("an inner loop of loopax", name) for name in ("value", "gradient of a batch")]


@pytest.mark.parametrize(("body", "transformation"), [*dict.fromkeys(CASES)])
def test_new_functions_of_the_same_code_are_not_compiled_again(body, transformation):
    run = lambda: TRANSFORMATIONS[transformation](looped(BODIES[body]()))(X)
    first = run()
    with nothing_compiled():
        second = run()
    np.testing.assert_array_equal(first, second)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "Checkpointed": lambda: {"kind": lx.Checkpointed(2)},
    "Reversible": lambda: {"kind": lx.Reversible(lambda i, x: 0.5 * x)},
    "Truncated": lambda: {"derivative": lx.Truncated(last=2)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_of_other_kinds(options):
    run = lambda: jax.grad(lambda x: lx.fori_loop(0, 3, lambda i, x: 2.0 * x, x, **OPTIONS[options]()).sum())(X)
    first = run()
    with nothing_compiled():
        np.testing.assert_array_equal(run(), first)


def test_values_that_are_closed_over_are_operands():
    results = []
    for factor in (X, 2.0 * X):
        with nothing_compiled() if results else jax.disable_jit(False):
            results.append(lx.fori_loop(0, 3, lambda i, x: factor * x, X))  # noqa: B023 - called at once
    np.testing.assert_allclose(results[0], X**4)
    np.testing.assert_allclose(results[1], 8.0 * X**4)


# What makes a difference.


def program_of(body: Callable[[Any], Any], *avals: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(body)(*avals or (X,))


def same_line(value: Any) -> Callable[[Any], Any]:
    """All that it makes are alike but for a value that they close over."""
    return lambda x: value(x) if callable(value) else x * value


def with_rule() -> Any:
    f = jax.custom_vjp(lambda x: 2.0 * x)
    f.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))
    return f


def on_host(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.pure_callback(function, x, x)


PAIRS = {
    "numbers": (same_line(1.0), same_line(1.5)),
    "signs of zero": (same_line(0.0), same_line(-0.0)),
    "infinities": (same_line(np.inf), same_line(-np.inf)),
    "a parameter": (same_line(partial(lax.cumsum, reverse=True)), same_line(partial(lax.cumsum, reverse=False))),
    "operations": (same_line(lax.sin), same_line(lax.cos)),
    "rules of derivatives": (same_line(with_rule()), same_line(with_rule())),
    "functions on the host": (same_line(on_host(np.sin)), same_line(on_host(np.cos))),
    "names of arguments": (lambda x: jnp.sin(2.0 * x), lambda y: jnp.sin(2.0 * y)),
    "names of scopes": (same_line(jax.named_scope("a")(jnp.sin)), same_line(jax.named_scope("b")(jnp.sin))),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_programs_that_differ(pair):
    one, other = map(program_of, PAIRS[pair])
    assert recognised(one) is one
    assert recognised(other) is other


# What is the user's own.


def once(body: Callable[[Any], Any], x: Any = X) -> float:
    return float(lx.fori_loop(0, 3, lambda i, x: body(x), x).sum())


def test_callbacks_with_containers_of_their_own():
    logs: list[list[float]] = [[], []]
    for log in logs:
        add = partial(lambda log, x: log.append(float(x)), log)
        lx.fori_loop(0, 2, lambda i, x: (jax.debug.callback(add, x), x + 1.0)[1], 0.0)  # noqa: B023 - called at once
        jax.effects_barrier()
    assert logs == [[0.0, 1.0], [0.0, 1.0]]


def test_objects_that_seem_equal():
    class Scale(str):
        factor: float

        def __call__(self, x):
            return np.asarray(x * self.factor)

    found = []
    for factor in (2.0, 3.0):
        scale = Scale("scale")
        scale.factor = factor
        found.append(once(lambda x: jax.pure_callback(scale, x, x), jnp.ones(())))  # noqa: B023
    assert found == [8.0, 27.0]


def test_static_values_that_seem_equal():
    class Factor:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return isinstance(other, Factor)

        def __hash__(self):
            return 1

        def __repr__(self):
            return "Factor"

    class Scale(eqx.Module):
        weight: Any
        factor: Any = eqx.field(static=True)

    times = lambda scale, x: np.asarray(scale.weight * scale.factor.value * x)
    scales = [Scale(jnp.ones(()), Factor(value)) for value in (2.0, 3.0)]
    found = [once(lambda x, s=s: jax.pure_callback(times, x, s, x), jnp.ones(())) for s in scales]
    assert found == [8.0, 27.0]


def test_arrays_of_numpy_that_change():
    array = np.array([2.0])
    run = lambda: once(jax.jit(lambda x: (x * array).sum()), jnp.ones(()))
    found = [run()]
    array[:] = 3.0
    assert [*found, run()] == [8.0, 27.0]


def test_the_same_code_in_two_files():
    source = "import jax.numpy as jnp\nhelper = lambda x: jnp.sin(2.0 * x)"
    programs = []
    for file in ("one.py", "two.py"):
        names: dict[str, Any] = {}
        exec(compile(source, file, "exec"), names)
        programs.append(program_of(same_line(names["helper"])))
    assert [recognised(p) for p in programs] == programs


NANS = np.array([0x7FF8000000000001, 0x7FF8000000000002]).view(float).tolist()
VALUES = [(1, 1.0), (1, True), (0.0, -0.0), NANS, ((1,), [1]), (np.float32(1), np.float64(1)), (jnp.sin, jnp.cos)]
VALUES += [(partial(jnp.sum, axis=0), partial(jnp.sum, axis=0)), ({"a": 1}, {"b": 1}), (jnp.ones(3), jnp.ones(3))]
VALUES += [
    (jax.tree.structure({"a": 1}), jax.tree.structure({"b": 1})),
    (jax.tree.structure(None), jax.tree.structure(1)),
]


@pytest.mark.parametrize(("one", "other"), VALUES)
def test_parameters_that_differ(one, other):
    assert recognise._value(one) == recognise._value(one)
    assert recognise._value(one) != recognise._value(other)


TYPES = [jnp.ones(3), jnp.ones(4), jnp.ones(3, jnp.float32), jnp.ones(3, jnp.int32), jnp.ones((3, 1))]
TYPES += [1.0, np.float64(1)]  # weak, and not


def test_types_and_weak_types_make_a_difference():
    body = lambda x: x * 2
    programs = [program_of(body, x) for x in TYPES]
    assert [recognised(p) for p in programs] == programs
    assert [recognised(program_of(body, x)) for x in TYPES] == programs


SETTINGS = {
    "precision": partial(jax.default_matmul_precision, "highest"),
    "64 bits": lambda: jax.enable_x64(False),
    "checks": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_jax_make_a_difference(setting):
    body, x = same_line(jnp.sin), jnp.ones(3, jnp.float32)
    one = recognised(program_of(body, x))
    with SETTINGS[setting]():
        other = program_of(body, x)
        assert recognised(other) is other
    assert recognised(program_of(body, x)) is one


def test_settings_of_loopax_make_a_difference():
    with lx.configure(memory=2**20):  # from the first one on, JAX knows of the settings
        pass
    one = recognised(program_of(same_line(3.0)))
    with lx.configure(memory=2**20):
        other = program_of(same_line(3.0))
        assert recognised(other) is other
    assert recognised(program_of(same_line(3.0))) is one


def test_lines_of_the_user_make_a_difference():
    """So an error, or `explain`, names the line of the loop that was called."""
    helpers = [lambda x: jnp.sin(x) * 1.25,
               lambda x: jnp.sin(x) * 1.25]  # fmt: skip
    one, other = (program_of(same_line(f)) for f in helpers)
    assert recognised(one) is one
    assert recognised(other) is other
    loops = [lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x) * 1.25, x),
             lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x) * 1.25, x)]  # fmt: skip
    lines = {lx.explain(f, X).loops[0].source for f in loops}
    assert len(lines) == 2


def changed(closed: ClosedJaxpr) -> Iterator[ClosedJaxpr]:
    """The program with one thing that is different, for each thing in some forty of its equations."""
    jaxpr: Any = closed.jaxpr
    eqns = jaxpr.eqns
    for k in range(0, len(eqns), max(len(eqns) // 40, 1)):
        eqn = eqns[k]
        others = [eqn.replace(params=eqn.params | {name: "other"}) for name in eqn.params]
        others += [eqn.replace(primitive=lax.sin_p if eqn.primitive is not lax.sin_p else lax.cos_p)]
        if len(set(map(str, eqn.invars))) > 1:
            others.append(eqn.replace(invars=[*eqn.invars[1:], eqn.invars[0]]))
        if len(eqn.outvars) > 1:
            others.append(eqn.replace(outvars=[*eqn.outvars[1:], eqn.outvars[0]]))
        for other in others:
            yield ClosedJaxpr(jaxpr.replace(eqns=[*eqns[:k], other, *eqns[k + 1 :]]), closed.consts)
        yield ClosedJaxpr(jaxpr.replace(eqns=[*eqns[:k], *eqns[k + 1 :]]), closed.consts)
    if len(set(map(id, jaxpr.outvars))) > 1:
        outvars = [*jaxpr.outvars[1:], jaxpr.outvars[0]]
        yield ClosedJaxpr(jaxpr.replace(outvars=outvars), closed.consts)


# Equations that hold functions, which random programs make anew: they are not recognised.
FUNCTIONS = re.compile("callback|custom_(jvp|vjp|vmap)|linear_solve")


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX's own, in 32-bit mode
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=slow) for k in range(20, 260, 20))])
def test_random_programs_are_taken_for_no_other(first, monkeypatch):
    """Steps of random programs: all are recognised when traced again, but with new functions, or any part changed."""
    traced: list[ClosedJaxpr] = []

    def noted(closed: ClosedJaxpr) -> ClosedJaxpr:
        found = recognised(closed)
        text, other = (re.sub("0x[0-9a-f]+", "", str(x)) for x in (found, closed))  # without addresses
        assert text == other
        assert str(found.in_avals) == str(closed.in_avals)
        traced.append(found)
        return found

    monkeypatch.setattr(trace.jaxi, "recognised", noted)
    t, n = jnp.array([0.4, -0.9]), np.int32(3)
    for number in range(first, first + 20):
        with jax.enable_x64("d" not in program(number).features):
            steps = []
            for _ in range(2):
                traced.clear()
                jax.make_jaxpr(function(program(number), WithLoopax()))(t, n)
                steps.append(list(traced))
            assert len(steps[0]) == len(steps[1]) > 0
            for one, again in zip(*steps, strict=True):
                assert again is one or FUNCTIONS.search(str(one))
            for step in steps[0]:
                for other in changed(step):
                    assert recognised(other) is not step


def test_rules_that_have_been_wrapped_many_times():
    """JAX wraps the rule of a derivative whenever a program is pruned, and holds the old one twice in the new one."""
    closed = program_of(same_line(jax.nn.relu))
    for _ in range(40):
        closed = traced_again(jaxpr_as_fun(closed), closed.in_avals)
    assert recognised(closed) is closed


def test_nothing_is_kept_alive():
    """Neither functions and arrays in a program's parameters, nor programs that nobody uses."""
    jax.clear_caches()
    gc.collect()
    before = len(recognise._programs)

    def called() -> list[weakref.ref[Any]]:
        array = jnp.ones(1000)
        rule = jax.custom_vjp(lambda x: x * array)
        rule.defvjp(lambda x: (x * array, None), lambda _, g: (g * array,))
        jax.grad(lambda x: lx.fori_loop(0, 3, lambda i, x: rule(x), x).sum())(jnp.ones(1000))
        return [weakref.ref(array), weakref.ref(rule)]

    references = called()
    assert len(recognise._programs) > before
    jax.clear_caches()
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert len(recognise._programs) <= before
