"""The binomial schedule against the optimum of a dynamic program, on a machine that checks every action."""

from functools import cache
from itertools import product
from math import comb

import jax
import numpy as np
import pytest

from loopax._src.schedule.binomial import _division, advance, binomial, divisions, evaluations
from tests.schedule.lengths import SLOTS, STEPS, each_number_of_slots, lengths
from tests.support.schedule_machine import execute


@cache
def fewest_evaluations():
    """For n steps (rows) and c slots (columns), without any theory: try every place for the next stored carry.

    `replayed` are the advances that reverse a segment which starts with a stored carry.
    """
    replayed = np.zeros((STEPS + 1, SLOTS + 1), np.int64)
    walked = np.zeros_like(replayed)
    for c in range(1, SLOTS + 1):
        for n in range(1, STEPS + 1):
            m = np.arange(1, n)
            replayed[n, c] = n * (n - 1) // 2
            if c > 1 and n > 1:
                replayed[n, c] = (m + replayed[n - m, c - 1] + replayed[m, c]).min()
            walked[n, c] = replayed[n, c]
            if c > 1 and n > 1:
                walked[n, c] = min(walked[n, c], (replayed[m, c] + walked[n - m, c - 1]).min())
    return walked + 2 * np.arange(STEPS + 1)[:, None]


@each_number_of_slots()
def test_as_few_evaluations_as_possible(slots):
    for n in lengths(slots):
        cost = execute(binomial(n, slots), n)
        assert cost.evaluations == evaluations(n, slots) == fewest_evaluations()[n, slots]
        assert cost.most_stored <= min(n, slots)


@pytest.mark.parametrize(("slots", "most"), [(3, 13.16), (10, 4.64), (20, 3.75), (44, 2.96)])
def test_a_thousand_steps(slots, most):
    """Within 5 % of the binomial optimum with the last step turned round on the way, r n - C(c + r, r - 1) + n."""
    repetitions = next(r for r in range(100) if comb(slots + r, slots) >= 1000)
    optimum = repetitions * 1000 - comb(slots + repetitions, repetitions - 1) + 1000
    assert most - 0.01 < optimum / 1000 <= most
    assert optimum < evaluations(1000, slots) <= 1.05 * optimum


def compiled_advance(num_steps, slots):
    return divisions(num_steps, slots).divided(num_steps, slots).distance


def test_compiled_as_in_python():
    n, c = np.meshgrid(np.arange(2, STEPS + 1), np.arange(1, SLOTS + 1))
    compiled = jax.jit(compiled_advance)(n.astype(np.int32), c.astype(np.int32))
    assert compiled.tolist() == np.vectorize(advance)(n, c).tolist()
    for num_steps, slots in product((10**5, 2**31 - 1), (1, 3, 7, 50, 10_000)):
        assert int(jax.jit(compiled_advance)(np.int32(num_steps), np.int32(slots))) == advance(num_steps, slots)


def test_parts_are_divided_as_if_they_were_alone():
    """The steps to advance in any part of any part follow from the division of the whole."""
    pending = [(n, c, _division(n, c)) for c in (2, 3, 5, 8) for n in (2, c + 1, c + 2, 30, 100, 357)]
    while pending:
        n, c, division = pending.pop()
        if c == 1 or n <= c + 1:
            continue
        passed, ahead = division.parts(c)
        distance = min(division.below, n - ahead.below)
        assert distance == advance(n, c)
        assert not division.is_too_low(n, c)
        pending += [(distance, c, passed), (n - distance, c - 1, ahead)]
