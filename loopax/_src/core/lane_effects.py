"""Effects in the bodies of loops: not caused by finished lanes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.dependence import dependence, mixed_variables, mixes_lanes, operands_mixed_by
from loopax._src.core.jaxpr.evaluate import batch_expanded, evaluated_by, jvp_expanded, rule_of
from loopax._src.core.jaxpr.types import batch_if_mapped
from loopax._src.core.jaxpr.util import Mask, bind_again, evaluate, trace, weakly_cached
from loopax._src.core.masking import When, fill_inactive, own_if_active_p, pick
from loopax._src.core.own_arrays import Inner, inner_of, own_values, takes, walks
from loopax._src.core.row_buffers import VERSION, operands_where, writes
from loopax._src.core.stopped_loops import entered, holds_stoppable
from loopax._src.jax_internals import ClosedJaxpr, Literal, Primitive, inner_jaxprs, jaxpr_as_fun

Evaluated = Callable[..., list[Any]]  # f(active, *inputs)

# An effect that happens where `active` is True. Operands: active, *operands.
only_if_p = jaxi.new_primitive("only_if")


class OnlyIf(NamedTuple):
    """The parameters of the primitive."""

    happening: Primitive  # what has the effect
    params: tuple[tuple[str, Any], ...]  # those of `happening`
    types: tuple[Any, ...]  # of its results
    causes: frozenset[Any]  # the effects


def _only_if(active: Any, *operands: Any, **params: Any) -> list[Any]:
    """A real conditional: nothing is called where it is False, and results are zeros."""
    primitive, rest, types, _ = OnlyIf(**params)

    def happen(*operands: Any) -> list[Any]:
        results = primitive.bind(*operands, **primitive.get_bind_params(dict(rest)))
        return list(results) if primitive.multiple_results else [results]

    return lax.cond(active, happen, lambda *_: list(map(jaxi.zeros, types)), *operands)


def _only_if_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """That of the conditional, if it has results: JAX says where these have no derivative, as of an `io_callback`."""
    if not OnlyIf(**params).types:
        return only_if_p.bind(*primals, **params), []
    return jvp_expanded(_only_if)(primals, tangents, **params)


def _only_if_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Lane by lane, as JAX batches callbacks: a batched condition could not suppress anything.

    Operands are `active, *operands` of the effect. A lane that is not active gets the results of one that is, as it
    gets the operands of one: no loop goes on for it.
    """
    only_if = OnlyIf(**params)
    own = {i: jnp.moveaxis(x, d, 0) for i, (x, d) in enumerate(zip(operands, dims, strict=True)) if d is not None}
    if not own:  # JAX asks inside batched control flow
        return only_if_p.bind(*operands, **params), [None] * len(only_if.types)
    if only_if.types and jaxi.are_ordered(only_if.causes):
        raise NotImplementedError(
            f"the body of a loop calls an ordered `{only_if.happening}` with results, and its lanes take different "
            "numbers of steps. JAX has no order between lanes. Leave out `ordered=True`, or let one lane run after "
            'another: `lanes="sequential"`.'
        )

    def of_lane(own: dict[int, Any]) -> Any:
        return only_if_p.bind(*(own.get(i, x) for i, x in enumerate(operands)), **params)

    if not only_if.types:
        for lane in range(next(iter(own.values())).shape[0]):
            of_lane({i: x[lane] for i, x in own.items()})
        return [], []
    results = lax.map(of_lane, own)
    if 0 in own:
        results = fill_inactive(own[0], results, [True] * len(results))
    return results, [0] * len(results)


jaxi.register(
    only_if_p,
    meaning=_only_if,
    params=OnlyIf._fields,
    effectful_abstract_eval=lambda *_, **params: (list(OnlyIf(**params).types), OnlyIf(**params).causes),
    jvp=_only_if_jvp,
    batch_without_axis=_only_if_batch,
)


# A branch, where results are versions of operands that are a lane's own. Operands: index, active, *operands. Lanes with
# branches of their own take all, one after another, each on what the one before has left: a lane writes in its own.
branch_of_lane_p = jaxi.new_primitive("branch_of_lane")


class BranchOfLane(NamedTuple):
    """The parameters of the primitive."""

    branches: tuple[ClosedJaxpr, ...]  # (active, *operands) -> results
    roots: tuple[tuple[int, int], ...]  # of each result that is a version: the operand that it is of


def _branch_of_lane(index: Any, active: Any, *operands: Any, branches: Any, roots: Any) -> list[Any]:
    del roots
    return lax.switch(index, list(map(jaxpr_as_fun, branches)), active, *operands)


def _batch_branch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], branches: Any, roots: Any) -> Any:
    versions = dict(roots)

    def one_after_another(index: Any, active: Any, *operands: Any) -> list[Any]:
        given, outs = list(operands), []
        for k, branch in enumerate(branches):
            # Where no branch has the number, the nearest one is taken.
            is_taken = index <= k if k == 0 else index >= k if k == len(branches) - 1 else index == k
            out = jaxpr_as_fun(branch)(active & is_taken, *given)
            for result, root in versions.items():
                given[root] = out[result]
            outs = [pick(is_taken, new, old) for new, old in zip(out, outs or out, strict=True)]
        return [given[versions[k]] if k in versions else x for k, x in enumerate(outs)]

    of_all = partial(_branch_of_lane, branches=branches, roots=roots)
    return batch_expanded(of_all if dims[0] is None else one_after_another)(axis, operands, dims)


jaxi.register(
    branch_of_lane_p,
    meaning=_branch_of_lane,
    params=BranchOfLane._fields,
    batch=batch_if_mapped(branch_of_lane_p, _batch_branch),
)
takes[branch_of_lane_p] = lambda eqn: ([], {k: 2 + root for k, root in BranchOfLane(**eqn.params).roots})


def guarded(
    closed: ClosedJaxpr,
    own: Mask = (),
    left: Sequence[int] = (),
    when: When = "always",
    seen: frozenset[int] = frozenset(),
) -> Evaluated:
    """`f(active, *inputs)`: the jaxpr as a function whose effects happen only where `active` is True.

    Writing to a buffer is such an effect; and a lane that is not active reads what one that is active does. So it is
    with inputs that are a lane's `own` (`core/own_arrays.py`); `left` are the outputs that stay a lane's own. What
    other lanes see of a lane is its own, too; `seen` are outputs that they see.
    """
    mixed = mixed_variables(closed, seen)
    values = own_values(closed, own or (False,) * len(closed.in_avals))

    def function(active: Any, *inputs: Any) -> list[Any]:
        filled: dict[Any, Any] = {}  # by variables

        def of_active(atom: Any, x: Any) -> Any:
            if atom in mixed:
                return x
            if atom not in filled:
                filled[atom] = own_if_active_p.bind(active, x, when=when)
            return filled[atom]

        def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            if eqn.primitive is loop_p and when == "in_derivatives":
                operands = entered(active, eqn, operands)
            taken = values.taken.get(id(eqn))
            seen = [variable in mixed for variable in eqn.outvars]
            if taken is None:
                return _guarded_equation(_Guard(eqn, active, [False] * len(operands), [], when, seen), operands)
            atoms = zip(eqn.invars, operands, taken.operands, strict=True)
            operands = [x if is_taken or not is_own(atom) else of_active(atom, x) for atom, x, is_taken in atoms]
            results = [k for k, value in enumerate(taken.results) if value and value.is_version]
            return _guarded_equation(_Guard(eqn, active, taken.operands, results, when, seen), operands)

        def is_own(atom: Any) -> bool:
            return not isinstance(atom, Literal) and atom in values.of

        results = zip(closed.outvars, evaluate(closed, inputs, equation), strict=True)
        return [of_active(atom, x) if is_own(atom) and k not in left else x for k, (atom, x) in enumerate(results)]

    return function


class _Guard(NamedTuple):
    """An equation where a lane may not be active."""

    eqn: Any
    active: Any
    own: Sequence[bool]  # the operands that are a lane's own
    left: Sequence[int]  # the results that are versions of these
    when: When
    seen: Sequence[bool]  # the results that other lanes see

    def of(self, program: ClosedJaxpr, inner: Inner) -> Evaluated:
        """A program in the equation, guarded."""
        own = tuple(i in inner.operands and self.own[inner.operands[i]] for i in range(len(program.in_avals)))
        left = [k for k, result in inner.results.items() if result in self.left]
        return guarded(program, own, left, self.when, self._seen_of(program, inner))

    def _seen_of(self, program: ClosedJaxpr, inner: Inner) -> frozenset[int]:
        """The outputs of a program that other lanes see, here or in another step of a loop."""
        seen = {k for k, result in inner.results.items() if self.seen[result]}
        if inner.carried is None:
            return frozenset(seen)
        mixed, needed = operands_mixed_by(self.eqn), dependence(program)
        seen |= {k for i, k in inner.carried.items() if i not in inner.operands or mixed[inner.operands[i]]}
        while grown := {k for i, k in inner.carried.items() if any(needed[of] >> i & 1 for of in seen)} - seen:
            seen |= grown
        return frozenset(seen)

    def with_flag(self, at: int, inner: Inner, program: ClosedJaxpr) -> ClosedJaxpr:
        """That program with the flag as one more input at this place."""
        function = self.of(program, inner)

        # Before: (*first, *rest) -> results. After: (*first, active, *rest) -> results
        def with_flag(*inputs: Any) -> list[Any]:
            return function(inputs[at], *inputs[:at], *inputs[at + 1 :])

        avals = program.in_avals
        return trace(with_flag, [*avals[:at], jax.ShapeDtypeStruct((), bool), *avals[at:]])


_NOTHING_OWN = Inner([], {}, {})
_IS_READ_AGAIN = (
    "the body of a loop writes to a Buffer or a History, reads it again, and gives what it reads to something that "
    "computes with several lanes at once (a `custom_vmap`, a draw with a key of rbg); lanes of the loop take different "
    "numbers of steps. Use what is written, not what is read, or give all lanes the same number of steps."
)

# For each primitive of loopax with programs in it: (guard, operands) -> results (`core/rules.py`).
guards: dict[Primitive, Callable[[_Guard, list[Any]], Sequence[Any]]] = {}


def _guarded_branch(guard: _Guard, operands: list[Any]) -> Sequence[Any]:
    index, is_active, *rest = operands
    return branch_of_lane_p.bind(index, guard.active & is_active, *rest, **guard.eqn.params)


guards[branch_of_lane_p] = _guarded_branch


def _guarded_equation(guard: _Guard, operands: list[Any]) -> Sequence[Any]:
    eqn, active = guard.eqn, guard.active
    if eqn.primitive in VERSION and guard.when != "effects":
        if any(guard.seen) and writes(eqn):
            raise NotImplementedError(_IS_READ_AGAIN)
        return bind_again(eqn, operands_where(active, eqn, operands, reads_own=any(guard.seen)))
    if guard.left and jaxi.updates(eqn):
        return [jaxi.written_where(active, eqn, operands)]
    if guard.left and jaxi.is_sum(eqn):
        (total,) = bind_again(eqn, operands)
        return [pick(active, total, operands[guard.own.index(True)])]
    if not _asks_who_is_active(guard):
        return bind_again(eqn, operands)
    if eqn.primitive in guards:
        return guards[eqn.primitive](guard, operands)
    if (results := _guarded_control_flow(guard, operands)) is not None:
        return results
    if not _acts(eqn):  # it reads a lane's own, or chooses of it
        return bind_again(eqn, operands)
    # Only JAX knows how to evaluate the equation: it is evaluated as a whole, or not at all.
    if mixes_lanes(eqn):
        raise NotImplementedError(
            f"the body of a loop calls a `{eqn.primitive}` that prints or calls back, and computes with several lanes "
            "at once; the lanes of the loop take different numbers of steps. Print outside of it, give all lanes the "
            "same number of steps, or mask inside the body."
        )
    types = tuple(variable.aval for variable in eqn.outvars)
    only_if = OnlyIf(eqn.primitive, tuple(eqn.params.items()), types, frozenset(eqn.effects))
    return only_if_p.bind(active, *operands, **only_if._asdict())


def _asks_who_is_active(guard: _Guard) -> bool:
    """Whether what an equation computes or does depends on it, or a lane may stay in a loop in it for long."""
    eqn = guard.eqn
    if any(guard.own) or (_acts(eqn) and _may_act(guard)):
        return True
    is_kept_out = eqn.primitive is loop_p or guard.when != "in_derivatives"
    return not is_kept_out and any(map(holds_stoppable, inner_jaxprs(eqn)))


def _may_act(guard: _Guard) -> bool:
    """Whether the effects of an equation that acts are to be suppressed. A callback with results alone knows these."""
    eqn = guard.eqn
    if guard.when != "effects":
        return True
    return jaxi.happens(eqn.effects) and (not eqn.outvars or any(map(acts, inner_jaxprs(eqn))))


@weakly_cached
def acts(program: ClosedJaxpr) -> bool:
    """Whether a program has effects, or writes to a buffer, or its derivative has effects."""
    return any(map(_acts, program.eqns))


def _acts(eqn: Any) -> bool:
    if jaxi.happens(eqn.effects) or eqn.primitive in VERSION or any(map(acts, inner_jaxprs(eqn))):
        return True
    rule = rule_of(eqn) if jaxi.is_custom(eqn) else None
    return rule is not None and jaxi.happens(rule.effects)


def _guarded_control_flow(guard: _Guard, operands: list[Any]) -> Sequence[Any] | None:
    """The results of control flow, or of a call; None for another equation."""
    eqn, active = guard.eqn, guard.active
    if jaxi.is_custom(eqn):
        return evaluated_by(guarded, guarded, 1, eqn)(active, *operands)
    if jaxi.is_linear_solve(eqn):
        return jaxi.bind_linear_solve(eqn, partial(guard.with_flag, 0, _NOTHING_OWN), [active], operands)
    inner = inner_of(eqn)
    if inner is None:
        return jaxi.bind_open_call(eqn, guarded, [active, *operands])
    if jaxi.is_cond(eqn):
        index, *rest = operands
        _, roots = inner.settled({i for i, at in inner.operands.items() if guard.own[at]})
        each_once = len(set(roots.values())) == len(roots)
        if guard.left and each_once and not jaxi.happens(eqn.effects):
            branches = tuple(guard.with_flag(0, inner, program) for program in inner.programs)
            return branch_of_lane_p.bind(index, active, *rest, branches=branches, roots=tuple(roots.items()))
        return lax.switch(index, [guard.of(program, inner) for program in inner.programs], active, *rest)
    if loop := jaxi.lax_loop(eqn):
        cond_consts, consts, init, xs = loop.groups(operands)
        if loop.cond is not None:
            # Before: [*cond consts, *consts, *carry]. After: [active, *cond consts, active, *consts, *carry]
            cond, body = guard.with_flag(0, _NOTHING_OWN, loop.cond), guard.with_flag(0, inner, loop.body)
            sizes = {"num_cond_consts": loop.num_cond_consts + 1, "num_consts": loop.num_consts + 1}
            loop = loop._replace(cond=cond, body=body, **sizes)
            return jaxi.bind_while(eqn, loop, [active, *cond_consts, active, *consts, *init])
        step_of_lane = guard.of(loop.body, inner)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = step_of_lane(active, *consts, *carry, *x)
            return out[: loop.num_carry], out[loop.num_carry :]

        carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse, loop.unroll)
        return [*carry, *ys]
    if eqn.primitive in walks:
        return _guarded_walk(guard, inner, operands)
    (program,) = inner.programs
    results = jaxi.bind_open_call(eqn, lambda _: guard.of(program, inner), [active, *operands])
    return guard.of(program, inner)(active, *operands) if results is None else results


def _guarded_walk(guard: _Guard, inner: Inner, operands: list[Any]) -> Sequence[Any]:
    """The results of a loop of ours. The flag is the first constant of its body, and of its inverse."""
    eqn, walk = guard.eqn, walks[guard.eqn.primitive]
    loop, (body, *inverses) = walk.steps(**eqn.params), inner.programs
    bodies = {walk.body: guard.with_flag(1, inner, body)}
    if loop.inverse is not None:
        bodies["inverse"] = guard.with_flag(1, inner if inverses else _NOTHING_OWN, loop.inverse)
    given = [*operands[: walk.num_limits], guard.active, *operands[walk.num_limits :]]
    return eqn.primitive.bind(*given, **loop._replace(**bodies, num_consts=loop.num_consts + 1)._asdict())
