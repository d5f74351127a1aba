"""Pictures of schedules: the same decision as the loops make, and the counts of what really runs."""

import re
from functools import partial
from itertools import islice

import jax
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from docs import schedule_figure
from loopax import schedule
from loopax._src.core.ir.kind import LoopFacts, StepFacts
from loopax._src.core.ir.plan import BlocksThenResiduals, saving_of
from loopax._src.insight.schedule_picture import actions_of
from loopax._src.schedule.binomial import evaluations, evaluations_from
from loopax._src.schedule.online import online
from tests.support.schedule_machine import execute

CHECKPOINTS = [None, 1, 3, 8, pytest.param(20, marks=pytest.mark.slow)]
EACH_BUDGET = pytest.mark.parametrize("checkpoints", CHECKPOINTS)
EACH_LENGTH = pytest.mark.parametrize("length_known", [True, False])
LARGE = 10**6  # bytes of a carry


@pytest.mark.parametrize("residuals", [True, False])
@EACH_LENGTH
@EACH_BUDGET
def test_the_schedule_is_the_one_that_loops_take(checkpoints, length_known, residuals):
    step = StepFacts(LARGE, LARGE if residuals else 10**6 * LARGE, 10.0 * LARGE)
    for n in [*range(40), 400, 1000]:
        kind = lx.Checkpointed(checkpoints)
        bound = n if length_known else None
        plan = kind.plan(LoopFacts(bound, length_known, False, length_known, True, 1.0, lambda: step))
        picture = schedule.picture(n, checkpoints, length_known=length_known, residuals=residuals)
        if plan.stores_residuals:
            assert picture.evaluations == picture.forward == n
        else:
            in_two = isinstance(plan, BlocksThenResiduals)
            taken = plan if in_two else saving_of(plan, bound, LARGE, length_known, has_inverse=False)
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


def loop(counter, checkpoints, length_known, n, x):
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
        gradient = jax.jit(jax.grad(partial(loop, counter, checkpoints, length_known, n)))
        assert counter.of(gradient, 1.0) == schedule.picture(n, checkpoints, length_known=length_known).evaluations


def test_many_steps_are_counted_without_listing_them():
    for length_known in (True, False):
        picture = schedule.picture(10**5, 10, length_known=length_known)
        assert 9 < picture.evaluations / picture.num_steps < 10
        assert "too large" in str(picture)


TEXT = r"""
4 |    / \
3 |   /-+-\
2 |  /       \
1 | /       +-\
0 |/-------+---\
   / forward   + evaluated again   \ derivative   - the carry before this step is stored
5 steps; binomial, known length, at most 2 carries
13 evaluations of the body (2.6 for each step): 5 forward, 3 again, 5 for derivatives
room for 2 carries, at most 2 in use
"""


def test_text():
    assert str(schedule.picture(5, 2)) == TEXT.strip("\n")
    assert str(schedule.picture(0)).startswith("0 steps; every carry\n0 evaluations of the body: 0 forward")
    assert str(schedule.picture(100)).split("\n")[0] == "100 steps; two levels, 10 blocks of 10 steps"


BAD = [
    ((-1,), ValueError, "picture(num_steps=...): got -1, expected at least 0"),
    ((5, 0), ValueError, "picture(checkpoints=...): got 0, expected at least 1, the number of stored carries"),
    ((2.5,), TypeError, "picture(num_steps=...): got float 2.5, expected an int"),
    ((5, "3"), TypeError, "picture(checkpoints=...): got str '3'"),
    ((jax.numpy.int32(5),), TypeError, "picture(num_steps=...): got int32[], expected a Python int"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        schedule.picture(*arguments)
