"""The two-level schedule, carried out on a machine that checks every action."""

from math import ceil, isqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopax._src.schedule.blocks import (
    FOR_EVEN_BLOCKS,
    SMALL_STORE_BYTES,
    block_size,
    last_steps,
    shortest_block,
    two_level,
)
from tests.support.schedule_machine import execute


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 20, 300])
def test_every_length(block, records):
    for n in range(200):
        cost = execute(two_level(n, block, records), n)
        assert cost.evaluations == (2 * n if records else 3 * n - ceil(n / block))
        assert cost.most_stored <= ceil(n / block) + min(block, n)


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_block_size_stores_two_square_roots_or_little(bound, carry_bytes):
    block = block_size(bound, carry_bytes)
    stored = ceil(bound / block) + block
    assert block >= 1
    assert stored <= 2 * (isqrt(bound) + 1) or ceil(bound / block) * carry_bytes <= SMALL_STORE_BYTES


@given(st.integers(1, 10**5), st.integers(1, 10**4))
def test_blocks_of_a_static_length_divide_it_if_that_costs_little(bound, carry_bytes):
    size, even = block_size(bound, carry_bytes), block_size(bound, carry_bytes, is_fixed=True)
    stored = lambda size: ceil(bound / size) + size
    assert even == size or bound % even == 0
    assert stored(even) <= FOR_EVEN_BLOCKS * stored(size)
    assert 3 * bound - bound / even <= FOR_EVEN_BLOCKS * (3 * bound - bound / size)


def test_usual_lengths_have_even_blocks():
    lengths = (20, 50, 60, 100, 128, 200, 252, 300, 400, 500, 1000, 1024, 1500, 2000, 10_000)
    assert all(bound % block_size(bound, carry, is_fixed=True) == 0 for bound in lengths for carry in (12, 64, 4096))


def test_particular_numbers():
    """The square root for ordinary carries; how much of the last steps fits; too little room for two levels."""
    assert [block_size(bound, 1_000) for bound in (10_000, 9_999, 1, 0)] == [100, 100, 1, 1]
    for checkpoints, evaluations in ((500, 1.5), (64, 1.96), (1000, 1.0)):
        found = last_steps(1000, checkpoints, 1, 1)
        assert found is not None
        assert 2 - found.recorded / 1000 <= 1.01 * evaluations
    assert last_steps(1000, 63, 1, 1) is last_steps(1000, 100, 1, 100) is None


@given(st.integers(0, 120), st.integers(0, 200), st.integers(1, 4), st.integers(0, 4))
def test_last_steps(num_steps, checkpoints, carry, residuals):
    """What they say fits, and is evaluated as often as they say; one more does not fit."""
    room = checkpoints * carry
    found = last_steps(num_steps, checkpoints, carry, residuals)
    if found is None:
        return
    cost = execute(two_level(num_steps, found.block, True, found.recorded), num_steps, carry, residuals)
    assert cost.most_stored <= room
    assert cost.evaluations == 2 * num_steps - found.recorded
    starts = ceil((num_steps - found.recorded) / found.block)
    one_more = starts * carry + (found.recorded + 1) * max(residuals, 1)  # residuals without a size count as 1
    assert starts == 0 or one_more > room or found.recorded == num_steps - 1


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_shortest_block_stores_at_most_so_many(bound, checkpoints):
    block = shortest_block(bound, checkpoints)
    if block is None:
        assert checkpoints < 2 * isqrt(bound) + 1
    else:
        assert ceil(bound / block) + block <= checkpoints
