"""What no lane has of its own: JAX asks for the batching rule of such an equation, too, and it stays as it is."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import stochtrace
from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.batching.compact_primitive import compact_vmap_p
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.ir.reverse_sweep import reverse_sweep_p
from loopax._src.core.jaxpr.util import bind_again
from loopax._src.core.lane_effects import only_if_p
from loopax._src.core.masking import active_p, fill_inactive_p
from loopax._src.core.row_buffers import VERSION, take_out
from loopax._src.jax_internals import inner_jaxprs
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

XS = jnp.arange(1.0, 4.0)
COUNTS = jnp.array([2, 0, 3])
LANES: list[Any] = ["lockstep", "compact", "sequential", "auto"]


def power(w, steps=3, **options):
    return lx.fori_loop(0, steps, lambda _, c: jnp.sin(w * c), 1.0, **options)


def fixed_point(w, lanes):
    step = lambda z: 0.5 * jnp.cos(w * z)
    return lx.while_loop(lambda z: jnp.abs(step(z) - z) > 1e-9, step, 1.0, derivative=lx.Implicit(), lanes=lanes)


def appended(w, steps):
    """A loop with a buffer of which rows are read, and a print."""

    def body(i, c):
        x, buffer = c
        jax.debug.print("{}", x)
        x = w * x + buffer[i // 2] + buffer.rows.sum()
        return x, buffer.append(x)

    buffer = lx.Buffer(4, like=w).append(w)
    x, buffer = lx.fori_loop(0, steps, body, (w, buffer), max_steps=3, kind=lx.Checkpointed(2))
    return x + buffer.rows.sum()


def linear_part(f):
    return lambda x: jax.linearize(f, x)[1](jnp.ones_like(x))


PROGRAMS = [
    lambda w: jax.vmap(jax.grad(appended), (0, 0))(w * XS, COUNTS),
    lambda w: jax.vmap(lambda n: power(w, n, lanes="compact"))(COUNTS),
    linear_part(lambda w: power(w, kind="bounded")),
    linear_part(jax.grad(lambda w: power(w, kind="checkpointed"))),
    lambda w: take_out(w * XS, 0),
    lambda _: active_p.bind(0, COUNTS, has_limits=(False, True), lanes=3)[0],
]


def own_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from own_equations(inner)


def test_equations_of_all_primitives():
    """`out_axes=None` refuses results with lanes. (`retyped` is an identity that only devices which differ have.)"""
    primitives = {loop_p, reverse_sweep_p, compact_vmap_p, linear_loop_p, linear_sweep_p, *VERSION}
    primitives |= {fill_inactive_p, active_p, only_if_p}
    found = {}
    for program in PROGRAMS:
        for eqn in own_equations(jax.make_jaxpr(program)(0.5).jaxpr):
            found.setdefault(eqn.primitive, eqn)
    assert primitives <= set(found)
    for primitive in primitives:
        eqn = found[primitive]
        (again,) = [e for e in jax.make_jaxpr(shared_by_lanes(eqn))(XS).eqns if e.primitive is primitive]
        assert [v.aval for v in again.outvars] == [v.aval for v in eqn.outvars]


def shared_by_lanes(eqn):
    operands = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.vmap(lambda _: tuple(bind_again(eqn, operands)), out_axes=None, axis_name="lanes")


def alone(value):
    """What all lanes share, beside something of each lane."""
    return jax.vmap(lambda y: y * value())(XS)


def in_lanes(options):
    """Programs in which some `vmap` does not batch a loop."""
    f = lambda w, steps=3: power(w, steps, **options)
    in_a_body = lambda y, n: lx.fori_loop(0, n, lambda _, c: c + f(0.7), y)
    rows = lambda: jnp.sum(lx.scan(lambda c, x: (c * x, c), 1.0, XS, **options)[1])
    branch = lambda w: lx.cond(True, jnp.sin, jnp.cos, w, **options)
    return {
        "values": lambda: alone(lambda: f(0.7)),
        "rows": lambda: alone(rows),
        "in the body of another": lambda: jax.vmap(in_a_body)(XS, COUNTS),
        "a branch": lambda: alone(lambda: branch(0.7)),
        "gradient of a fixed point": lambda: alone(lambda: jax.grad(lambda w: fixed_point(w, options["lanes"]))(0.7)),
        "trace estimate": lambda: stochtrace.estimate_trace(
            lambda v: f(0.7) * v, jax.random.key(0), num_matvecs=4, batch=2, size=3
        ),
    }


PROGRAM_NAMES = list(in_lanes({"lanes": "lockstep"}))


@pytest.mark.parametrize("name", PROGRAM_NAMES)
def test_sequential_lanes_share_a_loop(name):
    expected = in_lanes({"lanes": "lockstep"})[name]()
    assert_close(in_lanes({"lanes": "sequential"})[name](), expected)


@pytest.mark.parametrize(
    ("lanes", "kind"), [*zip(LANES, KINDS, strict=True), ("compact", KINDS[0]), ("sequential", KINDS[1])], ids=name_of
)
def test_derivatives_that_all_lanes_share(lanes, kind):
    f = lambda w: power(w, kind=kind, lanes=lanes)
    expected = jax.grad(lambda w: jnp.sin(w * jnp.sin(w * jnp.sin(w))))
    assert_close(alone(lambda: jax.grad(f)(0.7)), XS * expected(0.7))
    assert_close(alone(lambda: jax.hessian(f)(0.7)), XS * jax.grad(expected)(0.7))


def test_a_shared_loop_runs_once():
    steps = []

    def body(_, c):
        jax.debug.callback(lambda: steps.append(None))
        return 2.0 * c

    for lanes in LANES:
        jax.block_until_ready(alone(lambda: lx.fori_loop(0, 3, body, 1.0, lanes=lanes)))  # noqa: B023 - runs at once
        jax.effects_barrier()
    assert len(steps) == 3 * len(LANES)


def place(w):
    return w * jax.lax.axis_index("lanes").astype(float)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("step", [place, jax.jit(place), lambda w: jax.lax.psum(w, "lanes")], ids=["", "jit", "psum"])
def test_a_shared_loop_that_communicates_is_one_of_lanes(kind, step):
    """`lax.scan` is right here, too."""
    f = lambda scan, **options: lambda w: scan(lambda c, _: (step(w * c), None), 1.0, None, 2, **options)[0]
    of = lambda f: jax.vmap(lambda y: y * jax.grad(f)(0.7), axis_name="lanes")(XS)
    assert_close(of(f(lx.scan, kind=kind)), of(f(jax.lax.scan)))
