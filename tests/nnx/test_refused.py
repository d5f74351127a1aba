"""Changes of structure and of references that a loop over NNX objects refuses, and new objects that it takes."""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax import lax

import loopax as lx
from tests.nnx.cells import COUNTS, EACH_LOOP, STEPS, Counter, Tied, X, cell, count, scan, unchanged, while_loop


def changed(change: Callable[[Any], Any], name: str = "model") -> Any:
    """A step that changes one of the objects, and returns both."""

    def step(carry: Any) -> Any:
        change(carry[name])
        return carry

    return step


def alias(carry: Any) -> Any:
    carry["model"].mean = carry["other"].mean
    return carry


REFUSED = {
    "another Variable": (
        changed(lambda m: setattr(m.linear, "kernel", nnx.Param(m.linear.kernel[...]))),
        r"\['model'\].linear.kernel: got another Param",
    ),
    "aliased": (alias, r"\['other'\].mean: got the object at .*\['model'\].mean, expected BatchStat"),
    "new attribute": (
        changed(lambda m: setattr(m, "extra", nnx.Variable(jnp.float64(0)))),
        r"\['model'\].extra: Variable is new in the result",
    ),
    "other mode": (changed(nnx.Module.eval), r"\['model'\].dropout.deterministic: got True, expected False"),
    "another type": (lambda c: {**c, "model": Counter()}, r"\['model'\]: got Counter, expected Cell"),
    "changed and replaced": (
        lambda c: {**c, "model": (c["model"](X), nnx.clone(c["model"]))[1]},
        r"\['model'\].count: changed, but the object is not returned",
    ),
    "shape": (changed(lambda m: m.mean.set_value(X)), r"\['model'\].mean: got float64\[3\], expected float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_structure_and_references_are_refused(case: str) -> None:
    step, message = REFUSED[case]
    model, other = cell(), cell(1)
    for loop in (while_loop, scan):
        with pytest.raises(TypeError, match=message):
            loop(STEPS, step, {"model": model, "other": other})
    unchanged(model, cell)
    unchanged(other, lambda: cell(1))


def test_a_variable_that_changes_in_the_carry_and_in_xs() -> None:
    """Each of them would be lost in the other; one that changes in one place only has that change."""
    f = lambda carry, row: (count(carry), count(row).count[...])
    both = Counter(jnp.arange(3))
    with pytest.raises(TypeError, match=r"\.count of the carry is \[0\]\.count of xs"):
        lx.scan(lambda c, row: f(c, row[0]), both, [both])
    assert both.count[...].tolist() == [0, 1, 2]
    _, ys = lx.scan(f, lx.local(both), both)
    assert both.count[...].tolist() == ys.tolist() == [1, 2, 3]
    lx.scan(lambda c, row: (c, count(row).count[...]), both, both)
    assert both.count[...].tolist() == [2, 3, 4]


def test_new_objects_of_the_same_structure_are_the_result() -> None:
    """As in the Python loop, the caller's objects are then left alone."""

    def descend(_: Any, params: Any) -> Any:
        return jax.tree.map(lambda p: p - 0.1, params)

    model = nnx.Linear(2, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    before, params = model.kernel[...], nnx.state(model)
    for start in (params, model):
        out = lx.fori_loop(0, 3, descend, start)
        assert type(out) is type(start)
        kernel: Any = out.kernel
        assert kernel is not model.kernel
        np.testing.assert_allclose(kernel[...], before - 0.3)
        assert model.kernel[...].tolist() == before.tolist()


@EACH_LOOP
def test_an_object_of_an_outer_trace_that_the_body_changes(loop: Any) -> None:
    model, rngs = Counter(), nnx.Rngs(0)
    for step in (lambda x: x + count(model).count[...], lambda x: x + rngs.uniform()):
        with pytest.raises(TraceContextError, match=r"(?s)(body_fun|f of scan).*carry.*loopax.local") as caught:
            loop(STEPS, step, jnp.float64(0))
        assert isinstance(caught.value.__cause__, TraceContextError)
    with pytest.raises(TraceContextError, match=r"loopax\.local") as caught:
        lx.fori_loop(0, 2, lambda _, x: loop(STEPS, lambda x: x + count(model).count[...], x), jnp.int32(0))
    assert str(caught.value).count("loopax.local") == 1
    with pytest.raises(TraceContextError, match=r"changes.*after the loop.*loopax.local"):
        jax.vmap(lambda n: loop(n, count, model).count[...])(COUNTS)
    assert jax.vmap(lambda n: loop(n, count, lx.local(model)).count[...])(COUNTS).tolist() == COUNTS.tolist()
    assert model.count[...] == 0


def test_local() -> None:
    tied = Tied()
    copy, (again, x) = lx.local((tied, (tied.b, X)))
    assert copy is not tied
    assert copy.a is copy.b is again
    assert copy.a is not tied.a
    assert x is X
    copy.a[...] = jnp.float64(5)
    assert tied.a[...] == 1.0


def test_variables_with_references_are_refused_unless_they_are_closed_over() -> None:
    calls = nnx.Variable(jnp.zeros(()), ref=True)
    refused = r"carry or in xs is made with `ref=True`.* Let the function close over it"
    with pytest.raises(NotImplementedError, match=refused):
        lx.fori_loop(0, 2, lambda _, c: c, calls)

    def step(_: Any, x: Any) -> Any:
        calls[...] += 1.0
        return jnp.sin(x) * calls[...]

    results = []
    for loops in (lx, lax):
        calls[...] = 0.0
        results.append(jax.jit(lambda x, loops=loops: loops.fori_loop(0, 4, step, x))(1.0))
        assert calls[...] == 4.0
    assert results[0] == results[1]


def test_hijax_variables_are_refused() -> None:
    """Flax's flag makes all Variables so."""
    with flax.config.temp_flip_flag("hijax_variable", True):
        model = nnx.Linear(2, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        with pytest.raises(NotImplementedError, match="in a carry or in xs is made with `hijax=True`"):
            lx.fori_loop(0, 2, lambda _, c: c, model)
        with pytest.raises(NotImplementedError, match="closes over a value of the type AbstractVariable"):
            lx.fori_loop(0, 2, lambda _, x: model(x), jnp.ones(2))
