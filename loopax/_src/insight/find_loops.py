"""The loops in a program: those of loopax and those of `jax.lax`, each as a loop of the core, with what is in them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from loopax._src.core import UNNAMED, DebugInfo, EveryResidual, Loop, Names, NoReverseMode
from loopax._src.core.autodiff.jvp import inexact
from loopax._src.core.batching.compact import CompactVmap, compact_vmap_p
from loopax._src.core.batching.stages import is_one_batch
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.dependence import dependence_fixpoint, members, of_equation
from loopax._src.core.jaxpr.util import (
    INDEX,
    bind_again,
    evaluate,
    inner_programs,
    merge_lists,
    reject,
    select,
    split_list,
    trace,
)
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.raising import of_user
from loopax._src.frontend.trace_program import TracedProgram, trace_program
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Scan,
    While,
    argument_names,
    as_closed,
    called,
    dce,
    eqns_of,
    equation_context,
    has_tangents,
    invars_of,
    is_kernel,
    is_of_jax,
    jaxpr_as_fun,
    lax_loop,
    stops_gradient,
    user_lines,
)
from loopax._src.kinds import Lax
from loopax._src.lanes import Lockstep
from loopax._src.pytrees.leaves import describe

NO_REVERSE_MODE = "`jax.lax.while_loop` has no reverse mode: use `loopax.while_loop`, or `loopax.rewrite_loops`"


class Seen(NamedTuple):
    """A loop, as its equation says it."""

    loop: Loop
    library: str  # "loopax" or "lax"
    operands: list[Any]  # the variables or constants that are consts, carry and xs
    results: list[Any]  # those of carry and ys
    lanes: int = 1  # that take numbers of steps of their own, in groups or stages
    waiting: int = 1  # that run until the slowest of them is done


class Value(NamedTuple):
    """The name of a value in a program, and whether it has a derivative."""

    name: str = UNNAMED  # as an argument of the user's function, or as a part of a loop's carry
    perturbed: bool = False  # it depends on what is differentiated


class FoundLoop(NamedTuple):
    """A loop where it stands in a program."""

    seen: Seen
    source: str  # "file.py:12 (function)", or nothing
    operands: list[Value]  # consts, carry and xs
    carry: list[Value]  # after any number of steps
    inner: list["FoundLoop"]


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline the calls of a program, without dead code. Operations of loopax stay as they are."""

    def own_line(eqn: Any) -> AbstractContextManager[None]:
        """Of an equation that has one, else that of the call: JAX drops lines where it traces custom derivatives."""
        return equation_context(eqn) if any(of_user(user_lines(eqn))) else nullcontext()

    def run(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        inner = called(eqn)
        if inner is None:
            return bind_again(eqn, operands)
        return evaluate(inner, operands, run, (lambda _: nullcontext()) if is_of_jax(inner) else own_line)

    flat = jax.make_jaxpr(lambda *inputs: evaluate(closed, inputs, run))(*closed.in_avals)
    return dce(flat, [True] * len(flat.out_avals), True)[0]


def find(closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[FoundLoop]:
    """The loops of a program, in order."""
    flat = without_calls(closed)
    values = dict(zip(invars_of(flat), inputs, strict=True))

    def value(atom: Any) -> Value:
        return Value() if isinstance(atom, Literal) else values.get(atom, Value())

    found: list[FoundLoop] = []
    for eqn in eqns_of(flat):
        seen = see(eqn)
        if seen is not None:
            one = found_at(eqn, seen, list(map(value, seen.operands)))
            found += one.inner if _is_a_condition(seen.loop) else [one]
        elif not is_kernel(eqn):
            found += _inside(eqn, list(map(value, eqn.invars)))
        for variable in _perturbed_results(eqn, [value(atom).perturbed for atom in eqn.invars]):
            values[variable] = Value(perturbed=True)
    return found


def _perturbed_results(eqn: Any, flags: Sequence[bool]) -> Iterator[Any]:
    if not any(flags) or stops_gradient(eqn):
        return
    for variable, needed in zip(eqn.outvars, of_equation(eqn), strict=True):
        if has_tangents(variable.aval) and any(flags[i] for i in members(needed)):
            yield variable


def _inside(eqn: Any, operands: Sequence[Value]) -> Iterator[FoundLoop]:
    """The loops in branches, or in what else an equation holds; the operands of these are its last ones."""
    for inner in inner_programs(eqn):
        closed = as_closed(inner)
        count = len(closed.in_avals)
        is_fed = count <= len(operands)
        yield from find(closed, operands[len(operands) - count :] if is_fed else [Value(perturbed=True)] * count)


def _is_a_condition(loop: Loop) -> bool:
    """Whether a loop of one step at most is what loopax itself writes for a condition (`core/nested_lanes.py`)."""
    return loop.debug_info is None and loop.bound == 1


def found_at(eqn: Any, seen: Seen, operands: list[Value]) -> FoundLoop:
    """A loop that is an equation, of these operands."""
    loop, names = seen.loop, seen.loop.names
    own = [*names.consts, *names.carry, *names.xs]
    if loop.debug_info is not None and loop.debug_info.branch:
        own = list(map(_name_in_branch, own))
    operands = [value._replace(name=name or value.name) for name, value in zip(own, operands, strict=True)]
    consts, carry, xs = split_list(operands, loop.sizes)
    flags = (False, *(value.perturbed for value in operands))
    reached = dependence_fixpoint(loop.body, flags, loop.carry_range, inexact(loop.body.out_avals))
    later = [leaf._replace(perturbed=leaf.perturbed or after) for leaf, after in zip(carry, reached, strict=False)]
    return FoundLoop(seen, source_of(eqn), operands, later, find(loop.body, [Value(), *consts, *later, *xs]))


def _name_in_branch(name: str) -> str:
    """What a leaf of the carry of a branch is: it carries the operands, and arrays of the result."""
    return "result" if name.startswith("carry[1]") else name.replace("carry[0]", "operands", 1)


def source_of(eqn: Any) -> str:
    """The line of the user's from which an equation comes; nothing where it is not known."""
    return str(next(of_user(user_lines(eqn)), ""))


# ---- what an equation says


def see(eqn: Any) -> Seen | None:
    """The loop that an equation is; None where it is none."""
    if eqn.primitive is loop_p:
        return _see_loop(eqn)
    if eqn.primitive is compact_vmap_p:
        return _see_batch(eqn)
    found = lax_loop(eqn)
    if isinstance(found, Scan):
        return _see_scan(eqn, found)
    return None if found is None else _see_while(eqn, found)


def _see_loop(eqn: Any) -> Seen:
    loop = Loop(**eqn.params)
    return Seen(
        loop, "loopax", eqn.invars[2:], _results(loop, eqn), waiting=loop.debug_info.waiting if loop.debug_info else 1
    )


def _see_batch(eqn: Any) -> Seen | None:
    compact_vmap = CompactVmap(**eqn.params)
    if not isinstance(compact_vmap.static, Loop):
        return None  # a reverse sweep
    loop, lanes = compact_vmap.static, compact_vmap.axis.size
    waiting = lanes if is_one_batch(loop, lanes) else 1
    return Seen(loop, "loopax", eqn.invars[2:], _results(loop, eqn), lanes=lanes, waiting=waiting)


def _results(loop: Loop, eqn: Any) -> list[Any]:
    return eqn.outvars[1 : 1 + loop.num_carry + len(loop.output_avals[1])]


def _see_scan(eqn: Any, found: Scan) -> Seen:
    consts, carry, xs = split_list(argument_names(found.body), found.sizes)
    loop = Loop(
        _with_row(found.body),
        found.num_consts,
        found.num_carry,
        bound=found.length,
        reverse=found.reverse,
        predicated=False,
        unroll=1,
        storage=EveryResidual(keeps_all=True),
        debug_info=_debug_info("scan", Names(tuple(consts), tuple(carry), tuple(xs), ()), fixed=True),
    )
    return Seen(loop, "lax", eqn.invars, eqn.outvars)


def _see_while(eqn: Any, found: While) -> Seen:
    """A loop of the body alone: what the condition reads besides is of no interest here."""
    consts, carry, _ = split_list(argument_names(found.body), [found.num_consts, found.num_carry])
    loop = Loop(
        _with_row(found.body),
        found.num_consts,
        found.num_carry,
        bound=None,
        reverse=False,
        predicated=False,
        unroll=1,
        storage=NoReverseMode(ValueError, NO_REVERSE_MODE),
        debug_info=_debug_info("while_loop", Names(tuple(consts), tuple(carry), (), ()), fixed=False),
    )
    lanes = prod(found.cond.out_avals[0].shape)
    return Seen(loop, "lax", eqn.invars[found.num_cond_consts :], eqn.outvars, waiting=lanes)


def _with_row(body: ClosedJaxpr) -> ClosedJaxpr:
    """A body as those of the core: it is handed the number of the row, too."""
    function = jaxpr_as_fun(body)
    return trace(lambda _, *operands: function(*operands), [INDEX, *body.in_avals])


def _debug_info(function: str, names: Names, fixed: bool) -> DebugInfo:
    return DebugInfo(function, Lax(), Lockstep(), fixed, bound_is_loose=False, names=names)


# The function that a user asks about: traced, with names for its inputs, and its gradient.


class Subject(NamedTuple):
    """A function at its arguments."""

    name: str
    args: Sequence[Any]
    program: TracedProgram
    inputs: list[Value]  # the name of each array, and whether a gradient is taken of it

    @property
    def perturbed(self) -> list[bool]:
        """Of which arrays a gradient is taken."""
        return [value.perturbed for value in self.inputs]


def subject(caller: str, fn: Any, args: Sequence[Any], argnums: int | Sequence[int] | None) -> Subject:
    """Trace a function; an error where it is none, or where the arguments do not fit."""
    check_callable(f"fn of {caller}", fn)
    names = _bound_names(caller, fn, args)
    args = [jnp.asarray(arg) if isinstance(arg, float | complex) else arg for arg in args]
    chosen = _chosen(caller, argnums, len(args))
    program = trace_program(caller, fn, args, {})
    floating = inexact(program.closed.in_avals)
    inputs = [
        Value(names[argument] + keystr(path), is_floating and argument in chosen)
        for argument, path, is_floating in zip(program.arguments, program.paths, floating, strict=True)
    ]
    if argnums is not None and not any(value.perturbed for value in inputs):
        raise TypeError(
            f"{caller}(argnums={argnums!r}): there are no floating-point arrays in these arguments, so there is no "
            "gradient. Give the numbers of arguments that hold some."
        )
    return Subject(name_of(fn), args, program, inputs)


def name_of(fn: Callable[..., Any]) -> str:
    """What a function is called."""
    return getattr(fn, "__name__", type(fn).__name__)


def _bound_names(caller: str, fn: Any, args: Sequence[Any]) -> list[str]:
    """The name of the parameter behind each argument."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in function
        return [f"argument {i}" for i in range(len(args))]
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        got = ", ".join(map(describe, args)) or "none"
        raise TypeError(
            f"{caller}({name_of(fn)}, ...): the arguments do not fit: {error}. Got {got}, expected those of "
            f"{name_of(fn)}{signature}. Give what you would call it with; bind keywords with `functools.partial`."
        ) from error
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if is_rest else [name]
    return names


def _chosen(caller: str, argnums: int | Sequence[int] | None, count: int) -> list[int]:
    if argnums is None:
        return list(range(count))
    numbers: list[Any] = list(argnums) if isinstance(argnums, list | tuple) else [argnums]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(
                f"{caller}(argnums=...): got {argnums!r}, expected the number of a positional argument, or several, "
                f"from 0 to {count - 1}."
            )
    return [number % count for number in numbers]


def gradient_of(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> ClosedJaxpr:
    """The program of a gradient: cotangents of the perturbed inputs, for ones as those of the results."""
    function = jaxpr_as_fun(closed)
    floating = inexact(closed.out_avals)

    def gradient(*inputs: Any) -> Any:
        def results(*chosen: Any) -> list[Any]:
            return select(floating, function(*merge_lists(perturbed, reject(perturbed, inputs), chosen)))

        out, pullback = jax.vjp(results, *select(perturbed, inputs))
        return pullback([jnp.ones_like(x) for x in out])

    return jax.make_jaxpr(gradient)(*closed.in_avals)
