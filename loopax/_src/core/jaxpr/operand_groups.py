"""Leaves in named groups, in place of offsets into a flat list.

JAX hands a rule its operands as one flat list. A rule puts them into a NamedTuple with a sequence for each group, and
whatever belongs to each operand (its type, its tangent, whether it is known) into another one of the same class. These
functions work on all groups at once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from loopax._src.core.jaxpr.util import merge_lists, reject, select, split_list

Groups = TypeVar("Groups", bound=tuple[Sequence[Any], ...])


def flatten(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """The leaves of all groups in one list."""
    return [leaf for group in groups for leaf in group]


def unflatten(groups: Groups, leaves: Iterable[Any]) -> Groups:
    """The inverse of `flatten`: leaves in groups as long as those given."""
    leaves, sizes = list(leaves), list(map(len, groups))
    assert len(leaves) == sum(sizes)
    return _of_same_class(groups, split_list(leaves, sizes)[:-1])


def map_leaves(function: Callable[..., Any], groups: Groups, *others: Groups) -> Groups:
    """Apply a function to each leaf, with those at its place in others. Groups are tuples then: masks are hashable."""
    return _of_same_class(groups, (tuple(map(function, *group)) for group in zip(groups, *others, strict=True)))


def select_each(masks: Groups, groups: Groups) -> Groups:
    """Of each group, the leaves whose mask is True."""
    return _of_same_class(groups, map(select, masks, groups))


def reject_each(masks: Groups, groups: Groups) -> Groups:
    """Of each group, the leaves whose mask is False."""
    return _of_same_class(groups, map(reject, masks, groups))


def merge_each(masks: Groups, false: Groups, true: Groups) -> Groups:
    """The inverse of `reject_each` and `select_each`."""
    return _of_same_class(false, map(merge_lists, masks, false, true))


def fill_each(masks: Groups, false: Any, true: Groups) -> Groups:
    """Like `merge_each`, with one value for all leaves whose mask is False."""
    return merge_each(masks, _of_same_class(masks, ([false] * mask.count(False) for mask in masks)), true)


def append_each(groups: Groups, more: Groups) -> Groups:
    """Each group with the leaves of another one behind its own."""
    return _of_same_class(groups, ([*group, *others] for group, others in zip(groups, more, strict=True)))


def _of_same_class(groups: Groups, values: Iterable[Sequence[Any]]) -> Groups:
    return type(groups)(*values)
