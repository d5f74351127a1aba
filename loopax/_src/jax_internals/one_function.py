"""Loops of small steps, compiled for a CPU as one function, as jaxlib 0.12 compiles them without being told.

Older versions run each operation of a step by a call of its own, which takes longer than a small operation, unless a
step touches less than 1 kB. They make one function of a call that is marked so, but do not look whether they can: what
is neither arithmetic nor a move of numbers does not compile. The marks are XLA's own, and not public.

What no version takes into a function is written as simpler operations where it is small (`few_numbers.py`): products of
matrices, solving, sorting, and writes at several places, such as those of the transpose of `x[places]`.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

import jax
from jax._src.lib import version as _jaxlib_version
from jax._src.sharding_impls import ShardingContext as _ShardingContext
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

from loopax._src.jax_internals import operations
from loopax._src.jax_internals.few_numbers import MOST_ADDED_UP, in_simple_operations
from loopax._src.jax_internals.primitives import (
    branches,
    called,
    is_cond,
    is_linear_solve,
    is_product_with_vector,
    lax_loop,
    map_programs,
    one_of,
    products_per_result,
)
from loopax._src.jax_internals.random_numbers import with_fast_random_numbers
from loopax._src.jax_internals.tracing import is_for_export
from loopax._src.jax_internals.types import is_on_host

# Whether XLA has to be told, and has been tried on such processors; and whether it makes functions of any size.
NEEDS_TELLING = _jaxlib_version < (0, 12) and platform.machine() in ("x86_64", "AMD64")
MAKES_FUNCTIONS = _jaxlib_version >= (0, 12) or NEEDS_TELLING
# What is larger is left to libraries, which a function does not call, or is worth several threads. Found by trying.
_MOST_COMPUTED = 2**14  # numbers of a result
_MOST_IN_MATRIX = 2**18
# Of a step: LLVM takes up to twice as long to compile so long a function as its parts. Newer versions do not look.
_MOST_EQUATIONS = 2000 if NEEDS_TELLING else 10**6

_SIZES = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_DTYPES = {"bool", "bfloat16", "key<fry>"} | {f"{name}{size}" for name, sizes in _SIZES.items() for size in sizes}
_adds_up = one_of("argmax", "argmin", *(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")))
_moves = one_of(
    *("concatenate", "cummax", "cummin", "cumprod", "cumsum", "dynamic_slice", "gather", "pad", "rev", "slice"),
    *("split", "stack", "tile", "transpose", "unstack", "optimization_barrier", "empty2", "random_split"),
)
_keeps_array = one_of("reshape", "squeeze", "expand_dims", "optimization_barrier", "pvary", "pcast", "split", "unstack")

_meanings: dict[Primitive, Callable[..., Any]] = {}  # of our own primitives, as functions of JAX


def lowering(
    primitive: Primitive, meaning: Callable[..., Any], has_unused: Callable[..., bool] | None
) -> Callable[..., Any]:
    """The rule by which an equation is compiled as what it means.

    `has_unused(**params)`: there may be results that nobody uses, which XLA drops of a loop, and not of a function.
    """
    _meanings[primitive] = meaning
    plain = mlir.lower_fun(meaning, multiple_results=primitive.multiple_results)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not _is_for_one_cpu(ctx):
            return plain(ctx, *operands, **params)
        if not MAKES_FUNCTIONS or (NEEDS_TELLING and has_unused and has_unused(**params)):
            return with_fast_random_numbers(plain, ctx, *operands, **params)
        program = _with_functions(_meaning(primitive, ctx.avals_in, params))
        return with_fast_random_numbers(mlir.lower_fun(jaxpr_as_fun(program)), ctx, *operands)

    return rule


def _is_for_one_cpu(ctx: Any) -> bool:
    """Whether a program is compiled for one CPU, here."""
    platforms, devices = tuple(ctx.platforms or ctx.module_context.platforms), ctx.module_context.axis_context
    is_one = isinstance(devices, _ShardingContext) and devices.num_devices == 1
    return platforms == ("cpu",) and is_one and not is_for_export(ctx)


def _meaning(primitive: Primitive, avals: Sequence[Any], params: dict[str, Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(partial(_meanings[primitive], **params))(*avals)  # `jax.jit` would keep the parameters alive


def _with_functions(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program, with each loop of which a function can be made as XLA makes one of it."""
    eqns = [_as_function(eqn) if lax_loop(eqn) else eqn for eqn in closed.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def _as_function(eqn: Any) -> Any:
    """A loop of simple operations, as a marked call where XLA needs telling; as it is if it can be no function."""
    if not can_be_function(_program_of(eqn), _programs):
        return eqn
    simple = map_programs(eqn, _of_simple_operations)
    return _calling(partial(_function_p.bind, program=_program_of(simple)), eqn) if NEEDS_TELLING else simple


def _program_of(eqn: Any) -> ClosedJaxpr:
    """The program of this equation alone."""
    return jax.make_jaxpr(partial(eqn.primitive.bind, **eqn.params))(*(x.aval for x in eqn.invars))


def _calling(function: Callable[..., Any], eqn: Any) -> Any:
    """The one equation that a function is, in the place of another."""
    with jax.disable_jit(False), jax.numpy_rank_promotion("allow"):
        (call,) = jax.make_jaxpr(function)(*(x.aval for x in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)


def _of_simple_operations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without operations that XLA takes into no function."""
    return ClosedJaxpr(closed.jaxpr.replace(eqns=list(map(_simple, closed.eqns))), closed.consts)


def _simple(eqn: Any) -> Any:
    if not _is_taken(eqn, 1) and (simpler := in_simple_operations(eqn)) is not None:
        return _calling(jax.jit(simpler.function), eqn)
    if eqn.primitive in _meanings:  # what it means makes sums in place, before they become simple
        program = _of_simple_operations(_meaning(eqn.primitive, [x.aval for x in eqn.invars], eqn.params))
        return _calling(jax.jit(jaxpr_as_fun(program)), eqn)
    return map_programs(eqn, _of_simple_operations)


# A call of a program as a function. It takes a tuple, as where XLA makes the function itself: an operand for which XLA
# finds no use would not compile otherwise.
_MARKS = '{xla_cpu_small_call = "true", inlineable = "false"}'
_function_p = Primitive("one_function")
_function_p.multiple_results = True
_function_p.def_abstract_eval(lambda *_, program: program.out_avals)


def _lower_function(ctx: Any, *operands: Any, program: ClosedJaxpr) -> list[Any]:
    given = stablehlo.tuple(operands)
    function = func.FuncOp("one_function", ([given.type], []), ip=ctx.module_context.ip)
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    ctx.module_context.symbol_table.insert(function)
    with ir.InsertionPoint(function.add_entry_block()):
        elements = [stablehlo.get_tuple_element(function.arguments[0], i) for i in range(len(operands))]
        inner = ctx.replace(const_lowering={})  # constants of one function are none of another
        results = stablehlo.tuple(mlir.lower_fun(jaxpr_as_fun(program))(inner, *elements))
        func.ReturnOp([results])
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([given.type], [results.type]))
    call = func.CallOp([results.type], ir.FlatSymbolRefAttr.get(function.name.value), [given])
    call.operation.attributes["mhlo.frontend_attributes"] = ir.Attribute.parse(_MARKS)
    return [stablehlo.get_tuple_element(call.result, i) for i in range(len(ctx.avals_out))]


mlir.register_lowering(_function_p, _lower_function, platform="cpu")


def can_be_function(program: ClosedJaxpr, programs: Callable[[Any], Iterable[ClosedJaxpr]], lanes: int = 1) -> bool:
    """Whether XLA makes one function of a loop that does this on a CPU, for so many lanes.

    `programs` are those within an equation.
    """
    return MAKES_FUNCTIONS and _length(program, programs, lanes) <= _MOST_EQUATIONS


def _length(program: ClosedJaxpr, programs: Callable[[Any], Iterable[ClosedJaxpr]], lanes: int) -> float:
    """The number of equations, also of programs within; infinite if they are too many, or one stands in no function."""
    total = 0.0
    for eqn in program.eqns:
        inner = list(programs(eqn))
        total += _own_length(eqn, bool(inner), lanes)
        if total > _MOST_EQUATIONS:
            return inf
        total += sum(_length(program, programs, lanes) for program in inner)
    return total


def _programs(eqn: Any) -> list[ClosedJaxpr]:
    """Those that an equation evaluates; of one of our own, what it means."""
    if eqn.primitive in _meanings:
        return [_meaning(eqn.primitive, [x.aval for x in eqn.invars], eqn.params)]
    if (loop := lax_loop(eqn)) is not None:
        return [loop.body, *([] if loop.cond is None else [loop.cond])]
    if is_cond(eqn):
        return list(branches(eqn))
    if is_linear_solve(eqn):
        return [eqn.params["jaxprs"].solve]
    program = called(eqn)
    return [] if program is None else [program]


def _own_length(eqn: Any, holds_programs: bool, lanes: int) -> float:
    """As how many equations XLA compiles an operation within a function, programs in it apart; infinite: not there.

    Or it would be slower there.
    """
    arrays = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    if not all(str(x.dtype) in _DTYPES and not is_on_host(x) for x in arrays):
        return inf
    if holds_programs:
        is_program = eqn.primitive in _meanings or is_cond(eqn) or is_linear_solve(eqn)
        return 1 if is_program or lax_loop(eqn) is not None or called(eqn) is not None else inf
    written = [operations.update_of(eqn)] if operations.updates(eqn) else eqn.outvars
    computed = max((x.aval.size for x in written), default=0)
    if lanes * computed > _MOST_COMPUTED and not _keeps_array(eqn):
        return inf
    if _is_taken(eqn, lanes):
        return 1
    simpler = in_simple_operations(eqn, lanes)
    return inf if simpler is None else simpler.num_equations


def _is_taken(eqn: Any, lanes: int) -> bool:
    """Whether XLA takes an operation into a function as it is."""
    if _adds_up(eqn):
        return eqn.invars[0].aval.size <= MOST_ADDED_UP
    if operations.is_product(eqn):
        return lanes == 1 and _is_of_vector(eqn)
    if operations.updates(eqn):
        return lanes * operations.num_places(eqn) == 1
    return operations.is_elementwise_operation(eqn) or _moves(eqn)


def _is_of_vector(eqn: Any) -> bool:
    """Whether a product is one of a vector, which XLA leaves to no library."""
    a, b = (x.aval for x in eqn.invars)
    if eqn.params["dimension_numbers"][1][0] or max(a.ndim, b.ndim) > 2:
        return False
    is_sum = eqn.outvars[0].aval.size == 1
    if is_sum or products_per_result(eqn) == 1 or is_product_with_vector(eqn):
        return max(a.size, b.size) <= (MOST_ADDED_UP if is_sum else _MOST_IN_MATRIX)
    return False
