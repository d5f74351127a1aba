"""Sums in the body of a loop that are made in place: what a step adds to a few elements touches these alone.

The transpose of a read, `x[i]`, is an array of zeros with one row in it. A body that adds it to the cotangent of `x`,
a leaf of its carry, would write three whole arrays in each step::

    Before: carry + scatter(zeros, i, row)
    After: the carry, with the row added at i

So a body is evaluated on arrays that are not made yet (`jaxi.Updated`): zeros, or a leaf of the carry, and updates of
it. Moves, sums, choices and branches make others of them. What anything else reads is made as the body makes it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from operator import or_
from typing import Any, NamedTuple

import jax
import numpy as np

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again, trace, weakly_cached
from loopax._src.jax_internals import Base, ClosedJaxpr, Literal, Primitive, Update, Updated, equations_in, jaxpr_as_fun


class Carried(NamedTuple):
    """A leaf that a loop carries: which operand is its start, which result its end, and where it is in the body."""

    operand: int
    result: int
    body: ClosedJaxpr
    input: int
    output: int


# Of the primitives that are loops: the leaves that an equation carries.
carried_by: dict[Primitive, Callable[[Any], Iterator[Carried]]] = {}


def _carried_by(eqn: Any) -> Iterator[Carried]:
    if jaxi.is_scan(eqn) and (loop := jaxi.lax_loop(eqn)) is not None:
        for output, i in enumerate(loop.carry_range):
            yield Carried(i, output, loop.body, i, output)
    elif eqn.primitive in carried_by:
        yield from carried_by[eqn.primitive](eqn)


# Smaller arrays are read and written whole within the time that finding an element takes. And updates of a large part
# of an array take longer than all of it.
_MIN_ELEMENTS = 256
_LARGEST_PART = 1 / 4


def is_large(aval: Any) -> bool:
    """Whether updates of a few elements of such an array take less time than all of it."""
    return jaxi.may_be_updated(aval) and prod(aval.shape) >= _MIN_ELEMENTS


def _pays(x: Updated) -> bool:
    """Whether to update some elements of a large array rather than to add others to all of them."""
    touched = [update.value.size for update in x.updates if update.form is not None]
    return bool(touched) and sum(touched) <= _LARGEST_PART * prod(x.aval.shape)


class _Uses:
    """Where the values of a program go."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self._made = {variable for eqn in closed.eqns for variable in eqn.outvars}
        self._of: dict[Any, list[Any]] = {}  # equations, and the numbers of outputs
        for user, atoms in (*((eqn, eqn.invars) for eqn in closed.eqns), *enumerate([x] for x in closed.outvars)):
            for atom in atoms:
                if not isinstance(atom, Literal):
                    self._of.setdefault(atom, []).append(user)

    def made_for_one(self) -> set[Any]:
        """The results of equations that go to one other equation alone."""
        alone = {variable for variable, users in self._of.items() if len(users) == 1}
        return alone & self._made

    def sum_of(self, variable: Any) -> int | None:
        """The output that is a sum with this value, and with what does not depend on it; None: there is none."""
        while True:
            users = self._of.get(variable, [])
            if len(users) != 1 or isinstance(users[0], int):
                return users[0] if len(users) == 1 else None
            (eqn,) = users
            results = [leaf.result for leaf in added_to_by(eqn) if eqn.invars[leaf.operand] is variable]
            if jaxi.is_sum(eqn) and eqn.invars[0].aval.shape == eqn.invars[1].aval.shape:
                variable = eqn.outvars[0]
            elif results:
                variable = eqn.outvars[results[0]]
            else:
                return None


def added_to_by(eqn: Any) -> list[Carried]:
    """The leaves to which a loop only adds."""
    return [leaf for leaf in _carried_by(eqn) if _is_added_to(leaf.body, leaf.input, leaf.output)]


@weakly_cached
def _is_added_to(body: ClosedJaxpr, i: int, output: int) -> bool:
    return is_large(body.in_avals[i]) and _Uses(body).sum_of(body.invars[i]) == output


class _Evaluation:
    """The evaluation of a program on arrays that may not be made yet."""

    def __init__(self, closed: ClosedJaxpr, bases: Iterable[Base], starts: "_Starts") -> None:
        self.closed = closed
        self.bases = {id(base.array): base for base in bases}
        self.starts = starts
        self.of_one_use = _Uses(closed).made_for_one()
        self.made: dict[int, tuple[Any, Any]] = {}  # arrays by the identity of what is made, which they keep alive
        self.masks: dict[int, tuple[Any, Any, tuple[int, ...]]] = {}  # broadcast masks likewise, from what, along what
        self.is_changed = False

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The results; those that are not made yet are `Updated`."""
        self.values = jaxi.constants_of(self.closed) | dict(zip(self.closed.invars, inputs, strict=True))
        leaves = [variable for sums in self.starts.values() for _, variable in sums.values()]
        # With these an inner loop may have begun its sums: all else is added to them.
        self.begun = {id(self.bases[id(self.values[variable])]) for variable in leaves}
        for eqn in self.closed.eqns:
            operands = [self._read(atom) for atom in eqn.invars]
            with jaxi.equation_context(eqn):
                results = self._equation(eqn, operands)
            self.values.update(zip(eqn.outvars, results, strict=True))
        return [self._read(atom) for atom in self.closed.outvars]

    def _read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def array(self, x: Any) -> Any:
        """An array, made if it is not yet: in place where it is an array with updates of some elements."""
        if not isinstance(x, Updated):
            return x
        if id(x) not in self.made:
            is_in_place = x.base is not None and (x.base.is_changed or _pays(x))
            self.is_changed |= is_in_place
            if is_in_place or x.source is None:
                self.made[id(x)] = x, x.array()
            else:
                eqn, operands = x.source
                with jaxi.equation_context(eqn):
                    (result,) = bind_again(eqn, list(map(self.array, operands)))
                self.made[id(x)] = x, result
        return self.made[id(x)][1]

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if jaxi.updates(eqn):  # all but the first are what is written, and where
            operands = [operands[0], *map(self.array, operands[1:])]
        rule = self._sum if jaxi.is_sum(eqn) else self._choice if jaxi.is_select(eqn) else jaxi.updated_by
        # A literal may be a number of Python, without a shape.
        pairs = zip(eqn.invars, operands, strict=True)
        given = [np.asarray(x, jax.typeof(x).dtype) if isinstance(atom, Literal) else x for atom, x in pairs]
        if (found := rule(eqn, given)) is not None:
            return [found._replace(source=(eqn, operands))]
        if jaxi.is_jit(eqn) and (program := jaxi.called(eqn)) is not None:
            inner = _Evaluation(program, self.bases.values(), {})
            inner.masks = self.masks
            results = inner.run(operands)
            self.is_changed |= inner.is_changed
            return results
        if (results := self._branches(eqn, operands)) is not None:
            return results
        if jaxi.is_scan(eqn) or eqn.primitive in carried_by:
            return self._loop(eqn, operands)
        operands = list(map(self.array, operands))
        results = list(bind_again(eqn, operands))
        if found := jaxi.broadcast_from(eqn, operands[0]) if operands else None:
            self.masks[id(results[0])] = results[0], *found
        return results

    def as_updated(self, x: Any, aval: Any) -> Updated | None:
        """A value as an array with updates; None: it is another array."""
        if isinstance(x, Updated):
            return x
        return Updated(aval, base=self.bases[id(x)]) if id(x) in self.bases else None

    def _sum(self, eqn: Any, operands: list[Any]) -> Updated | None:
        aval = eqn.outvars[0].aval
        if any(atom.aval.shape != aval.shape for atom in eqn.invars):
            return None
        parts = [self.as_updated(x, aval) for x in operands]
        if parts == [None, None]:
            return None
        for i, (atom, part) in enumerate(zip(eqn.invars, parts, strict=True)):
            other = parts[1 - i]
            if part and other and part.base and other.base and id(other.base) in self.begun:
                parts[i] = Updated(aval, (Update(self.array(part)),))
            elif other and not (part or other.base or isinstance(atom, Literal)) and atom in self.of_one_use:
                parts[i] = Updated(aval, base=Base(operands[i]))  # an array that nobody else knows may be changed, too
        if all(part and part.base for part in parts):
            return None
        a, b = (part or Updated(aval, (Update(x),)) for part, x in zip(parts, operands, strict=True))
        return Updated(aval, (*a.updates, *b.updates), a.base or b.base)

    def _choice(self, eqn: Any, operands: list[Any]) -> Updated | None:
        """Of arrays that are made of the same one: it, with the updates of all, each where it is chosen."""
        (which, *cases), aval = operands, eqn.outvars[0].aval
        parts = [part for x in cases if (part := self.as_updated(x, aval)) is not None]
        if len(parts) < len(cases) or any(part.base is not parts[0].base for part in parts):
            return None
        _, mask, axes = (None, which, ()) if not which.shape else self.masks.get(id(which), (None, None, ()))
        if mask is None or not any(part.updates for part in parts):
            return None
        chosen = [~mask, mask] if mask.dtype == bool else [mask == case for case in range(len(cases))]
        pairs = [(update, where) for part, where in zip(parts, chosen, strict=True) for update in part.updates]
        updates = jaxi.all_or_none(update.where(where, axes) for update, where in pairs)
        return None if updates is None else Updated(aval, updates, parts[0].base)

    def _loop(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """A loop in the body begins its sums with what is summed up already, in place of zeros, or besides others."""
        operands, sums = list(operands), {}
        for result, (operand, variable) in self.starts.get(id(eqn), {}).items():
            start = operands[operand]
            if isinstance(start, Updated) and start.base is None:
                sums[result] = base = self.bases[id(self.values[variable])]
                operands[operand] = base.array = start._replace(base=base).array()
        self.is_changed |= bool(sums)
        if jaxi.is_scan(eqn) and (loop := jaxi.lax_loop(eqn)) is not None:
            body = summing_in_place(loop.body, loop.num_consts)
            self.is_changed |= body is not loop.body
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        results = list(bind_again(eqn, list(map(self.array, operands))))
        for result, base in sums.items():
            base.array, base.is_changed = results[result], True
            results[result] = Updated(eqn.outvars[result].aval)
        return results

    def _branches(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """Branches hand on updates, and the array is updated behind them; None: no result is updated in them.

        What `jax.checkpoint` calls is a branch that is always taken.
        """
        is_cond, call = jaxi.is_cond(eqn), jaxi.inlinable(eqn)
        programs = jaxi.branches(eqn) if is_cond else [] if call is None else [call]
        if not any(map(_makes_zeros, programs)) or jaxi.chooses_platform(eqn):
            return None
        index, given = list(map(self.array, operands[:is_cond])), list(map(self.array, operands[is_cond:]))
        places = [i for i, x in enumerate(given) if id(x) in self.bases]
        branches = [_Branch(program, places, list(map(jax.typeof, given))) for program in programs]
        shared = [_Slots.of([branch.results[k] for branch in branches]) for k in range(len(eqn.outvars))]
        if not any(shared):
            return None
        closed = tuple(branch.program(shared) for branch in branches)
        if is_cond:
            flat = iter(eqn.primitive.bind(*index, *given, **{**eqn.params, "branches": closed}))
        elif (values := jaxi.bind_open_call(eqn, lambda _: jaxpr_as_fun(closed[0]), given)) is None:
            return None
        else:
            flat = iter(values)
        results = []
        for slots, variable in zip(shared, eqn.outvars, strict=True):
            if slots is None:
                results.append(next(flat))
                continue
            base = None if slots.base is None else self.bases[id(given[slots.base])]
            updates = tuple(slot.update(flat) for slot in slots.counts.elements())
            results.append(Updated(variable.aval, updates, base))
        return results


class _Slot(NamedTuple):
    """What a branch hands on for an update."""

    form: Any
    avals: tuple[Any, ...]  # of the value and, if it has a form, of the indices

    @classmethod
    def of(cls, update: Update) -> "_Slot":
        """That of an update."""
        arrays = [update.value] if update.form is None else [update.value, update.indices]
        return cls(update.form, tuple(jaxi.strong(jax.typeof(x)) for x in arrays))

    def update(self, arrays: Iterator[Any]) -> Update:
        """The update of the next arrays."""
        return Update(next(arrays), None if self.form is None else next(arrays), self.form)


class _Slots(NamedTuple):
    """What all branches hand on for the updates of a result; updates of one form share a slot."""

    base: int | None  # the operand that is updated
    counts: Counter[_Slot]

    @classmethod
    def of(cls, results: "Sequence[_Slots | None]") -> "_Slots | None":
        """For what each branch has; None: they hand on arrays."""
        found = [result for result in results if result is not None]
        if len(found) < len(results) or len({result.base for result in found}) > 1 or found[0].base == -1:
            return None
        counts = reduce(or_, (result.counts for result in found))
        return cls(found[0].base, counts) if any(slot.form is not None for slot in counts) else None


class _Branch:
    """A branch, whose operands at some places may be changed in place."""

    def __init__(self, closed: ClosedJaxpr, places: Sequence[int], avals: Sequence[Any]) -> None:
        self.closed, self.places, self.avals = closed, places, avals
        self.results: list[_Slots | None] = []

        def results(*inputs: Any) -> list[Any]:
            evaluation, parts = self._run(inputs)
            at = {id(evaluation.bases[id(inputs[i])]): i for i in places}
            for part in parts:
                base = None if part is None or part.base is None else at.get(id(part.base), -1)
                self.results.append(part and _Slots(base, Counter(map(_Slot.of, part.updates))))
            return []

        jax.make_jaxpr(results)(*avals)

    def _run(self, inputs: Sequence[Any]) -> tuple[_Evaluation, list[Updated | None]]:
        evaluation = _Evaluation(self.closed, [Base(inputs[i]) for i in self.places], {})
        self.values = evaluation.run(inputs)
        pairs = zip(self.values, self.closed.out_avals, strict=True)
        return evaluation, [evaluation.as_updated(x, aval) for x, aval in pairs]

    def program(self, shared: Sequence[_Slots | None]) -> ClosedJaxpr:
        """The branch that hands on updates for these results."""

        def function(*inputs: Any) -> list[Any]:
            evaluation, parts = self._run(inputs)
            flat = []
            for x, part, slots in zip(self.values, parts, shared, strict=True):
                if slots is None or part is None:
                    flat.append(evaluation.array(x))
                    continue
                own = list(part.updates)
                for slot in slots.counts.elements():
                    place = next((i for i, update in enumerate(own) if _Slot.of(update) == slot), None)
                    update = None if place is None else own.pop(place)
                    arrays = map(jaxi.zeros, slot.avals) if update is None else (update.value, update.indices)
                    flat.extend(x for x in arrays if x is not None)
            return flat

        return trace(function, self.avals)


@weakly_cached
def _makes_zeros(program: ClosedJaxpr) -> bool:
    """Whether a program makes a large array of zeros, as the transpose of a read does."""
    return any(jaxi.makes_zeros(eqn) for eqn in equations_in(program))


_Starts = dict[int, dict[int, tuple[int, Any]]]
# Of an inner loop, by the identity of its equation, the results that are added to an input of the body: for each, the
# operand that it starts with, and the variable of that input.


def summing_in_place(body: ClosedJaxpr, first: int) -> ClosedJaxpr:
    """The body of a loop with its sums made in place; its carry are the inputs from `first` on, and its first outputs.

    It is the same body where there are none.
    """
    pairs = list(zip(range(first, len(body.invars)), range(len(body.outvars)), strict=False))
    carry = (i for i, k in pairs if is_large(body.in_avals[i]) and body.in_avals[i] == body.out_avals[k])
    return _summing_in_place(body, tuple(carry), first) or body


def branch_in_place(branch: ClosedJaxpr) -> ClosedJaxpr:
    """A branch, or a function that is called, which may change what it is given in place."""
    given = (i for i, aval in enumerate(branch.in_avals) if is_large(aval))
    return _summing_in_place(branch, tuple(given), None) or branch


@weakly_cached
def _summing_in_place(body: ClosedJaxpr, carry: tuple[int, ...], first: int | None) -> ClosedJaxpr | None:
    if not carry or not _makes_zeros(body):
        return None
    uses, starts = _Uses(body), _Starts()
    leaves = [] if first is None else [(i, i - first) for i in carry]
    sums = {k: body.invars[i] for i, k in leaves if uses.sum_of(body.invars[i]) == k}
    for eqn in body.eqns:
        for leaf in added_to_by(eqn):
            if (output := uses.sum_of(eqn.outvars[leaf.result])) in sums:
                starts.setdefault(id(eqn), {})[leaf.result] = leaf.operand, sums[output]
    is_changed = False

    def function(*inputs: Any) -> list[Any]:
        nonlocal is_changed
        evaluation = _Evaluation(body, [Base(inputs[i]) for i in carry], starts)
        results = list(map(evaluation.array, evaluation.run(inputs)))
        is_changed = evaluation.is_changed
        return results

    new = trace(function, body.in_avals)
    return new if is_changed else None
