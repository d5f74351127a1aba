"""Nothing to carry, nothing to read, nothing to return."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.pytrees.comparison import EACH_KIND, same

EMPTY: list[Any] = [(), None, {}, [], ((), None)]


def test_empty_carry() -> None:
    """Of each loop, in one program, and outside of `jit`."""

    def run() -> Any:
        options: Any = {"max_steps": 3, "throw": False, "info": True}
        scanned = [lx.scan(lambda c, x: (c, 2 * x), empty, jnp.arange(3)) for empty in EMPTY]
        nothing = [lx.scan(lambda c, _, empty=empty: (c, empty), empty, jnp.arange(3)) for empty in EMPTY]
        stopped = [lx.while_loop(lambda _: True, lambda c: c, empty, **options) for empty in EMPTY]
        none = [lx.while_loop(lambda _: False, lambda c: c, empty) for empty in EMPTY]
        return [lx.fori_loop(0, 3, lambda _, c: c, empty) for empty in EMPTY], none, nothing, scanned, stopped

    for f in (run, jax.jit(run)):
        counted, none, nothing, scanned, stopped = f()
        assert counted == none == EMPTY
        assert nothing == [(empty, empty) for empty in EMPTY]
        assert [(carry, ys.tolist()) for carry, ys in scanned] == [(empty, [0, 2, 4]) for empty in EMPTY]
        assert [(out, info.num_steps, info.limit_reached) for out, info in stopped] == [(e, 3, True) for e in EMPTY]


@pytest.mark.parametrize("xs", [None, (), {}, [(), None], {"name": "only"}])
def test_xs_without_arrays(xs: Any) -> None:
    carry, seen = lx.scan(lambda c, x: (c + 1, (c, x)), 0, xs, length=3)
    assert (carry, seen[0].tolist(), seen[1]) == (3, [0, 1, 2], xs)


@pytest.mark.parametrize("reverse", [False, True])
def test_xs_with_no_rows_and_rows_with_no_elements(reverse: bool) -> None:
    for shape in ((0, 3), (3, 0)):
        args: Any = (lambda c, x: (c + x.sum(), {"y": x, "z": 2 * c}), 0.0, jnp.zeros(shape), None, reverse)
        same(lx.scan(*args), lax.scan(*args))


@EACH_KIND
def test_gradient_with_an_empty_carry(kind: Any) -> None:
    loss = lambda xs: (lx.scan(lambda c, x: (c, x * x), (), xs, kind=kind)[1]).sum()
    assert jax.jit(jax.grad(loss))(np.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
