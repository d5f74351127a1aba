"""Kinds measured on a function: the rows, not their times."""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import loopax as lx
from loopax._src.core import Loop
from loopax._src.core.batching.compact_primitive import compact_vmap_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.insight.compare import Measured, interleaved, with_kind
from loopax._src.jax_internals import inner_jaxprs


def program(x, n):
    step = lambda i, x: jnp.sin(jnp.exp(-(x**2))) * jnp.cos(x)
    return (lx.fori_loop(0, n, step, x, max_steps=50, kind=lx.Auto(memory=30_000)) ** 2).sum()


ARGS = jnp.linspace(0.1, 1, 600), jnp.int32(40)


@pytest.fixture(scope="module")
def compared():
    return lx.compare(program, *ARGS, kinds=[lx.Checkpointed(4), "bounded", "residuals", "lax"], rounds=2)


def test_rows(compared):
    written, few, bounded, residuals, none = compared.rows
    assert written.name.startswith("Auto(memory=30000) takes Checkpointed(")
    assert [row.is_chosen for row in compared.rows] == [True, False, False, False, False]
    names = ["Checkpointed(checkpoints=4)", "Bounded()", "Residuals()", "Lax()"]
    assert [row.name for row in compared.rows[1:]] == names
    assert few.temporary_bytes < bounded.temporary_bytes < residuals.temporary_bytes
    for row in (written, few, bounded, residuals):
        assert row.traces == 2
        assert row.forward_ms == written.forward_ms  # one program, measured once
        assert min(row.forward_ms, row.gradient_ms, row.compile_seconds) > 0
    assert "Choose a kind that has it" in none.problem
    assert math.isnan(none.gradient_ms)
    lines = str(compared).splitlines()
    assert lines[0].startswith("program: its loops by kind")
    assert lines[2].startswith("* Auto(memory=30000) takes ")
    assert lines[6].split() == ["Lax()", "none"]
    assert lines[7].startswith("Lax(): reverse mode")
    assert len(lines) == 8


def test_kinds_that_come_to_the_same_program_share_a_row():
    steps = lambda x: lx.fori_loop(0, 30, lambda i, x: jnp.sin(x), x).sum()
    kinds = ["checkpointed", lx.Checkpointed(30), lx.Checkpointed(90), "bounded", "residuals", "bounded"]
    found = lx.compare(steps, jnp.ones(4), kinds=kinds, rounds=1)
    assert [row.name for row in found.rows] == [
        "Auto() takes Residuals() = Checkpointed(checkpoints=30) = Checkpointed(checkpoints=90)",
        "Checkpointed()",
        "Bounded()",
    ]
    several = Measured("Auto() takes Bounded(), Auto() takes Residuals()")
    assert several._shared_with("Residuals()").name == f"{several.name} = Residuals()"


def test_the_picture(compared, monkeypatch):
    mpl = pytest.importorskip("matplotlib")
    mpl.use("Agg")
    axes = compared.plot()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [f"as written: {compared.rows[0].name}", *(row.name for row in compared.rows[1:-1])]
    assert compared.plot(axes) is axes
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install loopax\[matplotlib\]"):
        compared.plot()


def test_every_loop_gets_the_kind_and_computes_the_same():
    """In `jit`, in a branch, in a compact batch, and in another loop."""

    def nested(x):
        inner = lambda i, x: lx.fori_loop(0, 3, lambda j, x: jnp.sin(x), x, kind="checkpointed")
        x = jax.jit(lambda x: lx.fori_loop(0, 4, inner, x))(x)
        x = lax.cond(x.sum() > 0, lambda x: lx.fori_loop(0, 5, lambda i, x: jnp.cos(x), x), lambda x: x, x)
        one = lambda x: lx.while_loop(lambda x: x < 3, lambda x: x * 1.3, x, lanes="compact", max_steps=20)
        return jax.vmap(one)(x).sum()

    def loop_parameters(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is loop_p:
                yield Loop(**eqn.params)
            if eqn.primitive is compact_vmap_p:
                yield eqn.params["static"]
            for inner in inner_jaxprs(eqn):
                yield from loop_parameters(inner)

    x, kind = jnp.linspace(0.5, 1, 3), lx.Checkpointed(3)
    closed = with_kind(jax.make_jaxpr(nested)(x), kind)
    assert {repr(loop.debug_info.kind) for loop in loop_parameters(closed) if loop.debug_info} == {repr(kind)}
    found = jax.grad(lambda x: jaxpr_as_fun(closed)(x)[0])(x)
    np.testing.assert_allclose(found, jax.grad(nested)(x), rtol=1e-12)


def test_a_check_that_fails_has_a_row():
    """Of `Implicit`, whose loop ends before it has converged; and of a loop that no kind can run."""

    def program(x, most):
        body = lambda z: jnp.cos(x * z)
        return lx.while_loop(lambda z: abs(z - body(z)) > 0.1, body, 0.1, max_steps=most)

    found = lx.compare(lambda x: program(x, 50), jnp.array(0.9), kinds=[lx.Implicit(), "checkpointed"], rounds=1)
    written, implicit, checkpointed = found.rows
    assert implicit.problem.startswith("loopax.while_loop at tests/insight/test_compare.py:")
    assert implicit.problem.endswith("Implicit(fixed_point=lambda val: val.x).")
    assert min(written.gradient_ms, checkpointed.gradient_ms) > 0
    assert str(found).splitlines()[-1] == f"{implicit.name}: {implicit.problem}"
    for row in lx.compare(lambda x: program(x, 1), jnp.array(0.9), kinds=["bounded"], rounds=1).rows:
        assert "max_steps=1 stopped a loop that would have gone on" in row.problem


BAD = [
    ((lambda x: lax.fori_loop(0, 3, lambda i, x: x + 1, x), 1.0), {}, ValueError, "no loop of loopax.*rewrite_loops"),
    ((program,), {}, TypeError, r"compare\(program, \.\.\.\): the arguments do not fit"),
    ((program, *ARGS), {"kinds": "auto"}, TypeError, r"expected several: `kinds=\['auto'\]`"),
    ((program, jax.ShapeDtypeStruct((3,), jnp.float64), ARGS[1]), {}, TypeError, "x is a type without values"),
]


def test_bad_input():
    for args, options, error, message in BAD:
        with pytest.raises(error, match=message):
            lx.compare(*args, **options)


def test_calls_are_in_turn():
    for warm, order in ((False, "abab"), (True, "aabbaabb")):
        called = []
        times = interleaved([partial(called.append, "a"), partial(called.append, "b")], 2, warm=warm)
        assert ("".join(called), len(times)) == (order, 2)
