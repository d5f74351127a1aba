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
from loopax._src.core.autodiff.transpose import LinearLoop, linear_loop_p
from loopax._src.core.batching.compact.primitive import CompactVmap, compact_vmap_p
from loopax._src.core.effects.guard import only_if_p
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.varying_axes import retyped_p
from loopax._src.core.masking.all_active import active_p
from loopax._src.core.masking.substitute import fill_inactive_p, filled
from loopax._src.core.row_buffers.primitives import add_p, get_p, put_p, take_p, view_p
from loopax._src.jax_internals import ClosedJaxpr, Jaxpr, Primitive, scan_sizes

Program = ClosedJaxpr | Jaxpr

# JAX's primitives whose results are their operands.
_SAME = {"stop_gradient", "copy", "copy_p", "name", "device_put", "optimization_barrier"}
_SAME |= {"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"}
# Those that evaluate a program on their operands, and what else they say about it has no part in values.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_SHOWN = {"debug_callback", "debug_print"}
_NO_MEANING = {"name", "debug_info", "sharding", "out_sharding", "linear", "weak_type", "differentiated", "unroll"}
_NO_MEANING |= {"_split_transpose", "split_transpose", "vmap_method", "result_avals", "in_tree", "out_tree"}


@dataclass(frozen=True)
class Meaning:
    """An operation on arrays: a word, settings and programs in it, each with a word."""

    word: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)


def is_same(eqn: Any) -> bool:
    """Whether the results are the operands."""
    if eqn.primitive.name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return eqn.primitive.name in _SAME or eqn.primitive is retyped_p


def is_shown(eqn: Any) -> bool:
    """Whether an equation only shows values to somebody (`jax.debug`)."""
    primitive = eqn.params["happening"] if eqn.primitive is only_if_p else eqn.primitive
    return primitive.name in _SHOWN


def acts(eqn: Any) -> bool:
    """Whether an equation has effects that count, also where nobody uses its results."""
    return any("Debug" not in type(effect).__name__ for effect in eqn.effects)


def called(eqn: Any) -> Program | None:
    """The program that an equation evaluates on its operands, if it does nothing else."""
    if eqn.primitive is fill_inactive_p:
        return jax.make_jaxpr(partial(filled, **eqn.params))(*(x.aval for x in eqn.invars))
    if eqn.primitive.name not in _CALLS:
        return None
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)


def meaning(eqn: Any) -> Meaning:
    """What any other equation does."""
    own = OWN.get(eqn.primitive)
    if own is not None:
        return own(eqn.params)
    if eqn.primitive.name == "scan":
        return _lax_scan(eqn)
    if "_prim" in eqn.params:  # from JAX 0.11 on some functions of `jnp` are objects, behind one primitive for all
        return Meaning(type(eqn.params["_prim"]).__name__, eqn.params["_prim"].params)
    params = {name: value for name, value in eqn.params.items() if name not in _NO_MEANING}
    inner = {name: found for name, value in params.items() if (found := _programs(value))}
    settings = {name: value for name, value in params.items() if name not in inner}
    programs = {f"{name} {i}": program for name, found in inner.items() for i, program in enumerate(found)}
    return Meaning(eqn.primitive.name, settings, programs)


def _programs(value: Any) -> list[Program]:
    values = value if isinstance(value, tuple | list) else [value]
    return [x for x in values if isinstance(x, ClosedJaxpr | Jaxpr)]


def _lax_scan(eqn: Any) -> Meaning:
    consts, carry = scan_sizes(eqn)
    settings = {"length": eqn.params["length"], "reverse": eqn.params["reverse"], "consts": consts, "carry": carry}
    return Meaning("scan", settings, {"step": eqn.params["jaxpr"]})


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
    return Meaning(f"where active: {params['happening'].name}", dict(params["params"]))


def _places(mask: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, chosen in enumerate(mask) if chosen)


def _plain(word: str, *, lanes: bool = True) -> Callable[[dict[str, Any]], Meaning]:
    """An operation on a buffer."""
    return lambda params: Meaning(word, {"lanes": params["lanes"]} if lanes else {})


OWN: dict[Primitive, Callable[[dict[str, Any]], Meaning]] = {
    loop_p: lambda params: _loop(Loop(**params)),
    reverse_sweep_p: lambda params: _sweep(ReverseSweep(**params)),
    linear_loop_p: _linear_loop,
    linear_sweep_p: _linear_sweep,
    compact_vmap_p: _lanes,
    only_if_p: _effect,
    active_p: lambda params: Meaning("active lanes", {"limits": _places(params["windows"])}),
    get_p: _plain("buffer: get"),
    put_p: _plain("buffer: put"),
    add_p: _plain("buffer: add"),
    take_p: _plain("buffer: take"),
    view_p: _plain("buffer: view", lanes=False),
}
