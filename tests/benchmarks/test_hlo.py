"""The HLO that is compared before and after a change of the code: what is the same program, and what is not."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from benchmarks.hlo import normalised

ONE = """HloModule jit_f, entry_computation_layout={(f32[])->f32[]}

%add.1 (x.2: f32[], y.3: f32[]) -> f32[] {
  %x.2 = f32[] parameter(0)
  %y.3 = f32[] parameter(1)
  ROOT %sum = f32[] add(%x.2, %y.3)
}

ENTRY %main.9 (a.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0), metadata={op_name="a"}
  %two = f32[] constant(2)
  %sine = f32[] sine(%a.1)
  %print = () custom-call(%sine), custom_call_target="print", custom_call_has_side_effect=true
  %half = f32[] divide(%a.1, %two), metadata={op_name="b"}
  ROOT %out = f32[] call(%sine, %half), to_apply=%add.1
}
"""
LINES = ONE.split("\n")


def test_order_and_names_do_not_count():
    other = "\n".join(LINES[i] for i in [0, 1, *range(8, len(LINES)), *range(2, 8)])  # the entry first
    assert normalised(other) == normalised(ONE)
    other = ONE.replace("%sine", "%s").replace("%add.1", "%plus").replace('op_name="b"', 'op_name="c"')
    assert normalised(other) == normalised(ONE)
    sine, half = LINES[12] + "\n" + LINES[13] + "\n", LINES[14] + "\n"
    assert sine + half in ONE
    assert normalised(ONE.replace(sine + half, half + sine)) == normalised(ONE)


@pytest.mark.parametrize(
    "change",
    [("constant(2)", "constant(3)"), ("divide(%a.1, %two)", "divide(%two, %a.1)"), ("add(%x", "subtract(%x")],
    ids=str,
)
def test_what_is_computed_counts(change):
    assert normalised(ONE.replace(*change)) != normalised(ONE)


def test_a_seeded_change_of_one_constant_in_a_compiled_loop_is_seen():
    def text(constant):
        f = lambda x: lx.fori_loop(0, 5, lambda i, c: jnp.sin(c) * constant, x)
        return normalised(jax.jit(jax.grad(f)).lower(1.0).compile().as_text() or "")

    assert text(1.5) == text(1.5) != text(1.25)
