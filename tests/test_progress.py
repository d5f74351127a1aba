"""What loops report while they run: how often, of what, and only once."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.core.ir.annotations import Reporting, Reports
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.core.lowering.rows import Body, LoopState, RowLoop, Steps, Watch
from tests.support.progress_recorder import (
    Recorder,
    counted,
    expected,
    once,
    recorder,
    rolled_out,
    scanned,
    summed,
)

__all__ = ["recorder"]  # a fixture

LOOPS = {"fori": summed, "while": counted, "scan": scanned, "rollout": rolled_out}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_reports_its_steps(recorder, name):
    """Few or many, of one program."""
    loop = LOOPS[name]
    run = jax.jit(lambda n: (loop(n, True), loop(n, None)))
    for n in (35, 0, 1, 2):
        recorder.forget()
        value, silent = jax.block_until_ready(run(n))
        once(recorder, n, -1 if name == "while" else n)
        assert value == silent
        assert set(recorder.lanes) <= {-1}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_reports_its_steps_outside_of_jit(recorder, name):
    jax.block_until_ready(LOOPS[name](35, True))
    once(recorder, 35, -1 if name == "while" else 35)
    assert set(recorder.lanes) == {-1}


AT_THE_EDGES = {
    "no rows": (lambda: lx.scan(lambda c, x: (c + x, c), 0.0, jnp.zeros(0), progress=True), 0),
    "one step at most": (
        lambda: lx.while_loop(lambda x: x < 3.0, lambda x: x + 1.0, 0.0, max_steps=1, throw=False, progress=True),
        1,
    ),
    "stop": (
        lambda: lx.scan(lambda c, x: (c + x, c), 0.0, jnp.ones(30), stop=lambda c, y: c > 20.0, progress=True),
        21,
    ),
}


@pytest.mark.parametrize("name", AT_THE_EDGES)
def test_loops_that_end_early(recorder, name):
    run, steps = AT_THE_EDGES[name]
    run()
    assert recorder.ended == [(1, steps)]
    assert recorder.begun[0][1] == (0 if name == "no rows" else -1)


def test_disable_jit(recorder):
    with jax.disable_jit():
        counted(12, True)
    once(recorder, 12, -1)


@pytest.mark.parametrize("name", LOOPS)
def test_without_progress_the_program_is_the_same(name):
    """No callback, and not one operation more."""
    loop = LOOPS[name]

    def program(progress):
        return jax.jit(jax.grad(lambda x: loop(7, progress) * x)).lower(1.0).as_text()

    assert "callback" not in program(None)
    assert program(None) == program(False)
    assert "callback" in program(True)


# ---- long loops


def test_a_loop_that_counts_no_further_reports_no_more():
    """Started at a position near the largest, as after two thousand million steps."""
    found = Recorder()
    start = jnp.int32(MOST_STEPS - 25)

    def run(_):
        reports = Reports.begin(Reporting(found_reporter(found)), -1)
        watch = Watch(reports, start, None)
        walk = RowLoop(reverse=False, predicated=True, limited=False, watch=watch)
        body = Body(lambda row, _, count: [count < 60, count + 1], [])
        steps = Steps(body, lambda body, row, _, carry: (body(row, *carry), []))
        state = LoopState([jnp.bool_(True), jnp.int32(0)], [], start, watch.first_due(walk))
        return walk.run(steps, state, jnp.int32(MOST_STEPS)).carry[1]

    assert jax.jit(run)(0) == 61
    assert found.steps == expected(25)


def found_reporter(recorder):
    class Direct:
        def begin(self, total, runs, lanes, size):
            return recorder.begin(
                None, "", 0.1, "text", total=total, parts=runs, lanes=lanes, size=size, unit="step"
            ), 1

        def report(self, run, steps, active):
            return recorder.report(run, steps, active, None)

    return Direct()


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"label": 3}, TypeError, "label"),
        ({"every": "soon"}, TypeError, "every"),
        ({"every": True}, TypeError, "every"),
        ({"every": jnp.ones(())}, TypeError, "every"),
        ({"every": 0}, ValueError, "every"),
        ({"every": float("nan")}, ValueError, "every"),
        ({"every": float("inf")}, ValueError, "every"),
        ({"style": "banana"}, ValueError, "'auto', 'tqdm', 'text'"),
    ],
)
def test_bad_progress(arguments, error, words):
    with pytest.raises(error, match=words):
        lx.Progress(**arguments)


@pytest.mark.parametrize("wrong", ["yes", 1, lx.Progress])
def test_what_is_no_progress(wrong):
    with pytest.raises(TypeError, match=r"fori_loop\(progress=...\).*expected True, False, None"):
        summed(3, wrong)


@pytest.mark.parametrize("lanes_map", [True, False])
def test_a_loop_that_is_taken_apart_cannot_show_progress(lanes_map):
    def run():
        if lanes_map:
            return lx.lanes_map(lambda n: summed(n, True), jnp.arange(3))
        return lx.fori_loop(0, 3, lambda i, x: x + summed(i, True), 0.0, lanes="free")

    with pytest.raises(NotImplementedError, match="progress="):
        run()
