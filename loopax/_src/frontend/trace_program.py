"""A function of pytrees as a jaxpr."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.tree_util import keystr

from loopax._src.core import mixing_primitive
from loopax._src.frontend.references import refuse_closed_over
from loopax._src.frontend.run_time_checks import Flags, collecting
from loopax._src.jax_internals import ClosedJaxpr, made_at, open_constants, source_here
from loopax._src.nnx.functional import freeze, refuse_changes, thaw_numbered
from loopax._src.pytrees.leaves import Spec, is_static, pack
from loopax._src.pytrees.static import Called, parameters_of


class ItemProgram(NamedTuple):
    """What is run for each item."""

    program: ClosedJaxpr  # (*shared, *function, *item) -> (*arrays of checks, *numbers of the loop, *results)
    shared: list[Any]  # what the function closes over
    results: Spec
    flags: Flags  # the checks


def item_program(
    caller: str, f: Callable[[Any], Any], item: Spec, function: Spec | None = None, info: bool = False
) -> ItemProgram:
    """Trace a function of a pytree like `item`; `caller` is the function of loopax that was given it.

    With `function`, the arrays in `f` are arguments of the program; else it closes over them. `info`: it returns one.
    """
    found: dict[str, Any] = {}
    of_function = function.avals if function else []
    here = source_here()

    def flat(*arrays: Any) -> list[Any]:
        own = function.unpack(arrays[: len(of_function)]) if function else None
        call, own_objects = thaw_numbered(own) if function else (f, [])
        given = made_at(here, item.unpack(arrays[len(of_function) :]))
        live, objects = thaw_numbered(given)
        with collecting() as (_, checks, infos, _):
            results, found["spec"] = pack(freeze(call(live)))
        refuse_changes(f"f of {caller}", given, objects, live)
        if function:
            refuse_changes(f"f of {caller}", own, own_objects, call, "itself, and its copies in lanes")
        found["flags"], of_checks = Flags.of(checks, None)
        if info and not infos:
            raise ValueError(
                f"{caller}(info=True): f calls no loop itself. A loop in a `jax.jit` inside of f cannot hand out its "
                "numbers: leave this jit out, as the stream compiles f."
            )
        return [*of_checks, *(infos[0][:2] if info else ()), *results]

    called = Called(caller, (f,), ("x",))
    names = [*(function.names("f") if function else []), *item.names(called.name("x"))]
    called.name_in_errors(flat, names)
    program, shared = open_constants(jax.make_jaxpr(flat)(*of_function, *item.avals))
    refuse_closed_over(f"f of {caller}", shared, "Return what f would write")
    if primitive := mixing_primitive(program):
        raise NotImplementedError(
            f"{caller}(f, ...): f calls {primitive}, which computes for a lane from other lanes, so an item's result "
            "would depend on which items are in other lanes. (JAX draws for all lanes of a batch with the key of one, "
            "where keys are of the PRNGs rbg and unsafe_rbg. The rule of a jax.custom_batching.custom_vmap may do so, "
            "too.) Draw with keys of threefry (`jax.random.key(seed, impl='threefry2x32')`), or use "
            "`jax.lax.map(f, xs)`, which takes one item after another."
        )
    return ItemProgram(program, list(shared), found["spec"], found["flags"])


class TracedProgram(NamedTuple):
    """A traced function."""

    closed: ClosedJaxpr  # arrays -> arrays
    arrays: list[Any]  # among the arguments
    arguments: list[int]  # the number of the positional argument in which each stands; -1: a keyword
    paths: list[Any]  # where in it
    result_of: Callable[[Sequence[Any]], Any]  # what the function returns, from the results of the jaxpr


def trace_program(caller: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedProgram:
    """Trace a function, for a function of loopax; what is not an array in its arguments stays what it is.

    An argument may also hold a `jax.ShapeDtypeStruct` in place of an array.
    """
    given, other = eqx.partition((tuple(args), dict(kwargs)), _is_array)
    leaves, treedef = jax.tree.flatten_with_path(given)
    arrays, paths = [leaf for _, leaf in leaves], [path for path, _ in leaves]
    found: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = eqx.combine(treedef.unflatten(arrays), other)
        results, found["other"] = eqx.partition(fn(*args, **kwargs), _is_array)
        leaves, found["treedef"] = jax.tree.flatten(results)
        return leaves

    def name(path: Any) -> str:
        """What an array among the arguments is called: its parameter, and where in it."""
        (in_keywords, which), rest = path[:2], keystr(path[2:])
        if in_keywords.idx:
            return which.key + rest
        return (names[which.idx] if which.idx < len(names) else f"argument {which.idx}") + rest

    names = parameters_of(fn)
    Called(caller, (fn,), ()).name_in_errors(flat, list(map(name, paths)))
    try:
        closed = jax.make_jaxpr(flat)(*arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise TypeError(
            f"{caller}({getattr(fn, '__name__', repr(fn))}): the function cannot be traced by JAX, and only what is "
            "traced has loops to look at. It uses the value of an array where Python has to decide something (an `if`, "
            "a shape, a conversion to NumPy). Give what it decides by as a Python number, which stays one, or rewrite "
            f"the part of it that is pure JAX. JAX says:\n{error}"
        ) from error
    return TracedProgram(
        closed,
        arrays,
        [path[1].idx if path[0].idx == 0 else -1 for path in paths],
        [path[2:] for path in paths],
        lambda results: eqx.combine(found["treedef"].unflatten(results), found["other"]),
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or (eqx.is_array(leaf) and not is_static(leaf))
