"""A program whose loops are of another kind."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from loopax._src.core import Asked, Kind, Loop, LoopCall, LoopOperands, run_by, run_with_tape
from loopax._src.core.batching.compact.primitive import CompactVmap, compact_vmap_of, compact_vmap_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, map_programs, trace
from loopax._src.frontend.runtime_checks import KindCheck
from loopax._src.jax_internals import ClosedJaxpr, Jaxpr, replace_jaxpr


def with_kind(closed: ClosedJaxpr, kind: Kind) -> ClosedJaxpr:
    """Give every loop of loopax that a user has called this kind. Loops that loopax makes itself keep theirs."""
    if kind.inverse is not None:
        raise NotImplementedError(
            f"{kind!r} brings the inverse of the steps of one loop. Give it to that loop, and compare the function as "
            "it is written."
        )
    if kind.derivative != "exact":
        return trace(lambda *operands: evaluate(closed, operands, partial(_run_by_kind, kind)), closed.in_avals)
    jaxpr = closed.jaxpr
    return replace_jaxpr(closed, jaxpr.invars, jaxpr.outvars, [_equation(eqn, kind) for eqn in jaxpr.eqns])


def _equation(eqn: Any, kind: Kind) -> Any:
    if eqn.primitive is loop_p:
        return eqn.replace(params=_loop(Loop(**eqn.params), kind)._asdict())
    if eqn.primitive is compact_vmap_p:
        compact_vmap = CompactVmap(**eqn.params)
        if isinstance(compact_vmap.static, Loop):
            avals = [atom.aval for atom in eqn.invars]
            compact_vmap = compact_vmap_of(
                compact_vmap.rules, _loop(compact_vmap.static, kind), compact_vmap.axis, compact_vmap.mapped, avals
            )
        return eqn.replace(params=compact_vmap._asdict())
    return eqn.replace(params={name: _inside(value, kind) for name, value in eqn.params.items()})


def _run_by_kind(kind: Kind, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation, whose loops are run by the kind: it gives them another derivative."""
    if eqn.primitive is compact_vmap_p:
        raise NotImplementedError(f"{kind!r} cannot take the place of the kind of lanes in batches of their own.")
    loop = Loop(**eqn.params) if eqn.primitive is loop_p else None
    if loop is None or loop.debug_info is None:
        return bind_again(map_programs(eqn, partial(with_kind, kind=kind)), operands)
    (low, high, *leaves), info, loop = operands, loop.debug_info, _loop(loop, kind)
    call = LoopCall(
        loop,
        LoopOperands(low, high, *loop.inputs(leaves)),
        is_fixed=info.fixed,
        where=f"the body of loopax.{info.function}",
        unpack=lambda carry: list(carry[int(loop.predicated) :]),
        checked=KindCheck(f"loopax.{info.function}", throw=True),
        run_loop=run_with_tape,
    )
    return run_by(kind, call).leaves


def _loop(loop: Loop, kind: Kind) -> Loop:
    body, debug_info = with_kind(loop.body, kind), loop.debug_info
    if debug_info is None:
        return loop._replace(body=body)
    storage = Asked.of(kind, loop.bound, debug_info.fixed, debug_info.bound_is_loose)
    return loop._replace(body=body, storage=storage, debug_info=replace(debug_info, kind=kind))


def _inside(value: Any, kind: Kind) -> Any:
    """A parameter of an equation, with the loops of the programs in it."""
    if isinstance(value, ClosedJaxpr):
        return with_kind(value, kind)
    if isinstance(value, Jaxpr):
        return with_kind(ClosedJaxpr(value, []), kind).jaxpr
    if type(value) in (tuple, list):
        return type(value)(_inside(item, kind) for item in value)
    return value
