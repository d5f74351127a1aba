"""What an equation of a jaxpr means, in words that stay when JAX or loopax rename theirs.

Left out is what changes no value: names, places in the source, how arrays are spread over devices, how a gradient is
stored, how many steps stand in an iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from loopax._src.core.autodiff.sweep_transpose import LinearSweep, linear_sweep_p
from loopax._src.core.batching.compact.primitive import CompactVmap, compact_vmap_p
from loopax._src.core.effects.guard import OnlyIf, only_if_p
from loopax._src.core.ir.linear_loop import LinearLoop, linear_loop_p
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.varying_axes import retyped_p
from loopax._src.core.masking.all_active import ActiveLanes, active_p
from loopax._src.core.masking.substitute import always, fill_inactive_p, filled
from loopax._src.core.row_buffers.primitives import add_p, get_p, lanes_of, put_p, take_p, view_p
from loopax._src.frontend.raising import written_out
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    Scan,
    called,
    function_object,
    is_identity,
    is_scan,
    meaningful_params,
    only_shows,
    wide_program,
)

Program = ClosedJaxpr | Jaxpr


@dataclass(frozen=True)
class Meaning:
    """An operation on arrays: a word, settings and programs in it, each with a word."""

    word: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)


def is_same(eqn: Any) -> bool:
    """Whether the results are the operands."""
    return is_identity(eqn) or eqn.primitive is retyped_p


def is_shown(eqn: Any) -> bool:
    """Whether an equation only shows values to somebody (`jax.debug`)."""
    return only_shows(OnlyIf(**eqn.params).happening if eqn.primitive is only_if_p else eqn.primitive)


def acts(eqn: Any) -> bool:
    """Whether an equation has effects that count, also where nobody uses its results."""
    return any("Debug" not in type(effect).__name__ for effect in eqn.effects)


def program_of(eqn: Any) -> Program | None:
    """The program that an equation evaluates on its operands, if it does nothing else."""
    if eqn.primitive is fill_inactive_p:
        return jax.make_jaxpr(partial(filled, **always(eqn.params)))(*(x.aval for x in eqn.invars))
    return wide_program(eqn) or written_out(eqn) or called(eqn)


def meaning(eqn: Any) -> Meaning:
    """What any other equation does."""
    own = OWN.get(eqn.primitive)
    if own is not None:
        return own(eqn.params)
    if is_scan(eqn):
        return _lax_scan(Scan.of(eqn))
    if (function := function_object(eqn)) is not None:
        return Meaning(type(function).__name__, function.params)
    params = meaningful_params(eqn)
    inner = {name: found for name, value in params.items() if (found := _programs(value))}
    settings = {name: value for name, value in params.items() if name not in inner}
    programs = {f"{name} {i}": program for name, found in inner.items() for i, program in enumerate(found)}
    return Meaning(eqn.primitive.name, settings, programs)


def _programs(value: Any) -> list[Program]:
    values = value if isinstance(value, tuple | list) else [value]
    return [x for x in values if isinstance(x, ClosedJaxpr | Jaxpr)]


def _lax_scan(loop: Scan) -> Meaning:
    settings = {"length": loop.length, "reverse": loop.reverse, "consts": loop.num_consts, "carry": loop.num_carry}
    return Meaning("scan", settings, {"step": loop.body})


# ---- loopax's own


def _loop(loop: Loop, word: str = "loop", **more: Any) -> Meaning:
    settings = {
        "consts": loop.num_consts,
        "carry": loop.num_carry,
        "bound": loop.bound,
        "reverse": loop.reverse,
        "condition": loop.predicated,
        "saved": _places(loop.saved),
    }
    return Meaning(word, settings | more, {"step": loop.body})


def _sweep(sweep: ReverseSweep, word: str = "reverse sweep", **more: Any) -> Meaning:
    settings = {
        "consts": sweep.num_consts,
        "states": sweep.num_state,
        "carry": sweep.num_carry,
        "rows of the forward step": sweep.num_forward_xs,
        "bound": sweep.bound,
        "reverse": sweep.reverse,
    }
    return Meaning(word, settings | more, {"forward step": sweep.forward, "step": sweep.backward})


def _linear_loop(params: dict[str, Any]) -> Meaning:
    linear = LinearLoop(**params)
    return _loop(linear.as_loop, "linear loop", linear=tuple(map(_places, linear.masks)))


def _linear_sweep(params: dict[str, Any]) -> Meaning:
    linear = LinearSweep(**params)
    return _sweep(linear.whole, "linear reverse sweep", linear=tuple(map(_places, linear.masks)))


def _lanes(params: dict[str, Any]) -> Meaning:
    """A batch, by what there is a batch of."""
    compact_vmap = CompactVmap(**params)
    of = _loop(compact_vmap.static) if isinstance(compact_vmap.static, Loop) else _sweep(compact_vmap.static)
    return Meaning(f"lanes of a {of.word}", {**of.settings, "mapped": _places(compact_vmap.mapped)}, of.programs)


def _effect(params: dict[str, Any]) -> Meaning:
    only_if = OnlyIf(**params)
    return Meaning(f"where active: {only_if.happening.name}", dict(only_if.params))


def _places(mask: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, chosen in enumerate(mask) if chosen)


def _plain(word: str, *, lanes: bool = True) -> Callable[[dict[str, Any]], Meaning]:
    """An operation on a buffer."""
    return lambda params: Meaning(word, {"lanes": lanes_of(params)} if lanes else {})


OWN: dict[Primitive, Callable[[dict[str, Any]], Meaning]] = {
    loop_p: lambda params: _loop(Loop(**params)),
    reverse_sweep_p: lambda params: _sweep(ReverseSweep(**params)),
    linear_loop_p: _linear_loop,
    linear_sweep_p: _linear_sweep,
    compact_vmap_p: _lanes,
    only_if_p: _effect,
    active_p: lambda params: Meaning("active lanes", {"limits": _places(ActiveLanes(**params).windows)}),
    get_p: _plain("buffer: get"),
    put_p: _plain("buffer: put"),
    add_p: _plain("buffer: add"),
    take_p: _plain("buffer: take"),
    view_p: _plain("buffer: view", lanes=False),
}
