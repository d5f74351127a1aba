"""The steps of a loop that break: that make an element NaN, or an infinity, which was a number at the start.

The body of such a loop looks at what it returns. What it finds goes through the carry as the `stop` of the loop
(`core/ir/loop.py`), and is put in words when the loop has ended.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.core.finite import NONE, Finite, broken, can_break, first_broken, is_large
from loopax._src.core.ir.loop import NO_STOP
from loopax._src.core.jaxpr.util import forwarded_from
from loopax._src.core.row_buffers import get_p, put_p, view, view_p
from loopax._src.frontend.run_time_checks import Check, KindCheck, at_line, settle
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    convert,
    replace_jaxpr,
    replaces,
    spec_of,
    to_device,
    update_of,
)
from loopax._src.pytrees.leaves import RowByRow, Spec


class Leaf(NamedTuple):
    """An array that is looked at, or a row that is put into a buffer."""

    name: str  # its path in the user's carry or rows
    number: int  # among the leaves of what the loop returns
    shape: tuple[int, ...]
    start: int | None = None  # which array of the carry it is; None: it has no start
    is_put: bool = False  # it is a row that is put into a buffer


class _Look(NamedTuple):
    """How a leaf is looked at: variables of the step."""

    leaf: Leaf
    x: Any
    parts: Sequence[Any] | None = None  # all that is written into a large array
    place: Any = None  # of a row in a buffer of so many, which is not written if it is beyond
    capacity: int = 0
    is_viewed: bool = False  # all rows of a buffer: the step writes them in what is not looked into

    @property
    def variables(self) -> list[Any]:
        """All, in this order."""
        own = [] if self.is_viewed else [self.x]  # a version of a buffer is used once
        return [*own, *(self.parts or []), *([] if self.place is None else [self.place])]


@dataclass(frozen=True)
class Watched:
    """What is looked at after each step: in the order of leaves."""

    finite: Finite
    leaves: tuple[Leaf, ...]

    @property
    def starts(self) -> list[int]:
        """The arrays of the carry whose elements are allowed to be what they are at the start."""
        return [leaf.start for leaf in self.leaves if leaf.start is not None]

    @property
    def names_of_starts(self) -> list[str]:
        """What these are called."""
        return [leaf.name for leaf in self.leaves if leaf.start is not None]

    def allowed(self, start: Any) -> Any:
        """Which elements may be not finite."""
        return broken(start, self.finite) if can_break(start) else jnp.zeros(start.shape, bool)


class Watching(NamedTuple):
    """A step with more results, which are looked at."""

    watched: Watched
    looks: list[_Look]
    program: ClosedJaxpr  # of the step, with these results behind its own

    @classmethod
    def of(
        cls, finite: Finite | None, program: ClosedJaxpr, first: tuple[int, int], carry: Spec, ys: Spec, num_flags: int
    ) -> "Watching | None":
        """Look at a step whose carry stands at `first` of its inputs and of its results; None: nothing can break."""
        if finite is None:
            return None
        first_row = first[1] + len(carry.avals) + num_flags
        looks = [*_of_carry(program, first, carry), *_of_rows(program, first_row, carry, ys)]
        if not looks:
            return None
        more = [x for look in looks for x in look.variables]
        seen = replace_jaxpr(program, program.invars, [*program.outvars, *more])
        return cls(Watched(finite, tuple(look.leaf for look in looks)), looks, seen)

    def stop(
        self, row: Any, allowed: Sequence[Any], carry: list[Any], results: Sequence[Any], stop: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Whether no step has broken, and the new `stop`, from the results that are looked at, and the carry."""
        given, masks, codes = iter(results), iter(allowed), []
        for leaf, _, parts, place, capacity, is_viewed in self.looks:
            if is_viewed and leaf.start is not None:
                x, carry[leaf.start] = view(carry[leaf.start])
            else:
                x = next(given)
            written = None if parts is None else [next(given) for _ in parts]
            may = next(masks) if leaf.start is not None else None
            if place is not None:
                may = jnp.broadcast_to(next(given) >= capacity, x.shape)
            codes.append(first_broken(x, may, self.watched.finite, written))
        which, code = jnp.int32(0), codes[-1]  # those of the first that breaks
        for found in codes[-2::-1]:
            which, code = jnp.where(found != NONE, 0, which + 1), jnp.where(found != NONE, found, code)
        # By choices, each of which needs the one before: XLA makes one kernel of them.
        has_broken, new = code != NONE, []
        changes = has_broken & (stop[0] == NO_STOP[0])
        for number, old in zip((row, which, code.astype(jnp.int32)), stop, strict=True):
            new.append(jnp.where(changes, number, old))
            changes = new[-1] != old
        return ~(has_broken | changes), new


def _of_carry(program: ClosedJaxpr, first: tuple[int, int], carry: Spec) -> Iterator[_Look]:
    """Of the carry: what the step changes."""
    made = {out: eqn for eqn in program.eqns for out in eqn.outvars}
    nodes = jax.tree.leaves(carry.treedef.unflatten(range(len(carry.leaves))), is_leaf=_is_buffer)
    in_buffers = {i for node in nodes if _is_buffer(node) for i in jax.tree.leaves(node._rows)}
    for k, (name, number, aval) in enumerate(zip(carry.names("carry"), carry.numbers, carry.avals, strict=True)):
        old, new = program.invars[first[0] + k], program.outvars[first[1] + k]
        if not can_break(aval) or forwarded_from(program, new) is old:
            continue
        leaf = Leaf(name, number, aval.shape, k)
        writes = _writes(made, new, old)
        if number in in_buffers:
            if writes is None:
                yield _Look(leaf, new, is_viewed=True)
            for eqn in writes or []:
                rows, place, row = eqn.invars
                put = leaf._replace(shape=row.aval.shape, start=None, is_put=True)
                yield _Look(put, row, None, place, rows.aval.shape[0])
        else:
            parts = [eqn.invars[2] if eqn.primitive is put_p else update_of(eqn) for eqn in writes or []]
            is_part = is_large(aval) and parts and sum(_size(part) for part in parts) < _size(new)
            yield _Look(leaf, new, parts if is_part else None)


def _of_rows(program: ClosedJaxpr, first: int, carry: Spec, ys: Spec) -> Iterator[_Look]:
    """Of the rows: all."""
    for k, (name, number, aval) in enumerate(zip(ys.names("ys"), ys.numbers, ys.avals, strict=True)):
        if can_break(aval):
            yield _Look(Leaf(name, len(carry.leaves) + number, aval.shape), program.outvars[first + k])


def _is_buffer(node: Any) -> bool:
    return isinstance(node, RowByRow)


def _size(atom: Any) -> int:
    return prod(atom.aval.shape)


def _writes(made: dict[Any, Any], new: Any, old: Any) -> list[Any] | None:
    """The equations that make a version of an array from another by writing parts of it; None: there are others."""
    writes = []
    while new is not old:
        eqn = None if isinstance(new, Literal) else made.get(new)
        if eqn is None or not (eqn.primitive in (get_p, view_p, put_p) or replaces(eqn)):
            return None
        writes += [] if eqn.primitive in (get_p, view_p) else [eqn]
        new = eqn.invars[0]
    return writes


def broken_by(
    finite: Finite, begun: Sequence[Any], arrays: Sequence[Any], spec: Spec, carry: Sequence[Any], ys: Any, y_spec: Spec
) -> tuple[Watched, list[Any]]:
    """What a step looks at that has been taken in Python, and what `first_broken` says of each."""
    names, numbers = spec.names("carry"), spec.numbers
    leaves, codes = [], []
    for k, (old, new) in enumerate(zip(arrays, carry, strict=True)):
        if can_break(new) and new is not old:
            leaves.append(Leaf(names[k], numbers[k], new.shape, k))
            start = begun[k]
            codes.append(first_broken(new, broken(start, finite) if can_break(start) else None, finite))
    for name, number, y in zip(y_spec.names("ys"), y_spec.numbers, ys, strict=True):
        if can_break(y):
            leaves.append(Leaf(name, len(spec.leaves) + number, y.shape))
            codes.append(first_broken(y, None, finite))
    return Watched(finite, tuple(leaves)), codes


# What has been found, when the loop has ended.


@dataclass(frozen=True)
class Broken:
    """How a loop ended that looks at its steps: before one that broke, or not."""

    watched: Watched
    stop: Sequence[Any]  # as `NO_STOP`
    num_steps: Any

    @property
    def is_broken(self) -> Any:
        """Whether a step broke: bool[]."""
        return self.stop[0] != NO_STOP[0]

    @property
    def step(self) -> Any:
        """Which: int32[], -1 if none."""
        return jnp.where(self.is_broken, self.num_steps, -1)

    @property
    def leaf(self) -> Any:
        """The number of the first leaf that broke: int32[], -1 if none."""
        numbers = jnp.array([leaf.number for leaf in self.watched.leaves], jnp.int32)
        return jnp.where(self.is_broken, numbers[self.stop[1]], -1)

    def check(self, call: str, carry: Sequence[Any]) -> Check:
        """The error of such a loop, from the arrays of its last carry."""
        before = [_element(carry[leaf.start], self.stop[2]) for leaf in self.watched.leaves if leaf.start is not None]
        dtypes = [x.dtype for x in before]
        wide = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes)  # of a complex dtype, the bits of its parts
        dtype = jnp.dtype("float64" if wide else "float32")
        if any(jnp.issubdtype(x, jnp.complexfloating) for x in dtypes):
            dtype = jnp.dtype("complex128" if wide else "complex64")
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # JAX takes numbers of 64 bits out of no program in 32-bit mode
        values = [convert(x, dtype) for x in before]
        of_leaves = iter(values)
        zero = jnp.zeros((), dtype)
        by_leaf = jnp.stack([zero if leaf.start is None else next(of_leaves) for leaf in self.watched.leaves])
        message = BrokenStep(at_line(call), self.watched)
        return Check(self.is_broken, message, [self.num_steps, self.stop[1], self.stop[2], by_leaf[self.stop[1]]])


def _element(x: Any, code: Any) -> Any:
    """The element of which `first_broken` tells."""
    x, number = to_device(x), code.astype(jnp.uint32) // 2
    if not x.shape:
        return x
    if any(spec_of(jax.typeof(x))):  # JAX gathers nothing from what is spread over an `Explicit` mesh
        places = jnp.unravel_index(number.astype(jnp.int32), x.shape)
        for axis, place in reversed(list(enumerate(places))):
            is_it = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) == place
            x = jnp.sum(jnp.where(is_it, x, jnp.zeros((), x.dtype)), axis, dtype=x.dtype)
        return x
    return x.reshape(-1)[jnp.minimum(number, x.size - 1)]


class Backward(KindCheck):
    """`Loop.watch` of a loop that the user calls now."""

    is_part = False

    def of_part(self) -> "Backward":
        """Of a loop that takes some of the steps, or windows of them: it does not know which number a step has."""
        part = copy(self)
        part.is_part = True
        return part

    def __call__(self, results: Any, failed: Any, step: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An error where a cotangent broke, in this step or, if it is negative, in one that is not known."""
        number = jnp.full_like(step, -1) if self.is_part else step
        return settle(results, [Check(failed, BrokenCotangent(self.where), [number], self.stack)])

    @property
    def _facts(self) -> Any:
        return super()._facts, self.is_part


@dataclass(frozen=True)
class BrokenCotangent:
    """The message of a step whose derivative broke."""

    call: str

    def __call__(self, numbers: Sequence[Any]) -> str:
        """In words."""
        step, *rows = numbers or [-1]
        which = f"step {step} (the first is 0){_around(rows)}" if step >= 0 else "a step"
        return (
            f"{self.call}: in reverse mode, {which} made a cotangent NaN or infinite. What the step returns is finite. "
            "Its derivative is not, as that of `jnp.sqrt` at 0 (also in a branch of `jnp.where` that is not chosen), "
            "or cotangents have grown beyond what the dtype holds."
        )


def _around(rows: Sequence[Any]) -> str:
    return "".join(f", in row {row} of the loop around it" for row in rows)


@dataclass(frozen=True)
class BrokenStep:
    """The message of a step that broke; the numbers are those of `Broken.check`, and rows of loops around it."""

    call: str
    watched: Watched

    def __call__(self, numbers: Sequence[Any]) -> str:
        """In words."""
        if not numbers:
            return f"{self.call}: a step made a number NaN{' or infinite' * (self.watched.finite is True)}."
        step, which, code, before, *rows = numbers
        leaf, code = self.watched.leaves[int(which)], int(np.uint32(code))
        index = ", ".join(map(str, np.unravel_index(code // 2, leaf.shape)))
        name = self._name(leaf) + (f"[{index}]" if index else "")
        what = "infinite" if code % 2 else "NaN"
        value = before.item()
        value = value if np.imag(value) else np.real(value)
        was = f"; it was {value:.6g} before" if leaf.start is not None else ""
        of_row = ", in the row that is put into it" if leaf.is_put else ""
        allow = " To allow infinities, give finite='nan'." if code % 2 else ""
        return (
            f"{self.call}: step {step} (the first is 0){_around(rows)} made {name} {what}{of_row}{was}. The loop ended "
            f"before this step.{allow}"
        )

    def leaf_number(self, numbers: Sequence[Any]) -> int:
        """The number of the leaf that broke."""
        return self.watched.leaves[int(numbers[1])].number

    def _name(self, leaf: Leaf) -> str:
        """As the user knows it: a rollout carries more than it is given."""
        name = leaf.name.replace("._rows", "")
        for own, shown in _OF_ROLLOUT.items() if self.call.startswith("loopax.rollout") else ():
            name = shown + name.removeprefix(own) if name.startswith(own) else name
        return name


_OF_ROLLOUT = {"carry.state": "state", "carry.history": "history", "carry.saved": "outputs", "ys": "outputs"}
