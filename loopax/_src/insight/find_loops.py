"""The loops in a program: those of loopax and those of `jax.lax`, each as a loop of the core, with what is in them."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from loopax._src import jax_internals as jaxi
from loopax._src.core import UNNAMED, DebugInfo, Decided, EveryResidual, Loop, Names, NoReverseMode
from loopax._src.core.batching.compact_primitive import CompactVmap, compact_vmap_p
from loopax._src.core.batching.compact_stages import is_one_batch
from loopax._src.core.ir.lanes import Lockstep
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.dependence import dependence_fixpoint, members, of_equation, tangent_dependence
from loopax._src.core.jaxpr.util import INDEX, bind_again, evaluate, of_selected, select, split_list, trace
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.raising import of_user
from loopax._src.frontend.trace_program import TracedProgram, trace_program
from loopax._src.jax_internals import ClosedJaxpr, Literal, inner_jaxprs, jaxpr_as_fun
from loopax._src.kinds import Lax
from loopax._src.pytrees.leaves import describe

NO_REVERSE_MODE = "`jax.lax.while_loop` has no reverse mode: use `loopax.while_loop`, or `loopax.rewrite_loops`"


class Value(NamedTuple):
    """The name of a value in a program, and whether it has a derivative."""

    name: str = UNNAMED  # as an argument of the user's function, or as a part of a loop's carry
    perturbed: bool = False  # it depends on what is differentiated
    aval: Any = None  # of what a loop reads or writes: with its lanes


class FoundLoop(NamedTuple):
    """A loop where it stands in a program."""

    loop: Loop
    library: str  # "loopax" or "lax"
    source: str  # "file.py:12 (function)", or nothing
    operands: list[Value]  # consts, carry and xs
    carry: list[Value]  # after any number of steps
    ys: list[Value]
    inner: list["FoundLoop"]
    lanes: int  # that take numbers of steps of their own, in groups or stages
    waiting: int  # that run until the slowest of them is done


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline the calls of a program, without dead code. Operations of loopax stay as they are."""

    def own_line(eqn: Any) -> AbstractContextManager[None]:
        """Of an equation that has one, else that of the call: JAX drops lines where it traces custom derivatives."""
        return jaxi.equation_context(eqn) if any(of_user(jaxi.user_lines(eqn))) else nullcontext()

    def run(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        inner = jaxi.called(eqn)
        if inner is None:
            return bind_again(eqn, operands)
        return evaluate(inner, operands, run, (lambda _: nullcontext()) if jaxi.is_of_jax(inner) else own_line)

    flat = jax.make_jaxpr(lambda *inputs: evaluate(closed, inputs, run))(*closed.in_avals)
    return jaxi.dce(flat, [True] * len(flat.out_avals), True)[0]


def find(closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[FoundLoop]:
    """The loops of a program, in order."""
    flat = without_calls(closed)
    values = dict(zip(flat.invars, inputs, strict=True))
    found: list[FoundLoop] = []
    for eqn in flat.eqns:
        operands = [Value() if isinstance(atom, Literal) else values.get(atom, Value()) for atom in eqn.invars]
        if (one := found_at(eqn, operands)) is not None:
            # loopax itself writes a condition as a loop of one step at most (`core/nested_lanes.py`).
            is_condition = one.loop.debug_info is None and one.loop.bound == 1
            found += one.inner if is_condition else [one]
        elif not jaxi.is_kernel(eqn):  # a `cond`, say: the operands of the programs in it are its last ones
            for inner in inner_jaxprs(eqn):
                count = len(inner.in_avals)
                is_fed = count <= len(operands)
                found += find(inner, operands[len(operands) - count :] if is_fed else [Value(perturbed=True)] * count)
        flags = [value.perturbed for value in operands]
        if any(flags) and not jaxi.stops_gradient(eqn):
            values.update({atom: Value(perturbed=True) for atom in eqn.invars if jaxi.is_reference(atom.aval)})
            for variable, needed in zip(eqn.outvars, of_equation(eqn, tangent_dependence), strict=True):
                if jaxi.has_tangents(variable.aval) and any(flags[i] for i in members(needed)):
                    values[variable] = Value(perturbed=True)
    return found


def found_at(eqn: Any, values: list[Value]) -> FoundLoop | None:
    """The loop that an equation is, whose operands are these; None where it is none."""
    batch = CompactVmap(**eqn.params) if eqn.primitive is compact_vmap_p else None
    loop = Loop(**eqn.params) if eqn.primitive is loop_p else batch.static if batch else None
    library, lanes, invars, results = "loopax", 1, eqn.invars[2:], eqn.outvars[1:]
    if isinstance(loop, Loop):
        waiting = loop.debug_info.waiting if loop.debug_info else 1
        if batch:
            lanes = batch.axis.size
            waiting = lanes if is_one_batch(loop, lanes, batch.mapped) else 1
    elif (of_jax := None if batch else jaxi.lax_loop(eqn)) is not None:  # a batch of reverse sweeps has none
        library, loop, invars, results, waiting = "lax", _loop_of_jax(of_jax), eqn.invars, eqn.outvars, 1
        if of_jax.cond is not None:  # what the condition reads stands in front, and is of no interest here
            invars, waiting = invars[of_jax.num_cond_consts :], prod(of_jax.cond.out_avals[0].shape)
    else:
        return None
    own = [*loop.names.consts, *loop.names.carry, *loop.names.xs]
    if loop.debug_info is not None and loop.debug_info.branch:  # its carry is the operands, and arrays of the result
        own = ["result" if name.startswith("carry[1]") else name.replace("carry[0]", "operands", 1) for name in own]
    given = zip(own, values[len(values) - len(own) :], invars, strict=True)
    operands = [Value(name or value.name, value.perturbed, atom.aval) for name, value, atom in given]
    consts, carry, xs = loop.inputs(operands)
    flags = (False, *(value.perturbed for value in operands))
    reached = dependence_fixpoint(loop.body, flags, loop.carry_range, of_program=tangent_dependence)
    later = [leaf._replace(perturbed=leaf.perturbed or after) for leaf, after in zip(carry, reached, strict=False)]
    return FoundLoop(
        loop,
        library,
        source_of(eqn),
        operands,
        later,
        [Value(name or "ys", aval=y.aval) for name, y in zip(loop.names.ys, results[loop.num_carry :], strict=False)],
        find(loop.body, [Value(), *consts, *later, *xs]),
        lanes,
        waiting,
    )


def source_of(eqn: Any) -> str:
    """The line of the user's from which an equation comes; nothing where it is not known."""
    return str(next(of_user(jaxi.user_lines(eqn)), ""))


def _loop_of_jax(found: jaxi.LaxLoop) -> Loop:
    """A loop of JAX as one of the core."""
    is_scan = found.cond is None
    consts, carry, xs = split_list(jaxi.argument_names(found.body), [found.num_consts, found.num_carry])
    names = Names(tuple(consts), tuple(carry), tuple(xs) if is_scan else (), ())
    body = jaxpr_as_fun(found.body)
    return Loop(
        trace(lambda _, *operands: body(*operands), [INDEX, *found.body.in_avals]),  # of the core: with a row's number
        found.num_consts,
        found.num_carry,
        bound=found.length if is_scan else None,
        reverse=is_scan and found.reverse,
        predicated=False,
        unroll=1,
        kind=Decided(EveryResidual(keeps_all=True) if is_scan else NoReverseMode(ValueError, NO_REVERSE_MODE)),
        debug_info=DebugInfo("scan" if is_scan else "while_loop", Lax(), Lockstep(), is_scan, names=names),
    )


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
    name, count = getattr(fn, "__name__", type(fn).__name__), len(args)
    names = _bound_names(caller, name, fn, args)
    args = [jnp.asarray(arg) if isinstance(arg, float | complex) else arg for arg in args]
    every: Any = range(count) if argnums is None else argnums
    numbers = list(every) if isinstance(every, range | list | tuple) else [every]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(
                f"{caller}(argnums=...): got {argnums!r}, expected the number of a positional argument, or several, "
                f"from 0 to {count - 1}."
            )
    chosen = [number % count for number in numbers]
    program = trace_program(caller, fn, args, {})
    floating = map(jaxi.has_tangents, program.closed.in_avals)
    inputs = [
        Value(names[argument] + keystr(path), is_floating and argument in chosen)
        for argument, path, is_floating in zip(program.arguments, program.paths, floating, strict=True)
    ]
    if argnums is not None and not any(value.perturbed for value in inputs):
        raise TypeError(
            f"{caller}(argnums={argnums!r}): there are no floating-point arrays in these arguments, so there is no "
            "gradient. Give the numbers of arguments that hold some."
        )
    return Subject(name, args, program, inputs)


def _bound_names(caller: str, function: str, fn: Any, args: Sequence[Any]) -> list[str]:
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
            f"{caller}({function}, ...): the arguments do not fit: {error}. Got {got}, expected those of "
            f"{function}{signature}. Give what you would call it with; bind keywords with `functools.partial`."
        ) from error
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if is_rest else [name]
    return names


def gradient_of(closed: ClosedJaxpr, perturbed: Sequence[bool]) -> ClosedJaxpr:
    """The program of a gradient: cotangents of the perturbed inputs, for ones as those of the results."""
    function = jaxpr_as_fun(closed)
    floating = list(map(jaxi.has_tangents, closed.out_avals))

    def gradient(*inputs: Any) -> Any:
        results = of_selected(lambda *values: select(floating, function(*values)), perturbed, inputs)
        out, pullback = jax.vjp(results, *select(perturbed, inputs))
        return pullback([jnp.ones_like(x) for x in out])

    return jax.make_jaxpr(gradient)(*closed.in_avals)
