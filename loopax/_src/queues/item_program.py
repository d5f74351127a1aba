"""A function of one item, traced."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from loopax._src.core import mixing_primitive
from loopax._src.frontend.references import refuse_closed_over
from loopax._src.frontend.runtime_checks import collecting
from loopax._src.function_names import Called
from loopax._src.jax_internals import ClosedJaxpr, made_at, open_constants, source_here
from loopax._src.messages import mixed_items_message
from loopax._src.nnx.functional import freeze, thaw_numbered
from loopax._src.nnx.writeback import refuse_changes
from loopax._src.pytrees.leaves import Spec, pack


class ItemProgram(NamedTuple):
    """What is run for each item."""

    program: ClosedJaxpr  # (*shared, *function, *item) -> (*whether a check failed, *results)
    shared: list[Any]  # what the function closes over
    results: Spec
    messages: list[str]  # of the checks


def item_program(caller: str, f: Callable[[Any], Any], item: Spec, function: Spec | None = None) -> ItemProgram:
    """Trace a function of a pytree like `item`; `caller` is the function of loopax that was given it.

    With `function`, the arrays in `f` are arguments of the program; else it closes over them.
    """
    found: dict[str, Any] = {}
    of_function = function.avals if function else []
    here = source_here()

    def flat(*arrays: Any) -> list[Any]:
        own = function.unpack(arrays[: len(of_function)]) if function else None
        call, own_objects = thaw_numbered(own) if function else (f, [])
        given = made_at(here, item.unpack(arrays[len(of_function) :]))
        live, objects = thaw_numbered(given)
        with collecting() as checks:
            results, found["spec"] = pack(freeze(call(live)))
        refuse_changes(f"f of {caller}", given, objects, live)
        if function:
            refuse_changes(f"f of {caller}", own, own_objects, call, "itself, and its copies in lanes")
        found["messages"] = [check.message for check in checks]
        return [*(check.failed for check in checks), *results]

    called = Called(caller, (f,), ("x",))
    names = [*(function.names("f") if function else []), *item.names(called.name("x"))]
    called.name_in_errors(flat, names)
    program, shared = open_constants(jax.make_jaxpr(flat)(*of_function, *item.avals))
    refuse_closed_over(f"f of {caller}", shared, "Return what f would write")
    if primitive := mixing_primitive(program):
        raise NotImplementedError(mixed_items_message(caller, primitive))
    return ItemProgram(program, list(shared), found["spec"], found["messages"])
