"""A loop by the numbers of its steps: parts of it, and a ring of the carries before its last steps."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from loopax._src import jax_internals as jaxi
from loopax._src.core import BoundLoop, Kind, Loop, LoopCall, LoopInputs, LoopOperands, Outcome, checked_kind, run
from loopax._src.core.ir.loop import NO_STOP, num_recorded
from loopax._src.core.jaxpr.util import INDEX, of_selected, padded, select, split_list, trace, weakly_cached
from loopax._src.core.row_buffers import put
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun

# Derivatives of functions of which some inputs have no tangents: these cost nothing.


def jvp(function: Callable[[Any], Any], inputs: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp` for one pytree of inputs and of tangents, some of which are `SymbolicZero`s."""
    leaves, structure = jax.tree.flatten(inputs)
    dots = structure.flatten_up_to(tangents)
    has_dot = [not isinstance(dot, SymbolicZero) for dot in dots]

    if any(has_dot):
        of_perturbed = of_selected(lambda *leaves: function(structure.unflatten(leaves)), has_dot, leaves)
        out, found = jax.jvp(of_perturbed, select(has_dot, leaves), select(has_dot, dots))
        # JAX makes tangents of zero on the device, also of results on the host.
        return out, jax.tree.map(lambda x, dot: jaxi.moved_like(x, dot) if jaxi.has_tangents(x) else dot, out, found)
    out = function(inputs)
    return out, jax.tree.map(zero_tangent, out)


def zero_tangent(x: Any) -> Any:
    """The tangent of a constant."""
    return jaxi.zeros(jax.typeof(x)) if jaxi.has_tangents(x) else jaxi.no_tangent(x)


def explained(rule: Callable[..., Any], derivative: str) -> Callable[..., Any]:
    """A rule of a `jax.custom_jvp`, which says what JAX does not have where a batch of it calls a `jax.custom_vjp`."""

    @wraps(rule)
    def explaining(*args: Any) -> Any:
        try:
            return rule(*args)
        except TypeError as error:
            if "custom_vjp" in str(error):
                error.add_note(
                    f"Note of loopax: with derivative={derivative}, a loop whose body calls a "
                    "jax.custom_vjp has a gradient in reverse mode, and none in forward mode or where a jax.vmap "
                    "stands around the loop: JAX has no batch of such a derivative. Give the function a jax.custom_jvp."
                )
            raise

    return explaining


@dataclass(frozen=True, eq=False)
class NumberedSteps:
    """A loop that walks forward from row 0, so that a row is the number of a step."""

    loop: Loop
    operands: LoopOperands
    whole: LoopCall
    bound_loop: BoundLoop  # without leaves of the carry that do not change

    @classmethod
    def of(cls, call: LoopCall) -> "NumberedSteps":
        """Of a loop as it was called."""
        low, high, *inputs = call.operands
        bound = BoundLoop.of(call.loop, low, high, LoopInputs(*inputs))
        consts, carry, xs = bound.inputs(LoopInputs(*inputs))
        loop = bound.loop
        if loop.reverse:  # the number is the row of the first step
            loop = with_number(loop, operator.sub)._replace(reverse=False)
            consts, xs = [high - 1, *consts], [_turned(x, high) for x in xs]
        return cls(loop, LoopOperands(jnp.int32(0), high - low, consts, carry, xs), call, bound)

    def results(self, out: Outcome) -> Outcome:
        """The results of the loop as it was called."""
        out = self.bound_loop.outcome(out, self.whole.operands.carry)
        if not self.whole.loop.reverse:
            return out
        return out._replace(ys=[_turned(y, self.whole.operands.high) for y in out.ys])

    def part(
        self, first: Any, operands: LoopOperands, bound: int, kind: Kind, is_fixed: bool = False, is_shown: bool = False
    ) -> Outcome:
        """Run at most `bound` steps, from number `first` on; the window and the rows of `operands` are theirs.

        `explain` shows the part that is the loop to its user.
        """
        loop = with_number(self.loop, operator.add)._replace(  # the number is that of the first step
            bound=bound,
            kind=checked_kind(kind, bound),
            is_fixed=is_fixed,
            bound_is_loose=False,
            share=1.0,
            reporting=None,
            debug_info=self.loop.debug_info if is_shown else None,
            watch=self.loop.watch and self.loop.watch.of_part(),
            derivative=self.loop.derivative if is_shown else None,
        )
        return self.whole._run_loop(loop, operands._replace(consts=[first, *operands.consts]))

    def with_ring(self, size: int) -> tuple[Outcome, list[Any]]:
        """Run all steps, and keep the carries before the last: that before step i is in row i modulo `size`."""
        loop, operands, num_carry = self.loop, self.operands, self.loop.num_carry
        function, num_ys = jaxpr_as_fun(loop.body), len(loop.output_avals.ys) - num_recorded(loop.body, loop.inverse)

        def body(step: Any, *inputs: Any) -> list[Any]:
            consts, carry, rings, x = split_list(inputs, [loop.num_consts, num_carry, num_carry])
            out = loop.outputs(function(step, *consts, *carry, *x))
            rings = [put(ring, step % size, leaf) for ring, leaf in zip(rings, carry, strict=True)]
            return [*out.carry, *rings, *out.ys[:num_ys]]

        rings = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in operands.carry]
        consts, carry, xs = loop.input_avals
        types = [INDEX, *consts, *carry, *map(jax.typeof, rings), *xs]
        ringed = loop._replace(body=trace(body, types), inverse=None, num_carry=2 * num_carry)
        out = run(ringed, *operands._replace(carry=[*operands.carry, *rings]))
        carry, rings = split_list(out.carry, [num_carry])
        return out._replace(carry=carry), rings


def with_number(loop: Loop, row: Callable[[Any, Any], Any]) -> Loop:
    """The loop with a number as a further, first constant: a step evaluates the body as in `row(number, step)`."""
    inverse = loop.inverse and _with_number(loop.inverse, row)
    body = _with_number(loop.body, row, loop.stop, loop.carry_range)
    return loop._replace(body=body, inverse=inverse, num_consts=loop.num_consts + 1)


@weakly_cached
def _with_number(
    body: ClosedJaxpr, row: Callable[[Any, Any], Any], stop: int | None = None, carry: range = range(0)
) -> ClosedJaxpr:
    function = jaxpr_as_fun(body)

    def with_number(step: Any, number: Any, *inputs: Any) -> list[Any]:
        out = function(row(number, step), *inputs)
        if stop is not None:  # it has the row of the loop, which is the step
            before = inputs[carry[stop] - 1]
            breaks = (before == NO_STOP[0]) & (out[stop] != NO_STOP[0])
            out[stop] = jnp.where(breaks, step, before)
        return out

    return trace(with_number, [INDEX, *body.in_avals])


def _turned(rows: Any, high: Any) -> Any:
    """From rows as they are to rows in the order of steps, which go from row high - 1 to row 0; and back."""
    roll = partial(jnp.roll, axis=0)
    return jaxi.on_device(lambda rows: jaxi.keep_bits(roll, jnp.flip(rows, 0), high - rows.shape[0]), rows)


# A loop as a loop over windows of steps, each of which is a loop.


def in_windows(steps: NumberedSteps, size: int, of_windows: Kind, of_steps: Kind, is_cut: bool) -> Outcome:
    """Run the steps, `size` at a time. `is_cut`: each window takes the carry before it for a constant."""
    loop, operands, bound = steps.loop, steps.operands, steps.loop.bound
    if loop.reporting is not None:
        raise NotImplementedError(
            f"{steps.whole.where}: its kind or derivative makes a loop of windows of the loop, which cannot show its "
            "progress. Leave one of them out."
        )
    num_windows = None if bound is None else -(-bound // size)
    is_fixed = steps.whole.is_fixed and bound is not None and bound % size == 0

    def body(window: Any, high: Any, *inputs: Any) -> list[Any]:
        consts, carry, (num_steps,), xs = split_list(inputs, [loop.num_consts, loop.num_carry, 1])
        first, before = window * size, carry
        if is_cut:
            carry = [jaxi.where(window == 0, leaf, lax.stop_gradient(leaf)) for leaf in carry]
        these = LoopOperands(jnp.int32(0), jnp.minimum(high - first, size), consts, carry, xs)
        out = steps.part(first, these, size, of_steps, is_fixed)
        if loop.stop is not None:
            out.carry[0] &= out.carry[loop.stop] == NO_STOP[0]
            # A window whose first step breaks takes none, and cuts nothing.
            for k in set(range(1, loop.num_carry)) - set(loop.stops):
                out.carry[k] = jaxi.where(out.num_steps == 0, before[k], out.carry[k])
        return [*out.carry, num_steps + out.num_steps, *out.ys]

    consts = [operands.high, *operands.consts]
    # Rows of windows of rows, with zeros behind the last.
    xs = [padded(x, -x.shape[0] % size).reshape(-1, size, *x.shape[1:]) for x in operands.xs]
    carry = [*operands.carry, jnp.zeros_like(operands.high)]
    rows = [jaxi.mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]
    outer = loop._replace(
        body=trace(body, [INDEX, *map(jax.typeof, [*consts, *carry]), *rows]),
        num_consts=len(consts),
        num_carry=len(carry),
        bound=num_windows,
        kind=checked_kind(of_windows, num_windows),
        is_fixed=is_fixed,
        bound_is_loose=False,
        share=1.0,
        unroll=1,
        inverse=None,
        stop=None,
        watch=loop.watch and loop.watch.of_part(),
    )
    high = operands.high // size + (operands.high % size > 0).astype(jnp.int32)
    out = run(outer, jnp.int32(0), high, consts, carry, xs)
    ys = [jaxi.keep_bits(lambda y: y.reshape(-1, *y.shape[2:])[:bound], y) for y in out.ys]
    return steps.results(out._replace(num_steps=out.carry[-1], carry=out.carry[:-1], ys=ys))
