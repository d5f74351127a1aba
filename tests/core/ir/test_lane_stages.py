"""The sizes of a batch whose lanes leave it."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loopax._src.core.ir.annotations import Stages
from loopax._src.insight import lane_report as occupancy

STAGES = st.builds(Stages, st.sampled_from([2, 2.5, 3, 7]), st.integers(1, 50))
STEPS = st.lists(st.integers(0, 30), max_size=80).map(lambda steps: np.array(steps, np.int64))


@given(STAGES, st.integers(0, 2000))
def test_stages_shrink_down_to_the_fewest_lanes(stages, lanes):
    sizes = stages.sizes(lanes)
    assert sizes[0] == lanes
    for larger, smaller in pairwise(sizes):
        assert stages.min_lanes <= smaller < larger
        assert smaller == int(np.ceil(larger / stages.shrink))


@given(STAGES, st.integers(0, 2000))
def test_groups_have_a_place_for_every_lane(stages, lanes):
    groups = stages.groups(lanes)
    places = sum(number * size for number, size in groups)
    assert lanes <= places
    assert places - lanes < groups[-1][0]
    assert all(size >= min(stages.min_lanes, lanes) for _, size in groups)


@given(STAGES, STEPS)
def test_every_step_is_taken_once(stages, steps):
    for stretches in (
        occupancy.lockstep(steps),
        occupancy.in_groups(steps, stages),
        occupancy.in_stages(steps, stages),
    ):
        assert sum(int(s.active.sum()) for s in stretches) == steps.sum()
        assert all((s.active <= s.lanes).all() for s in stretches)
        assert sum(s.lane_steps for s in stretches) <= max(len(steps), 1) * steps.max(initial=0) + 60 * 31


def test_nested_loops_by_hand():
    inner = [np.array([3, 0, 1]), np.array([1, 4])]
    assert occupancy.nested_lockstep(inner) == occupancy.Nested(iterations=3 + 4 + 1, outer_evaluations=3)
    # The first lane ends outer steps in iterations 3, 4 and 5, the second one in 1 and 5.
    assert occupancy.free_lanes(inner) == occupancy.Nested(iterations=5, outer_evaluations=4)
