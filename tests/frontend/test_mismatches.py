"""Bodies that return another module than they are given: errors that name the path, what was got and what expected."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest

from tests.support.blocks import BLOCK, KEY, fori_loop


class Wide(eqx.Module):
    linear: eqx.nn.Linear
    width: int = eqx.field(static=True)


LINEAR = BLOCK.linear
MISMATCHES: dict[str, tuple[Any, Any, str]] = {
    "class": ({"cell": LINEAR}, {"cell": BLOCK}, "['cell']: got Block, expected Linear"),
    "static field": ([Wide(LINEAR, 2)], [Wide(LINEAR, 3)], "[0].width: got 3, expected 2 (a static field)"),
    "both of them": (Wide(LINEAR, 2), Wide(BLOCK, 2), ".linear: got Block, expected Linear"),  # type: ignore[arg-type]
    "inner static field": (
        Wide(LINEAR, 2),
        Wide(eqx.nn.Linear(3, 3, use_bias=False, key=KEY), 2),
        ".linear.use_bias: got False, expected True (a static field)",
    ),
    "missing array": (
        Wide(LINEAR, 2),
        Wide(eqx.nn.Linear(3, 3, use_bias=False, key=KEY), 2),
        ".linear.bias: got None, expected float64[3]",
    ),
    "array": (LINEAR, eqx.nn.Linear(3, 3, dtype=jnp.float32, key=KEY), ".weight: got float32[3,3], expected float64"),
    "function": (
        BLOCK,
        eqx.tree_at(lambda block: block.activation, BLOCK, lambda x: x),
        ".activation: got function <function <lambda>",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_carry_that_does_not_fit_shows_the_path(case: str) -> None:
    init, out, line = MISMATCHES[case]
    with pytest.raises(TypeError) as error:
        fori_loop(lambda _: out, init)
    assert line in str(error.value)
    assert "body_fun of fori_loop" in str(error.value)
