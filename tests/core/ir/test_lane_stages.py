"""The sizes of a batch whose lanes leave it."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loopax._src.core.ir.lanes import Compact, Stage, group_sizes, stages
from loopax._src.insight import lane_report as occupancy
from loopax._src.insight.nest_report import Nested

COMPACT = st.builds(Compact, st.sampled_from([2, 2.5, 3, 7]), st.integers(1, 50))
STEPS = st.lists(st.integers(0, 30), max_size=80).map(lambda steps: np.array(steps, np.int64))


@given(COMPACT, st.integers(0, 2000))
def test_stages_shrink_down_to_the_fewest_lanes(compact, lanes):
    found = stages(compact, lanes)
    assert found[0].places == lanes
    assert found[-1].leave == 0
    for larger, smaller in pairwise(found):
        assert compact.min_lanes <= smaller.places < larger.places
        assert larger.leave == smaller.places == int(np.ceil(larger.places / compact.shrink))


@given(st.integers(1, 50), st.integers(0, 2000), st.integers(0, 200))
def test_refilled_stages_take_all_lanes(fewest, lanes, most):
    """A stage is as large as what is left, or is refilled; the next one has places for the rest."""
    found = stages(Compact(min_lanes=fewest), lanes, places=lambda left: min(most, left // 4))
    assert found[0].places <= lanes
    assert all(stage.leave == following.places for stage, following in pairwise(found[1:]))
    assert all(stage.places >= min(fewest, lanes) for stage in found)
    assert found[-1].leave == 0


def test_a_shrink_that_is_given_is_kept():
    assert stages(Compact(shrink=4), 64, places=lambda _: 8) == [Stage(64, 16), Stage(16, 4), Stage(4, 0)]


@given(COMPACT, st.integers(0, 2000))
def test_groups_have_a_place_for_every_lane(compact, lanes):
    groups = group_sizes(compact, lanes)
    places = sum(number * size for number, size in groups)
    assert lanes <= places
    assert places - lanes < groups[-1][0]
    assert all(size >= min(compact.min_lanes, lanes) for _, size in groups)


@given(COMPACT, STEPS)
def test_every_step_is_taken_once(compact, steps):
    for stretches in (
        occupancy.lane_report(steps).lockstep,
        occupancy.in_groups(steps, compact),
        occupancy.in_stages(steps, compact),
    ):
        assert sum(int(s.active.sum()) for s in stretches) == steps.sum()
        assert all((s.active <= s.lanes).all() for s in stretches)
        assert sum(s.lane_steps for s in stretches) <= max(len(steps), 1) * steps.max(initial=0) + 60 * 31


def test_nested_loops_by_hand():
    report = occupancy.lane_report([3, 2], [[3, 0, 1], [1, 4, 99]])
    assert report.nested == Nested(3 + 4 + 1, (8, 3), (9 / 16, 5 / 6))
    # The first lane ends outer steps in iterations 4, 5 and 6, the second one in 2 and 6. Both begin in the first.
    assert report.free == Nested(6, (5, 5), (9 / 10, 5 / 10))
