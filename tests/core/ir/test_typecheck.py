"""`check_jaxpr` accepts what loopax traces, and refuses equations whose operands do not fit their bodies."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprTypeError, check_jaxpr

import loopax as lx
from loopax._src.core.batching.compact_primitive import CompactVmap
from loopax._src.core.ir.loop import Loop
from loopax._src.jax_internals import inner_jaxprs
from tests.support.problem import KINDS, XS, H, W, mixed, name_of, scan_program

N = jnp.int32(6)
BATCH = jnp.stack([XS, 2 * XS])


def scan_loss(kind: lx.Kind) -> Any:
    program = scan_program(kind)
    return lambda w, xs: program(w, H, xs, N)


def lanes_loss(kind: lx.Kind, lanes: Any) -> Any:
    """Lanes that stop at different steps, on their own."""

    def lane(w: Any, h: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, jnp.tanh(w @ state[1]) + h

        return lx.while_loop(lambda s: s[1].sum() < 2, body, (0, h), max_steps=9, kind=kind, lanes=lanes)[1]

    return lambda w, xs: mixed(jax.vmap(lane, (None, 0))(w, xs))


def pullback(f: Any) -> Any:
    """The linear program that `jax.linearize` leaves."""
    return lambda *args: jax.linearize(f, *args)[1](*args)


def remat(f: Any) -> Any:
    return jax.grad(jax.checkpoint(f))


TRANSFORMED = {
    "value": lambda f: f,
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "gradient": jax.grad,
    "linear": pullback,
    "linear gradient": lambda f: pullback(jax.grad(f)),
    "hessian": lambda f: jax.jacrev(jax.grad(f)),
    "remat": remat,
}


def checked(jaxpr: Any) -> Iterator[Any]:
    """Check a jaxpr and those inside of it; their equations."""
    check_jaxpr(jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from checked(inner)


@pytest.mark.parametrize("transformed", TRANSFORMED)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_accepts_loops(kind, transformed):
    program = TRANSFORMED[transformed](scan_loss(kind))
    assert list(checked(jax.make_jaxpr(program)(W, XS).jaxpr))
    assert list(checked(jax.make_jaxpr(jax.vmap(program, (None, 0)))(W, BATCH).jaxpr))


@pytest.mark.parametrize("transformed", TRANSFORMED)
@pytest.mark.parametrize("lanes", ["lockstep", lx.Compact(min_lanes=2)], ids=["lockstep", "compact"])
def test_accepts_lanes_that_stop_at_different_steps(lanes, transformed):
    for kind in (lx.Checkpointed(3), lx.Residuals()):
        program = TRANSFORMED[transformed](lanes_loss(kind, lanes))
        assert list(checked(jax.make_jaxpr(program)(W, XS).jaxpr))


# ---- equations that are wrong


def equation(name: str, program: Any) -> Any:
    """An equation of a primitive, in a jaxpr of its own."""
    jaxpr = jax.make_jaxpr(program)(W, XS).jaxpr
    return next(eqn for eqn in checked(jaxpr) if eqn.primitive.name == name)


def refused(eqn: Any, match: str) -> None:
    def bind(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    closed = jax.make_jaxpr(bind)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars))
    with pytest.raises(JaxprTypeError, match=match):
        check_jaxpr(closed.jaxpr)


def with_operand(eqn: Any, at: int, change: Any) -> Any:
    """The equation with an operand of another type."""
    invars = list(eqn.invars)
    old = invars[at].aval
    jaxpr = jax.make_jaxpr(lambda x: x)(change(jax.ShapeDtypeStruct(old.shape, old.dtype))).jaxpr
    invars[at] = jaxpr.invars[0]
    return eqn.replace(invars=invars)


def wider(x: Any) -> Any:
    return jax.ShapeDtypeStruct((*x.shape, 2), x.dtype)


def as_bool(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jnp.bool_)


PRIMITIVES = {
    "loop": scan_loss(lx.Residuals()),
    "reverse_sweep": jax.grad(scan_loss(lx.Checkpointed())),
    "linear_loop": pullback(scan_loss(lx.Checkpointed())),
    "linear_sweep": pullback(jax.grad(scan_loss(lx.Checkpointed()))),
    "compact_vmap": lanes_loss(lx.Residuals(), lx.Compact(min_lanes=2)),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_refuses_operands_of_other_types_and_numbers(name):
    eqn = equation(name, PRIMITIVES[name])
    for at in range(len(eqn.invars)):
        for change in (wider, as_bool):
            if eqn.invars[at].aval.dtype != bool or change is wider:
                refused(with_operand(eqn, at, change), f"{name}: ")
    refused(eqn.replace(invars=eqn.invars[:-1]), f"{name}: ")
    refused(eqn.replace(invars=[*eqn.invars, eqn.invars[0]]), f"{name}: ")


def test_refuses_a_carry_that_changes_its_type():
    eqn = equation("loop", PRIMITIVES["loop"])
    loop = Loop(**eqn.params)
    avals = list(loop.body.in_avals)
    changed = jax.make_jaxpr(lambda *xs: [xs[0].astype(bool), *xs[1 + loop.num_consts :][1:]])(*avals)
    refused(eqn.replace(params=loop._replace(body=changed)._asdict()), "carry that the body returns")


def test_refuses_a_batch_with_an_axis_too_few():
    eqn = equation("compact_vmap", PRIMITIVES["compact_vmap"])
    inner = CompactVmap(**eqn.params)
    refused(eqn.replace(params=inner._replace(mapped=inner.mapped[:-1])._asdict()), "operands: expected")
