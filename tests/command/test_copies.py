"""Copies in loops are found in compiled programs, and only those that cost something in every step."""

import jax.numpy as jnp
import pytest
from jax import lax

from loopax._command import copies
from loopax._command.copies import CopyTest, Verdict, copied_in_steps, judge
from tests.command.copying import swapped


def test_a_copy_in_every_step_is_found():
    verdict = judge(CopyTest("swapped", swapped), gradient=False)
    assert verdict.fails
    assert verdict.status.startswith("FAILS: copy f")
    assert "[2063,16] in every step" in verdict.status
    known = judge(CopyTest("swapped", swapped, known="so it is"), gradient=False)
    assert not known.fails
    assert known.status.startswith("copies, as is known (so it is): copy f")


def test_rows_in_place_are_well_unless_they_are_stored_again_and_again():
    one_row = lambda capacity, x, n: lax.fori_loop(
        0, n, lambda i, rows: rows.at[i].set(x), jnp.zeros((capacity, x.size))
    ).sum()
    verdict = judge(CopyTest("one row", one_row), gradient=False)
    assert verdict.copies == []
    assert verdict.status == "ok"
    assert Verdict("", 40.0, [], "").status == "FAILS: stores the rows 40 times"
    assert Verdict("", 40.0, [], "known").fails


@pytest.mark.parametrize("program", copies.programs(), ids=lambda p: p.name)
def test_loops_of_loopax(program):
    for verdict in copies.verdicts(program):
        assert verdict.status == "ok" or (program.known and "as is known" in verdict.status)


HLO = """HloModule program

%fused (p: f32[100,2], q: f32[2]) -> f32[100,2] {
  %p = f32[100,2]{1,0} parameter(0)
  %wide = f32[100,2]{1,0} broadcast(%q), dimensions={1}
  ROOT %written = f32[100,2]{1,0} FUSED
}

%step (s: (s32[], f32[100,2])) -> (s32[], f32[100,2]) {
  %c = f32[100,2]{1,0} STEP
  %f = f32[100,2]{1,0} fusion(%c), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[100,2]{1,0}) tuple(%i, %f)
}

%goes_on (s: (s32[], f32[100,2])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%block (s: (s32[], f32[100,2])) -> (s32[], f32[100,2]) {
  %kept = f32[100,2]{1,0} copy(%c)
  ROOT %w = (s32[], f32[100,2]{1,0}) while(%s), condition=%goes_on, body=%step
}

ENTRY %main (x: f32[100,2]) -> f32[100,2] {
  %outside = f32[100,2]{1,0} copy(%x)
  %w = (s32[], f32[100,2]{1,0}) while(%s), condition=%goes_on, body=%block
  ROOT %y = f32[100,2]{1,0} get-tuple-element(%w), index=1
}
"""


COUNTED = [
    ("bitcast(%b)", "dynamic-update-slice(%p, %wide, %i)", []),
    ("copy(%b)", "dynamic-update-slice(%p, %wide, %i)", ["copy f32[100,2]"]),
    ("add(%a, %b)", "dynamic-update-slice(%p, %wide, %i)", ["add f32[100,2]"]),
    ("bitcast(%b)", "select(%p, %wide)", ["select f32[100,2]"]),
    ("copy(%b)", "copy(%p)", ["copy f32[100,2]"] * 2),
]


@pytest.mark.parametrize(("step", "fused", "found"), COUNTED)
def test_what_counts(step, fused, found):
    """Steps of innermost loops; in a fusion its result, whatever it is made of on the way."""
    text = HLO.replace("STEP", step).replace("FUSED", fused)
    assert copied_in_steps(text, 200) == found
    assert copied_in_steps(text, 201) == []
