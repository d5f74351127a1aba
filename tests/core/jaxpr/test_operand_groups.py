"""Leaves in named groups: taken apart, and put together again."""

from typing import Any, NamedTuple

import pytest

from loopax._src.core.jaxpr.util import (
    append_each,
    flatten,
    map_leaves,
    merge_each,
    reject_each,
    select_each,
    unflatten,
)


class Pair(NamedTuple):
    few: Any
    many: Any


GROUPS = Pair(["a"], ["b", "c", "d"])
MASKS = Pair((False,), (True, False, True))


def test_flatten_and_unflatten_are_inverse():
    assert flatten(GROUPS) == ["a", "b", "c", "d"]
    assert unflatten(GROUPS, flatten(GROUPS)) == GROUPS
    assert unflatten(Pair([], []), []) == Pair([], [])


@pytest.mark.parametrize("leaves", ["abc", "abcde"])
def test_unflatten_refuses_another_number_of_leaves(leaves):
    """Fewer leaves would make a group shorter than its types, more would be lost."""
    with pytest.raises(AssertionError):
        unflatten(GROUPS, leaves)


def test_selected_and_rejected_leaves_are_merged_again():
    true, false = select_each(MASKS, GROUPS), reject_each(MASKS, GROUPS)
    assert (true, false) == (Pair([], ["b", "d"]), Pair(["a"], ["c"]))
    assert merge_each(MASKS, false, true) == GROUPS


def test_leaves_of_several_groups():
    assert map_leaves(str.upper, GROUPS) == Pair(("A",), ("B", "C", "D"))
    assert map_leaves(lambda leaf, keep: leaf if keep else "-", GROUPS, MASKS) == Pair(("-",), ("b", "-", "d"))
    assert append_each(GROUPS, Pair(["x"], [])) == Pair(["a", "x"], ["b", "c", "d"])
