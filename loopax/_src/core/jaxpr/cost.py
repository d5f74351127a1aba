"""What a step roughly costs, in nanoseconds: the arithmetic of a jaxpr, times the constants of a machine.

Four of five times are within a factor of two of what is measured, and most errors are the same for all alternatives: it
is for choices between those that differ by more than 15 % (docs/benchmark-details.md).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import log2, prod
from sys import maxsize
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.dependence import always_ends, computed, dependence, step_limits
from loopax._src.core.jaxpr.util import num_bytes, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Literal, inner_jaxprs
from loopax._src.settings import calibration, costs

# Of a batch of lanes, beside the constants of `Costs` (docs/benchmark-details.md).
VECTOR_PRODUCT = 2.0  # a product of a matrix and a vector, beside one of matrices of the same arithmetic
CALL_OF_BATCH = 4.5  # an operation that XLA executes by itself, on an array of all lanes; in `Costs.call`
STEP_ALONE = 0.12  # what a loop of one lane costs besides, for each of its steps, in `Costs.step`
CHEAP_STEP = 330  # elements
MOST_ON_ONE_CORE = 65_536  # numbers that one operation computes
# A batch whose places are refilled (docs/benchmark-details.md).
SHRINK_IF_CHEAP, SHRINK_OF_CALLS = 8.0, 3.0  # of stages that are not refilled
FEWEST_PLACES, MOST_PLACES, LANES_PER_PLACE = 8, 128, 4
OVERHEAD_IN_PLACES = 8  # of as many lanes as there are places, in times of the overhead: more places gain little
REFILLING, STEPS_BETWEEN = 27_000, 10  # ns, and how many steps there are between two times, say
GATHERING, GATHERING_LEAF = 1.5, 40  # of what is gathered in each step: times of REFILLING; ns for an array of a lane

_UNKNOWN_LENGTH = 10  # iterations of a loop inside the step whose length is not known
_SYMBOLIC = 64  # elements
_NARROW = 16  # elements of a row, for which there are no vector instructions

# Of a loop that is one function of a CPU, in place of a call and a step; an element, in times of that elsewhere; and an
# operation, on however few numbers.
CALL_IN_FUNCTION, STEP_IN_FUNCTION, ELEMENT_IN_FUNCTION, OPERATION_IN_FUNCTION = 9.0, 1.2, 0.4, 1.0


def arithmetic(closed: ClosedJaxpr) -> float:
    """Evaluating a jaxpr once, if its operations are fused with others."""
    return _total(closed.eqns, _operation)


def evaluation(closed: ClosedJaxpr, lanes: int = 1, in_function: bool = False) -> float:
    """Evaluating a jaxpr once, for so many lanes."""
    return _evaluation(closed.eqns, lanes, in_function, OPERATION_IN_FUNCTION if in_function else 0.0)


def _evaluation(eqns: Sequence[Any], lanes: int, in_function: bool, least: float = 0.0) -> float:
    # `least`: what an operation takes beside its elements. Ways to run lanes are fitted without.
    element = costs().elementwise * (ELEMENT_IN_FUNCTION if in_function else 1.0)
    call, step = (CALL_IN_FUNCTION, 0.0) if in_function else (costs().call, costs().step)

    def of_operation(eqn: Any) -> float:
        work = lanes * _operation(eqn, lanes, element)
        if lanes == 1 and jaxi.is_product_with_vector(eqn):
            work *= VECTOR_PRODUCT
        return work + call * _runs_by_itself(eqn) + (0.0 if jaxi.is_free(eqn) else least)

    return _total(eqns, of_operation, step)


def is_function(step: ClosedJaxpr, lanes: int = 1) -> bool:
    """Whether a loop of this step is compiled for a CPU as one function."""
    return calibration().platform == "cpu" and _can_be_function(step, lanes)


@weakly_cached
def _can_be_function(step: ClosedJaxpr, lanes: int) -> bool:
    return num_bytes(step.in_avals) < maxsize and jaxi.can_be_function(step, inner_jaxprs, lanes)


def overhead(in_function: bool, length_is_static: bool) -> float:
    """A step of a loop, on top of its body."""
    look = 0.0 if length_is_static else calibration().look
    return (STEP_IN_FUNCTION if in_function else costs().step) + look


class StepCost(NamedTuple):
    """What a step of a batch costs on CPUs (docs/benchmark-details.md): roughly `of_batch + lanes * of_lane`."""

    of_lane: float
    of_batch: float  # however many lanes there are
    alone: float  # a step of one lane without a batch
    widest: int = 0  # the numbers of a lane that one operation computes, in most of the work

    @property
    def is_cheap(self) -> bool:
        """Whether it is some elementwise operations on a few numbers."""
        return not self.of_batch and self._costs_little

    @property
    def _costs_little(self) -> bool:
        return self.of_lane < CHEAP_STEP * costs().elementwise

    @property
    def shrink(self) -> float | None:
        """By what each stage of a batch is smaller than the one before it, where fewer lanes cost not much less."""
        return SHRINK_IF_CHEAP if self.is_cheap else SHRINK_OF_CALLS if self._costs_little else None

    @property
    def most_on_one_core(self) -> int:
        """The most lanes of which XLA computes a step on one core of a CPU; more are spread over several."""
        return MOST_ON_ONE_CORE // max(self.widest, 1)

    def gathers(self, moved: Sequence[Any], lanes: int) -> bool:
        """Whether it is faster to gather the lanes that take a step, say half of them, than to compute it for all.

        `moved`: the types of what each has of its own. XLA computes a step of many lanes on several cores, and one of a
        part of them on one.
        """
        moving = GATHERING_LEAF * len(moved) + 2 * num_bytes(moved) * costs().cached_byte
        return lanes < self.most_on_one_core and lanes * (self.of_lane - 4 * moving) > GATHERING * REFILLING

    def places(self, moved: float, lanes: int) -> int:
        """How many places for so many lanes make it cheap to refill them; zero if it is not.

        `moved`: the bytes of a lane that are gathered for it, and put back.
        """
        if self.is_cheap or 2 * moved * costs().cached_byte / STEPS_BETWEEN > self.of_lane:
            return 0
        overhead = REFILLING / STEPS_BETWEEN + costs().step + self.of_batch
        most, places = lanes // LANES_PER_PLACE, FEWEST_PLACES
        if lanes > self.most_on_one_core:  # a step of so many lanes is computed on several cores
            return most if most > self.most_on_one_core else 0
        while 2 * places <= min(most, MOST_PLACES) and places * self.of_lane < OVERHEAD_IN_PLACES * overhead:
            places *= 2
        least = overhead / 2 if places == MOST_PLACES else overhead
        return places if places <= most and places * self.of_lane > least else 0


@weakly_cached
def step_cost(body: ClosedJaxpr, num_consts: int) -> StepCost:
    """The cost of a step, from the body of one lane: (row, *consts, *others) -> ...

    What depends on constants alone is computed once.
    """
    changing, eqns = {*body.invars[:1], *body.invars[1 + num_consts :]}, list[Any]()
    for eqn in body.eqns:
        if any(not isinstance(atom, Literal) and atom in changing for atom in eqn.invars):
            changing.update(eqn.outvars)
            eqns.append(eqn)
    work, calls = _total(eqns, _operation), costs().call * _total(eqns, _runs_by_itself)
    in_function = is_function(body)
    alone = _evaluation(eqns, 1, in_function) + overhead(in_function, True) + STEP_ALONE * costs().step
    here = calibration()
    of_batch = CALL_OF_BATCH * calls if here.platform == "cpu" else calls + here.look
    return StepCost(work, of_batch, alone, _widest(eqns))


def _widest(eqns: Sequence[Any]) -> int:
    """The numbers that an operation computes: so many, or more, in half of the work. LAPACK computes on one core."""
    work: dict[int, float] = {0: 0.0}  # by that number

    def of_operation(eqn: Any) -> float:
        size = 0 if jaxi.lapack_weights(eqn) else max((_size(v.aval.shape) for v in eqn.outvars), default=0)
        work[size] = work.get(size, 0.0) + _operation(eqn)
        return 0.0

    _total(eqns, of_operation)
    done, half = 0.0, sum(work.values()) / 2
    for size in sorted(work, reverse=True):
        done += work[size]
        if done >= half:
            return size
    return 0


def _total(eqns: Sequence[Any], of_operation: Callable[[Any], float], of_step: float = 0.0) -> float:
    """What equations amount to: the sum over their operations, also over those of programs in them.

    `of_step`: what a step of a loop in them has besides.
    """
    total = 0.0
    for eqn in eqns:
        programs = [] if jaxi.updates(eqn) else inner_jaxprs(eqn)  # how a scatter combines two numbers is none
        inner = [_total(program.eqns, of_operation, of_step) for program in programs]
        if not inner:
            total += of_operation(eqn)
        elif jaxi.is_cond(eqn):
            total += max(inner)
        elif jaxi.is_scan(eqn) and (scan := jaxi.lax_loop(eqn)):
            total += scan.length * (of_step + sum(inner))
        else:
            # How often a loop runs its body; once for a call, which is no loop.
            limit, is_loose = step_limits[eqn.primitive](eqn) if eqn.primitive in step_limits else (1, False)
            limit = _UNKNOWN_LENGTH if jaxi.is_while(eqn) or not limit else limit
            limit = min(limit, _UNKNOWN_LENGTH) if is_loose else limit
            total += limit * (sum(inner) + of_step * (jaxi.is_while(eqn) or eqn.primitive in step_limits))
    return total


def _size(shape: Iterable[Any]) -> int:
    """The elements of an array; a symbolic dimension (of `jax.export`) counts as some."""
    return prod(n if isinstance(n, int) else _SYMBOLIC for n in shape)


def _runs_by_itself(eqn: Any) -> float:
    """1 for an operation that XLA executes by itself."""
    return float(jaxi.stands_alone(eqn) or jaxi.takes_fused(eqn))


def _operation(eqn: Any, lanes: int = 1, element: float | None = None) -> float:
    """The cost of an operation that holds no program, for one of so many lanes."""
    results = computed[eqn.primitive](eqn) if eqn.primitive in computed else eqn.outvars
    results = [jaxi.update_of(eqn)] if jaxi.updates(eqn) else results  # the rows that are written
    size = sum(_size(v.aval.shape) for v in results)
    if jaxi.is_product(eqn) or jaxi.is_convolution(eqn):
        product = costs().product if jaxi.is_product(eqn) else costs().convolution
        return product * 2 * size * _size([jaxi.products_per_result(eqn)])
    if jaxi.is_free(eqn):
        return 0.0
    if weights := jaxi.lapack_weights(eqn):
        return costs().slow_function * sum(w * _size(x.aval.shape) for w, x in zip(weights, eqn.invars, strict=False))
    if jaxi.is_slow_function(eqn):
        return size * costs().slow_function
    if jaxi.is_function(eqn):
        shape = eqn.outvars[0].aval.shape
        is_narrow = bool(shape) and _size(shape[-1:]) < min(_NARROW, lanes * _size(shape))
        return size * (costs().function + is_narrow * costs().narrow_function)
    if jaxi.reads_more_than_it_returns(eqn):
        size = _size(eqn.invars[0].aval.shape)
        if rows := _size([jaxi.sorted_rows(eqn)]):
            return size * log2(max(rows, 2)) * costs().comparison
    return size * (costs().elementwise if element is None else element)


# Residuals: what the known part of a body hands to its unknown part. Not all of them have to be stored.

# To recompute a residual. Looking for more would take long where there are many residuals.
MOST_EQUATIONS = 32
_KEPT = 2.0  # a byte that is stored beside others, in times of `cached_byte`: what is recomputed is fused


class Residual(NamedTuple):
    """Where the unknown part finds a residual."""

    hoisted: bool  # the same at every step
    forwarded: int | None  # a row of this known x as it is
    position: int  # among the outputs of the known body


def classified(
    known: ClosedJaxpr, sizes: Sequence[int], positions: Sequence[int], at_most_once: bool = False
) -> list[Residual]:
    """The residuals at these positions among the outputs of (row, *consts, *carry, *x) -> ...; `sizes` of the three.

    `at_most_once`: the step is taken once or not at all, so nothing is gained if what it computes is hoisted.
    """
    num_consts, num_carry, num_xs = sizes
    first_x = 1 + num_consts + num_carry
    rows = {variable: i for i, variable in enumerate(known.invars[first_x : first_x + num_xs])}
    needed, of_others = dependence(known), ~(((1 << num_consts) - 1) << 1)
    of_consts = [p for p in positions if not needed[p] & of_others]
    literals = {p for p in positions if isinstance(known.outvars[p], Literal)}
    if at_most_once:
        computed = {variable for eqn in known.eqns for variable in eqn.outvars}
        hoisted = {p for p in of_consts if p in literals or known.outvars[p] not in computed}
    else:
        hoisted = set(_computed_before(known, num_consts, of_consts))
    forwarded = [None if p in literals else rows.get(known.outvars[p]) for p in positions]
    pairs = zip(positions, forwarded, strict=True)
    return [Residual(p in hoisted, None if p in hoisted else row, p) for p, row in pairs]


def _computed_before(known: ClosedJaxpr, num_consts: int, positions: Sequence[int]) -> list[int]:
    """Those of these outputs that can be computed before the loop. Each depends on constants alone.

    An equation may be all or nothing: what depends on constants alone may need other inputs to be computed. And a loop
    may take no step. What is hoisted is computed all the same: it must end, without effects.
    """
    if not positions:
        return []
    wanted = set(positions)
    program, used = jaxi.dce(known, [p in wanted for p in range(len(known.out_avals))], False)
    if not used[0] and not any(used[1 + num_consts :]) and always_ends(program):
        return list(positions)
    if len(positions) == 1:
        return []
    half = len(positions) // 2
    return [p for part in (positions[:half], positions[half:]) for p in _computed_before(known, num_consts, part)]


def hoisted_part(known: ClosedJaxpr, num_consts: int, positions: Sequence[int]) -> ClosedJaxpr | None:
    """Known consts -> residuals that depend on nothing else."""
    if not positions:
        return None
    wanted = [p in positions for p in range(len(known.out_avals))]
    is_const = [0 < i <= num_consts for i in range(len(known.in_avals))]
    return jaxi.dce(known, wanted, is_const)[0]


def without_recomputed(
    known: ClosedJaxpr, given: Sequence[int], positions: Sequence[int], hoisted: Sequence[int]
) -> tuple[list[int], ClosedJaxpr | None]:
    """Leave out residuals that cost less to compute from the others than to store: `1 - t` where `t` is stored.

    Those that are the same at every step, at `hoisted`, are left out if they cost nothing (a transpose, zeros, a
    number: an output that is a literal). Among the outputs of `known`, residuals are at `positions`; its inputs at
    `given` need not be stored. Returns the positions that are left, and how the others are computed:
    (*given, *left) -> others, in their order.
    """
    if num_bytes(known.out_avals) == maxsize:  # what they cost is not known
        return list(positions), None
    producers = {variable: i for i, eqn in enumerate(known.eqns) for variable in eqn.outvars}
    inputs = [known.invars[i] for i in given]
    left, equations = [p for p in positions if not isinstance(known.outvars[p], Literal)], set[int]()
    # The largest first: what is left out is not there to compute the others from.
    there = Counter([*inputs, *(known.outvars[p] for p in left)])
    for position in sorted(left, key=lambda p: -num_bytes([known.out_avals[p]])):
        residual = known.outvars[position]
        there[residual] -= 1
        places = _equations_for(residual, known.eqns, producers, there)
        free = 0.0 if position in hoisted else _KEPT * costs().cached_byte * num_bytes([residual.aval])
        if places is None or _total([known.eqns[i] for i in places], _operation) > free:
            there[residual] += 1
        else:
            left.remove(position)
            equations.update(places)
    if len(left) == len(positions):
        return left, None
    kept = [known.outvars[p] for p in left]
    dropped = [known.outvars[p] for p in positions if p not in left]
    return left, jaxi.replace_jaxpr(known, [*inputs, *kept], dropped, [known.eqns[i] for i in sorted(equations)])


def _equations_for(
    variable: Any, equations: Sequence[Any], producers: dict[Any, int], given: Counter[Any]
) -> list[int] | None:
    """The places of the equations that compute a variable from given ones; None: it needs others, too, or many."""
    found, needed = set[int](), {variable}
    while needed:
        place = producers.get(needed.pop())
        if place is None or equations[place].effects or len(found) == MOST_EQUATIONS:
            return None
        found.add(place)
        needed.update(atom for atom in equations[place].invars if not isinstance(atom, Literal) and not given[atom])
        needed = {v for v in needed if producers.get(v) not in found}
    return sorted(found)
