"""JAX's primitives: what they are called, which equations are calls, loops and conditions, and their parameters.

Names and parameters are not part of JAX's public API, and change. The rest of loopax asks here.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec


def one_of(*names: str) -> Callable[[Any], bool]:
    """A function that says whether an equation is one of these primitives."""
    chosen = frozenset(names)
    return lambda eqn: eqn.primitive.name in chosen


is_jit = one_of("jit")
is_cond = one_of("cond")
is_scan = one_of("scan")
is_while = one_of("while")
is_kernel = one_of("pallas_call")  # what is in it is compiled by another compiler
stops_gradient = one_of("stop_gradient")
repeats = one_of("broadcast_in_dim", "reshape", "squeeze", "expand_dims")  # some not at all
converts = one_of("convert_element_type")
is_axis_index = one_of("axis_index")

# Calls: one program, evaluated once on all operands.
#
# With JAX's flags `jax_remat3`, `jax_custom_jvp3` and `jax_custom_vjp3`, `jax.checkpoint` and a function with
# derivatives of its own are equations of one primitive for all, which holds an object; and the object holds the
# program, and the rules. From JAX 0.12 on, so is `lax.custom_root`, without a flag. Classes and fields are not public.

_is_plain_call = one_of("jit", "closed_call", "eval_jaxpr", "remat2")


def function_object(eqn: Any) -> Any:
    """The object that an equation calls; None if its primitive says what is done.

    From JAX 0.11 on some functions of `jnp` are objects, too. These hold no program.
    """
    return eqn.params.get("_prim")


def is_custom_vjp(eqn: Any) -> bool:
    """Whether an equation calls a `jax.custom_vjp`."""
    return eqn.primitive.name == "custom_vjp_call" or type(function_object(eqn)).__name__ == "CustomVJPTraced"


def is_custom(eqn: Any) -> bool:
    """Whether an equation calls a function with derivatives of its own."""
    is_object = type(function_object(eqn)).__name__ in ("CustomJVPTraced", "CustomRoot")
    return is_custom_vjp(eqn) or is_object or eqn.primitive.name == "custom_jvp_call"


def is_checkpoint(eqn: Any) -> bool:
    return eqn.primitive.name == "remat2" or type(function_object(eqn)).__name__ == "RematTraced"


def told_what_is_perturbed(eqn: Any) -> bool:
    """Whether the rule of a `jax.custom_vjp` asks for this (`symbolic_zeros`)."""
    value = function_object(eqn)
    return eqn.params["symbolic_zeros"] if value is None else value.symbolic_zeros


def held_program(value: Any) -> ClosedJaxpr | None:
    """The program that a parameter of an equation is, or holds as such an object; None if there is none.

    An open jaxpr, of which there is none from JAX 0.12 on, is closed: its constants come first among its inputs. It is
    the same each time: caches go by it.
    """
    if isinstance(value, ClosedJaxpr):
        return value
    if isinstance(value, Jaxpr):
        # Under `jax_enable_checks`, JAX's conversion checks the jaxpr, without the names of axes around it.
        return _pe.close_jaxpr(_pe.convert_constvars_jaxpr(value) if value.constvars else value)
    match type(value).__name__:
        case "RematTraced":
            return value.jaxpr
        case "CustomRoot":
            return value.solve_jaxpr
        case "CustomJVPTraced" | "CustomVJPTraced":
            return value.traced.jaxpr
    return None


def with_held_program(value: Any, program: ClosedJaxpr) -> Any:
    """The parameter with another program. The object's rules for derivatives stay as they are."""
    if isinstance(value, ClosedJaxpr):
        return program
    if isinstance(value, Jaxpr):
        size, inputs = len(value.constvars), program.jaxpr.invars
        return program.jaxpr.replace(constvars=inputs[:size], invars=inputs[size:]) if size else program.jaxpr
    new = copy(value)
    match type(value).__name__:
        case "RematTraced":
            new.params = {**value.params, "jaxpr": program}
        case "CustomRoot":

            def solve(*arguments: Any) -> Any:
                return jax.tree.unflatten(value.out_tree, jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))

            new.params = {**value.params, "solve": solve, "solve_jaxpr": program}
        case _:
            traced = copy(value.traced)
            traced._params = {**traced._params, "jaxpr": program}
            for cached in ("_lojax", "_closure_converted"):  # made from the other program; from JAX 0.12 on
                if hasattr(traced, cached):
                    setattr(traced, cached, None)
            new.params = {**value.params, "traced": traced}
    new.__dict__.update(new.params)
    new.effects = frozenset(program.effects)
    return new


def map_parameter(
    value: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """A parameter of an equation, with `function` of each jaxpr in it; the same object if nothing changes.

    What is no jaxpr is replaced by `other` of it. A tuple or a list that `other` leaves as it is keeps its type, and
    its items are mapped in turn.
    """
    if (held := held_program(value)) is not None:
        new = function(held)
        return value if new is held else with_held_program(value, new)
    new = other(value)
    if new is not value or not isinstance(value, tuple | list):
        return new
    items = [map_parameter(item, function, other) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def map_programs(eqn: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Any:
    """An equation with other programs in its parameters, itself if none changes. Its effects stay as they are."""
    return with_params(eqn, {name: map_parameter(value, function) for name, value in eqn.params.items()})


def with_params(eqn: Any, params: dict[str, Any]) -> Any:
    """An equation with other parameters; itself if they are the same objects."""
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def inner_jaxprs(eqn: Any) -> Iterator[ClosedJaxpr]:
    """The jaxprs in the parameters of an equation."""
    return programs_in(tuple(eqn.params.values()))


_PLAIN = {bool, int, float, str, type(None)}  # asked first: most parameters are, and these functions are called often


def programs_in(value: Any) -> Iterator[ClosedJaxpr]:
    """The jaxprs in a parameter of an equation, or in several of them."""
    if type(value) in _PLAIN:
        return
    if (held := held_program(value)) is not None:
        yield held
    elif isinstance(value, tuple | list):
        yield from chain.from_iterable(map(programs_in, value))


def equations_in(jaxpr: ClosedJaxpr) -> Iterator[Any]:
    """The equations of a program, each before those of programs inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from chain.from_iterable(map(equations_in, inner_jaxprs(eqn)))


def num_equations(jaxpr: ClosedJaxpr) -> int:
    """How many equations a program has, those of inner programs included."""
    return sum(1 for _ in equations_in(jaxpr))


def called(eqn: Any) -> ClosedJaxpr | None:
    """The program that an equation evaluates on its operands; None if it is no call.

    A function with derivatives of its own is a call: its values are those of its program.
    """
    function = function_object(eqn)
    if function is None:
        is_call = _is_plain_call(eqn) or is_custom(eqn)
        return held_program(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]) if is_call else None
    program = held_program(function)
    if program is None or len(program.in_avals) == len(eqn.invars):
        return program

    # JAX may hand such an object operands for its rules alone.
    def evaluate(*operands: Any) -> list[Any]:
        return jax.tree.leaves(function.expand(*jax.tree.unflatten(function.in_tree, operands)))

    return jax.make_jaxpr(evaluate)(*(x.aval for x in eqn.invars))


def inlinable(eqn: Any) -> ClosedJaxpr | None:
    """The program of a call that can be evaluated in its place, derivatives included; None if there is none.

    A function with derivatives of its own is left out: its program has others.
    """
    return called(eqn) if _is_plain_call(eqn) or is_checkpoint(eqn) else None


def bind_open_call(
    eqn: Any, function: Callable[[ClosedJaxpr], Callable[..., Sequence[Any]]], operands: Sequence[Any]
) -> Sequence[Any] | None:
    """A `shard_map` or a `jax.checkpoint` with `function` of its program; None if the equation is neither.

    Its program is an open jaxpr, which cannot hold constants, so it is bound anew. In a `shard_map` the function may
    take more operands, in front of the others, which devices share.
    """
    if eqn.primitive.name == "shard_map":
        params, program = eqn.params, held_program(eqn.params["jaxpr"])
        assert program is not None
        of_devices = function(program)
        return jax.shard_map(
            lambda *xs: tuple(of_devices(*xs)),
            mesh=params["mesh"],
            in_specs=(*(PartitionSpec() for _ in operands[len(params["in_specs"]) :]), *params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            # The name of the axes changed between JAX 0.10.0 and 0.10.2.
            axis_names=set(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]),
            check_vma=params["check_vma"],
        )(*operands)
    program = called(eqn) if is_checkpoint(eqn) else None
    if program is None:
        return None
    params = eqn.params if function_object(eqn) is None else function_object(eqn).params
    policy, prevents = params["policy"], params.get("prevent_cse", True)
    return jax.checkpoint(function(program), prevent_cse=prevents, policy=policy)(*operands)


# ---- control flow


class LaxLoop(NamedTuple):
    """A `lax.scan` or a `lax.while_loop`. Operands are constants of the condition, consts, carry and xs."""

    body: ClosedJaxpr  # (*consts, *carry, *x) -> (*carry, *y)
    num_consts: int
    num_carry: int
    length: int = 0  # this and the next two of a scan
    reverse: bool = False
    unroll: int = 1
    cond: Any = None  # the jaxpr (*cond consts, *carry) -> bool, or one for each lane of a batch; None: it is a scan
    num_cond_consts: int = 0

    @property
    def carry_range(self) -> range:
        """Where the carry is among the inputs of the body."""
        return range(self.num_consts, self.num_consts + self.num_carry)

    def groups(self, operands: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Constants of the condition, consts, carry and xs among the operands."""
        first = self.num_cond_consts
        carry, xs = first + self.num_consts, first + self.num_consts + self.num_carry
        return operands[:first], operands[first:carry], operands[carry:xs], operands[xs:]


def lax_loop(eqn: Any) -> LaxLoop | None:
    """The loop of `jax.lax` that an equation is; JAX 0.12 keeps a scan's numbers of operands in trees of its own."""
    params = eqn.params
    if is_while(eqn):
        sizes, cond = (params["body_nconsts"], len(eqn.outvars)), params["cond_jaxpr"]
        return LaxLoop(params["body_jaxpr"], *sizes, cond=cond, num_cond_consts=params["cond_nconsts"])
    if not is_scan(eqn):
        return None
    if "num_carry" in params:
        sizes = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        sizes = len(consts), len(carry)
    return LaxLoop(params["jaxpr"], *sizes, params["length"], params["reverse"], params["unroll"])


def bind_while(eqn: Any, loop: LaxLoop, operands: Sequence[Any]) -> Sequence[Any]:
    """The `while_loop` of an equation with other programs, or other numbers of constants."""
    programs = {"cond_jaxpr": loop.cond, "body_jaxpr": loop.body}
    numbers = {"cond_nconsts": loop.num_cond_consts, "body_nconsts": loop.num_consts}
    return eqn.primitive.bind(*operands, **{**eqn.params, **programs, **numbers})


def branches(eqn: Any) -> tuple[ClosedJaxpr, ...]:
    """The programs of a `lax.cond` or `lax.switch`, whose operands are those behind the first."""
    return eqn.params["branches"]


def chooses_platform(eqn: Any) -> bool:
    """Whether it is the `lax.cond` of a `lax.platform_dependent`: compilation chooses, and others may not compile."""
    return eqn.params.get("branches_platforms") is not None


is_linear_solve = one_of("custom_linear_solve")


def bind_linear_solve(
    eqn: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr], extra: Sequence[Any], operands: Sequence[Any]
) -> Sequence[Any]:
    """A `lax.custom_linear_solve` with `function` of each of its programs, which take some more operands in front.

    Operands are the constants of each program, and the right-hand side. A program that is not given has no constants.
    """
    jaxprs, lengths, rest = eqn.params["jaxprs"], eqn.params["const_lengths"], list(operands)
    constants = []
    for program, length in zip(jaxprs, lengths, strict=True):
        constants.append([*([] if program is None else extra), *rest[:length]])
        rest = rest[length:]
    sizes, programs = map(len, constants), (program and function(program) for program in jaxprs)
    params = {"const_lengths": type(lengths)(*sizes), "jaxprs": type(jaxprs)(*programs)}
    return eqn.primitive.bind(*(x for group in constants for x in group), *rest, **params)


def with_solve(eqn: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Any:
    """A `lax.custom_linear_solve` with `function` of its own programs, and not of those of its transpose."""
    old = eqn.params["jaxprs"]
    new = old._replace(matvec=function(old.matvec), solve=function(old.solve))
    return eqn.replace(params={**eqn.params, "jaxprs": new}, effects=new.solve.effects)


# ---- axes


def axis_of_index(eqn: Any) -> Any:
    """The mapped axis on which a `lax.axis_index` is asked for."""
    return eqn.params["axis_name"]


def marked_varying(eqn: Any) -> frozenset[Any]:
    """The axes of a `shard_map` over which an equation marks its operand as varying; none if it is no such mark."""
    return frozenset(eqn.params["axes"]) if eqn.primitive.name == "pvary" else frozenset()


def collective_name(eqn: Any) -> str:
    """What a primitive that communicates is called in messages."""
    return eqn.primitive.name.removesuffix("_invariant")


# ---- other parameters

_WITHOUT_MEANING = {
    *("name", "debug_info", "sharding", "out_sharding", "linear", "weak_type", "differentiated", "unroll"),
    *("_split_transpose", "split_transpose", "vmap_method", "result_avals", "in_tree", "out_tree"),
}


def meaningful_params(eqn: Any) -> dict[str, Any]:
    """The parameters that have a part in what is computed: no names, shardings, types or rules of derivatives."""
    return {name: value for name, value in eqn.params.items() if name not in _WITHOUT_MEANING}


def is_product_with_vector(eqn: Any) -> bool:
    """Whether a `dot_general` reads a matrix for one vector."""
    if eqn.primitive.name != "dot_general":
        return False
    products, (of_batch, _) = products_per_result(eqn), eqn.params["dimension_numbers"][1]
    operands = [eqn.invars[0].aval.shape, eqn.invars[1].aval.shape]
    shared = products * prod(operands[0][axis] for axis in of_batch)
    return any(prod(shape) == shared for shape in operands)


def sorted_rows(eqn: Any) -> int:
    """How many elements stand in each row that is sorted; zero: nothing is sorted."""
    return eqn.invars[0].aval.shape[eqn.params["dimension"]] if eqn.primitive.name == "sort" else 0


def products_per_result(eqn: Any) -> int:
    """How many products a `dot_general` or a convolution adds up for each of its results."""
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    if eqn.primitive.name == "dot_general":
        return prod(eqn.invars[0].aval.shape[axis] for axis in numbers[0][0])
    return prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
