"""Lane reports and pictures of schedules: what a batch computes for nothing, and what really runs."""

import re
import tracemalloc
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from docs import schedule_figure
from loopax import schedule
from loopax._src.core.ir.kind import LoopFacts, ResidualFacts, StepFacts
from loopax._src.core.ir.plan import BlocksThenResiduals
from loopax._src.insight.schedule_picture import actions_of
from loopax._src.schedule.binomial import evaluations, evaluations_from
from loopax._src.schedule.online import online
from tests.core.batching.counting import LaneCounter
from tests.support.schedule_machine import execute


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
    assert (report.nested.iterations, report.free.iterations) == (8, 6)
    assert report.nested == lx.lane_report([3, 2], [[3, 0, 1], [1, 4, -1]]).nested  # a step that was not taken
    without = lx.lane_report([2], [[0, 0]]).free
    assert without is not None
    assert without.iterations == 3  # the first step begins, and then one for each outer step without an inner one
    table = [line.split() for line in str(report).split("\n")[-4:]]
    assert table[1] == ["lockstep:", "rest", "of", "loop", "1", "3", "6", "83%"]
    assert table[2] == ["free:", "steps", "of", "loop", "2", "5", "10", "90%"]


def three_levels(lanes, counter=lambda x: x):
    """Three loops in each other, the numbers of whose steps are given and returned."""

    def outer(y, row):
        def middle(y, n):
            y, info = lx.fori_loop(0, n, lambda _, y: counter(jnp.sin(y @ jnp.ones((9, 9)))), y, max_steps=9, info=True)
            return 0.9 * y, info.num_steps

        (y, steps), info = lx.scan(middle, y, row[1:], row[0], info=True)
        return jnp.linalg.inv(jnp.eye(9) + 0.01 * jnp.outer(y, y)) @ y, (info.num_steps, steps)

    return lambda y, rows: lx.scan(outer, y, rows, lanes=lanes, info=True)


def test_report_of_three_loops():
    random, counter = np.random.RandomState(0), LaneCounter()
    rows, y = random.randint(0, 9, (20, 6, 9)), random.randn(20, 9)
    counted = lambda how: jax.jit(jax.vmap(three_levels(how, lambda y: y + 0.0 * counter(y[0]))))
    (_, (middle, inner)), info = counted("free")(y, rows)
    blocks = lx.explain(jax.vmap(three_levels("free", lambda y: y + 0.0 * counter(y[0]))), y, rows).loops[0].blocks
    assert [block.waits for block in blocks] == [False, False, True]
    report, without_waiting = (lx.lane_report(info, (middle, inner), blocks=waits) for waits in (blocks, ()))
    assert report.nested is not None
    assert report.free is not None
    assert without_waiting.free is not None
    assert report.nested.iterations == counter.of(counted("lockstep"), y, rows)[0]
    assert report.free.evaluations[0] == counter.of(counted("free"), y, rows)[0]
    assert report.free.evaluations[0] > without_waiting.free.evaluations[0]
    assert report.free.evaluations[2] < without_waiting.free.evaluations[2]
    assert [line.split()[-4] for line in str(report).split("\n")[-3:]] == ["3", "2", "1"]


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
    (jnp.ones(3), None, TypeError, "expected a `LoopInfo` or an array of numbers of steps"),
    (jnp.ones(3, int), jnp.ones(3), TypeError, "lane_report(inner=...)"),
    (halvings(jnp.ones(())), None, TypeError, "lane_report(info=...): got a tuple that holds a `LoopInfo`"),
    (jnp.ones(3, int), jnp.ones((2, 4), int), ValueError, "got shape (2, 4), expected 3 lanes of at least 1 steps"),
    (jnp.ones(3, int), (jnp.ones((3, 1), int), jnp.ones((3, 2, 1), int)), ValueError, "inner[1]=...): got shape"),
    (jnp.full(3, 5), jnp.ones((3, 4), int), ValueError, "expected 3 lanes of at least 5"),
    (np.array([[2, 1], [0, -1]]), None, ValueError, "info[1, 1] is -1, expected 0 or more steps"),
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
    explained = " ".join(str(lx.explain(lambda xs: jax.vmap(loop)(xs).sum(), jnp.ones((lanes, 100)))).split())
    assert (f"Compact(), {lanes} lanes until the slowest is done" in explained) == waits
    stages = str(lx.lane_report(np.arange(lanes))).split("not known")[1].splitlines()[0]
    assert ("as in lockstep" in stages) == waits


CHECKPOINTS = [None, 1, 3, 8, pytest.param(20, marks=pytest.mark.slow)]
EACH_BUDGET = pytest.mark.parametrize("checkpoints", CHECKPOINTS)
EACH_LENGTH = pytest.mark.parametrize("length_known", [True, False])
LARGE = 10**6  # bytes of a carry


@pytest.mark.parametrize("residuals", [True, False])
@EACH_LENGTH
@EACH_BUDGET
def test_the_schedule_is_the_one_that_loops_take(checkpoints, length_known, residuals):
    step, rows = StepFacts(LARGE, 10.0 * LARGE), ResidualFacts(LARGE if residuals else 10**6 * LARGE)
    for n in [*range(40), 400, 1000]:
        kind = lx.Checkpointed(checkpoints)
        bound = n if length_known else None
        facts = LoopFacts(bound, length_known, False, length_known, True, 1.0, False, lambda _: step, lambda _: rows)
        plan = kind.plan(facts)
        picture = schedule.picture(n, checkpoints, length_known=length_known, residuals=residuals)
        if plan.stores_residuals:
            assert picture.evaluations == picture.forward == n
        else:
            in_two = isinstance(plan, BlocksThenResiduals)
            taken = (
                plan
                if in_two
                else plan._saving(bound=bound, carry_bytes=LARGE, length_known=length_known, has_inverse=False)
            )
            assert tuple(actions_of(taken, n, picture.records)) == picture.actions
            assert checkpoints is None or picture.room <= checkpoints


@pytest.mark.parametrize("residuals", [pytest.param(False, marks=pytest.mark.slow), True])
@EACH_LENGTH
@EACH_BUDGET
def test_counts_are_those_of_the_actions(checkpoints, length_known, residuals):
    """The machine also checks each action."""
    for n in [*range(25), 150]:
        picture = schedule.picture(n, checkpoints, length_known=length_known, residuals=residuals)
        cost = execute(picture.actions, n)
        assert cost.evaluations == picture.evaluations == picture.forward + picture.replays + picture.derivatives
        assert cost.most_stored == picture.most_stored <= picture.room
        drawn = schedule_figure.lines(picture.actions)
        counts = [picture.forward, picture.replays, n]
        assert [len(drawn[kind]) for kind in ("forward", "replay", "derivative")] == counts
        assert [begin for begin, _ in drawn["forward"]] == [(i, i) for i in range(n)]
        assert [begin[1] for begin, _ in drawn["derivative"]] == list(range(n, 0, -1))


def test_counts_are_those_of_the_schedules():
    assert schedule.picture(1000, 10).evaluations == evaluations(1000, 10) == 4640
    *_, stored = islice(online(10), 1000)
    unknown = schedule.picture(1000, 10, length_known=False)
    assert unknown.evaluations == evaluations_from(stored, 1000, 10)
    assert schedule.picture(1000, 64).name == "two levels, 36 blocks of 28 steps"
    assert schedule.picture(1000, 1000).evaluations == 2000


def loop_of(counter, checkpoints, length_known, n, x):
    """A carry of 16 KiB, for which blocks are as long as for larger ones."""
    kind, body = lx.Checkpointed(checkpoints), lambda i, c: (c[0] * 0.9 * counter(c[1]), c[1] * 0.9)
    init = (np.full(2048, 0.5), x)
    if length_known:
        return lx.fori_loop(0, n, body, init, kind=kind)[0].sum()
    step = lambda c: (c[0] + 1, *body(0, c[1:]))
    return lx.while_loop(lambda c: c[0] < n, step, (0, *init), kind=kind)[1].sum()


@EACH_LENGTH
@pytest.mark.parametrize("checkpoints", [None, 4])
def test_a_loop_evaluates_its_body_as_often(checkpoints, length_known):
    counter = Counter()
    for n in (6, 30):  # XLA makes one evaluation of the two of a single step
        gradient = jax.jit(jax.grad(partial(loop_of, counter, checkpoints, length_known, n)))
        assert counter.of(gradient, 1.0) == schedule.picture(n, checkpoints, length_known=length_known).evaluations


def test_many_steps_are_counted_without_listing_them():
    for length_known in (True, False):
        picture = schedule.picture(10**5, 10, length_known=length_known)
        assert 9 < picture.evaluations / picture.num_steps < 10
        assert "too large" in str(picture)


def test_text():
    assert str(schedule.picture(0)).startswith("0 steps; every carry\n0 evaluations of the body: 0 forward")
    assert str(schedule.picture(100)).split("\n")[0] == "100 steps; two levels, 10 blocks of 10 steps"


def test_bad_arguments_of_a_picture():
    for arguments, error, message in (
        ((-1,), ValueError, "picture(length=...): got -1, expected at least 0"),
        ((5, 0), ValueError, "picture(checkpoints=...): got 0, expected at least 1, the number of stored carries"),
        ((jax.numpy.int32(5),), TypeError, "picture(length=...): got int32[], expected a Python int"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            schedule.picture(*arguments)
