"""`rewrite_loops` with a function that chooses the kind of each loop."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import loopax as lx
from loopax.insight import LoopExplanation
from tests.support.reference import assert_close


def swing(i: Any, c: Any) -> Any:
    q, p = c
    p = p - 0.01 * jnp.sin(q)
    return q + 0.01 * p, p


def unswing(i: Any, c: Any) -> Any:
    q, p = c
    q = q - 0.01 * p
    return q, p + 0.01 * jnp.sin(q)


def of_others(a: Array) -> Array:
    """A scan that can be undone, and a loop that converges."""
    q, p = lax.scan(lambda c, _: (swing(0, c), None), (a, 0.1 * a), None, length=50)[0]
    goes_on = lambda c: jnp.abs(c[0] - c[1]) > 1e-13
    return lax.while_loop(goes_on, lambda c: (jnp.cos(a * c[0]) + 0.1 * p, c[0]), (q, q + 1))[0]


def test_each_loop_has_its_own() -> None:
    seen: list[LoopExplanation] = []

    def choose(loop: LoopExplanation) -> lx.Kind:
        seen.append(loop)
        if loop.function == "lax.scan":
            return lx.Reversible(lambda c, x: list(unswing(0, c)), rtol=1e-9)
        return lx.Implicit(fixed_point=lambda c: c[0], rtol=1e-9)

    found = jax.jit(jax.grad(lx.rewrite_loops(of_others, kind=choose, scans=True)))(0.7)
    assert_close(found, jax.grad(lx.rewrite_loops(of_others))(0.7))
    scan, loop = seen
    assert scan.most_steps == 50
    assert "test_kinds_of_loops.py" in scan.source
    assert loop.function == "lax.while_loop"
    assert [leaf.role for leaf in loop.leaves[:2]] == ["carried", "carried"]


def test_an_inverse_of_a_fori_loop_gets_the_carry_without_the_index() -> None:
    loss = lambda a, n: sum(lax.fori_loop(0, n, swing, (a, a)))
    kind = lambda loop: lx.Reversible(lambda i, c: list(unswing(i, c)), rtol=1e-9)
    found = jax.grad(lx.rewrite_loops(loss, kind=kind))(0.7, jnp.int32(9))
    assert_close(found, jax.grad(loss)(0.7, 9))


def test_what_is_no_kind() -> None:
    pattern = r"rewrite_loops\(kind=\.\.\.\), which returned 'fast' for lax\.while_loop at \S*test_kinds_of_loops\.py"
    with pytest.raises(ValueError, match=pattern):
        lx.rewrite_loops(of_others, kind=lambda loop: "fast")(0.7)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [lx.Checkpointed, lx.Bounded])
def test_a_class_is_no_function_that_chooses(kind: Any) -> None:
    advice = rf"kind={kind.__name__} is a class, and an object is expected: write kind=lx\.{kind.__name__}\(\)\."
    with pytest.raises(ValueError, match=advice):
        lx.rewrite_loops(of_others, kind=kind)
    with pytest.raises(ValueError, match=advice):
        lx.compare(lambda x: lx.fori_loop(0, 3, lambda i, x: x * x, x), 1.0, kinds=["auto", kind])
