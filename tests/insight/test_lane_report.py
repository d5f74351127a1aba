"""`lane_report`: what a batch computes for nothing."""

import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx


def halvings(x):
    return lx.while_loop(lambda x: x >= 1.0, lambda x: x / 2.0, x, info=True)


def test_report_of_a_batch():
    _, info = jax.vmap(halvings)(jnp.array([0.5, 1.0, 3.0, 200.0]))
    report = lx.lane_report(info, lanes=lx.Compact(2, 1))
    assert report.steps.tolist() == [0, 1, 2, 8]
    assert report.useful == 11
    assert report.share(report.lockstep) == 11 / 32
    assert [(s.lanes, s.active.tolist()) for s in report.stages] == [(4, [3]), (2, [2]), (1, [1] * 6)]
    table = str(report).split("\n")
    assert table[0] == "4 lanes, 11 steps: mean 2.75, most 8"
    assert table[2].split() == ["lockstep", "8", "32", "34%"]
    assert table[4].split() == ["compact,", "steps", "not", "known", "8", "12", "92%"]
    _, info = jax.vmap(jax.vmap(halvings))(jnp.ones((2, 3)))
    assert lx.lane_report(info).steps.tolist() == [1] * 6  # all axes are axes of lanes


def test_report_of_nested_loops():
    report = lx.lane_report(jnp.array([3, 2]), np.array([[3, 0, 1], [1, 4, 99]]))
    assert report.nested is not None
    assert report.free is not None
    assert (report.nested.iterations, report.free.iterations) == (8, 5)
    assert report.nested == lx.lane_report([3, 2], [[3, 0, 1], [1, 4, -1]]).nested  # a step that was not taken
    assert [line.split() for line in str(report).split("\n")[-2:]] == [["lockstep", "8", "3"], ["free", "5", "4"]]


def test_runs_of_iterations():
    (stretch,) = lx.lane_report([4, 0, 1, 4]).lockstep
    assert (stretch.lengths.tolist(), stretch.active_in_run.tolist()) == ([1, 3], [3, 2])
    assert stretch.active.tolist() == [3, 2, 2, 2]
    for steps in ([], [0], [0, 0, 0], [7]):
        report = lx.lane_report(np.array(steps, int))
        assert report.share(report.lockstep) == 1.0
        assert str(report)
        report.plot()


def test_plot_draws_what_is_computed_and_what_is_useful():
    report = lx.lane_report(jnp.array([1, 2, 8, 3]), lanes=lx.Compact(2, 1))
    axes = report.plot(report.groups)
    computed, useful = (patch.get_data() for patch in axes.patches)
    assert (computed.values * np.diff(computed.edges)).sum() == sum(s.lane_steps for s in report.groups)
    assert (useful.values * np.diff(useful.edges)).sum() == 14
    assert axes.get_title() == f"{report.share(report.groups):.0%} useful"


BAD = [
    (3.0, None, TypeError, "lane_report(info=...): got float 3.0"),
    (jnp.ones(3), None, TypeError, "expected a `LoopInfo` or an array of numbers of steps"),
    (jnp.ones(3, int), jnp.ones(3), TypeError, "lane_report(inner=...)"),
    (halvings(jnp.ones(())), None, TypeError, "lane_report(info=...): got a tuple that holds a `LoopInfo`"),
    ([[1, 2], [3]], None, TypeError, "lane_report(info=...): got list [[1, 2], [3]], expected"),
    (jnp.ones(3, int), jnp.ones((2, 4), int), ValueError, "got 2 lanes of 4 outer steps, expected 3 lanes"),
    (jnp.full(3, 5), jnp.ones((3, 4), int), ValueError, "expected 3 lanes of at least 5"),
    (np.array([[2, 1], [0, -1]]), None, ValueError, "info[1, 1] is -1, expected 0 or more steps"),
    (np.array(-1), None, ValueError, "lane_report(info=...): info is -1, expected 0 or more steps"),
    ([1, 2], [[1, -9], [-1, 2]], ValueError, "lane_report(inner=...): inner[1, 0] is -1, expected 0 or more steps"),
]


def test_bad_arguments():
    for info, inner, error, message in BAD:
        with pytest.raises(error, match=re.escape(message)):
            lx.lane_report(info, inner)
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(lambda n: lx.lane_report(n).useful)(jnp.arange(3))


@pytest.mark.parametrize("steps", [[10**8, 1, 5], [10**12] * 40])
def test_memory_does_not_depend_on_the_numbers_of_steps(steps):
    tracemalloc.start()
    report = lx.lane_report(steps)
    text = str(report)
    report.plot()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20  # most of it for the picture
    assert [s.iterations for s in report.lockstep] == [max(steps)]
    assert [s.lane_steps for s in report.sequential] == [sum(steps)]
    assert report.share(report.lockstep) == sum(steps) / (len(steps) * max(steps))
    assert str(max(steps)) in text


@pytest.mark.parametrize(("lanes", "waits"), [(6, True), (32, False)])
def test_a_choice_without_an_effect_is_said(lanes, waits):
    """By the report, and by `explain`."""
    body = lambda x: jnp.sin(x) * x / 2
    loop = lambda x: lx.while_loop(lambda x: x[0] > 1.0, body, x, lanes="compact")
    explained = str(lx.explain(lambda xs: jax.vmap(loop)(xs).sum(), jnp.ones((lanes, 100))))
    assert (f"Compact(), {lanes} lanes until the slowest is done" in explained) == waits
    stages = str(lx.lane_report(np.arange(lanes))).split("not known")[1].splitlines()[0]
    assert ("as in lockstep" in stages) == waits
