"""`Implicit`: the derivative of the fixed point that a loop finds, from one linear system."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core import Derivative, Kind, LoopCall, Outcome
from loopax._src.core.ir.loop import unchanged
from loopax._src.core.jaxpr.util import Mask, calls_custom_vjp, merge_lists, reject, select
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun
from loopax._src.kinds.linear_solver import is_solver, solve
from loopax._src.kinds.steps import explained, jvp
from loopax._src.kinds.storing import Lax
from loopax._src.pytrees.leaves import describe, same_structure, type_in_words
from loopax._src.pytrees.static import positive_float

# What of a loop's carry is a fixed point, and what is zero there.


@dataclass(frozen=True)
class FixedPoint:
    """The unknowns among the leaves of a carry, and a residual that is zero where they are the fixed point."""

    call: LoopCall
    is_real: Mask  # leaves of the carry that have derivatives
    is_constant: Mask  # those that the body returns as they came, such as weights
    is_unknown: Mask  # those of the fixed point
    extras: list[Any]  # what the user's function closes over
    user_residual: ClosedJaxpr | None  # (*extras, *carry) -> residual; None: unknowns - step(unknowns)

    @classmethod
    def of(cls, call: LoopCall, function: Callable[[Any], Any] | None) -> "FixedPoint":
        """As the user's function says; without one, all leaves that have derivatives and change are unknowns.

        Constants are no unknowns, also if the function returns them.
        """
        is_constant = unchanged(call.loop)
        is_real = tuple(map(jaxi.has_tangents, call.loop.input_avals.carry))
        if function is None:
            if not any(is_real):
                raise ValueError(
                    f"{call.where}: derivative=Implicit() is that of a fixed point, and no leaf of the carry is real "
                    "or complex. Leave the derivative out."
                )
            changing = tuple(real and not constant for real, constant in zip(is_real, is_constant, strict=True))
            return cls(call, is_real, is_constant, changing, [], None)
        where, results = f"Implicit(fixed_point=...), called with a carry of {call.where}", list[Any]()

        def flat(*carry: Any) -> list[Any]:
            results.append(function(call.unpack(carry)))
            return jax.tree.leaves(results[0])

        raw = jax.make_jaxpr(flat)(*call.loop.input_avals.carry)
        carry, out, result = raw.invars, raw.outvars, results[0]
        is_pair = isinstance(result, tuple) and len(result) == 2 and same_structure(*map(jax.tree.structure, result))
        half = len(out) // 2 if is_pair and not all(leaf in carry for leaf in out) else len(out)
        unknowns, residual = out[:half], out[half:]
        if not unknowns or not all(leaf in carry and jaxi.has_tangents(leaf.aval) for leaf in unknowns):
            raise TypeError(
                f"{where}: got a result that is not made of real or complex leaves of the carry, as they came. Return "
                "these, as a pytree, or a pair of them and of a residual of the same structure: lambda val: (val.x, "
                "val.x - f(val.x))."
            )
        for leaf, zero in zip(unknowns, residual, strict=False):
            if (leaf.aval.shape, leaf.aval.dtype) != (zero.aval.shape, zero.aval.dtype):
                raise TypeError(
                    f"{where}: got a residual of {type_in_words(zero.aval)} for a leaf of {type_in_words(leaf.aval)}. "
                    "They must have the same shape and dtype."
                )
        is_unknown = tuple(leaf in unknowns and not fixed for leaf, fixed in zip(carry, is_constant, strict=True))
        # Before: (*carry) -> (*unknowns, *residual), as the user orders them
        # After: (*extras, *carry) -> residual, in the order of the carry
        if not residual:
            return cls(call, is_real, is_constant, is_unknown, [], None)
        in_order = [residual[unknowns.index(leaf)] for leaf in select(is_unknown, carry)]
        whole, extras = jaxi.open_constants(raw)
        user_residual = jaxi.replace_jaxpr(whole, whole.invars, in_order)
        return cls(call, is_real, is_constant, is_unknown, extras, user_residual)

    def residual(self, unknowns: Sequence[Any], carry: Sequence[Any], row: Any, inputs: Any) -> list[Any]:
        """What is zero at the fixed point: an array for each unknown. `inputs` are operands and extras."""
        if self.user_residual is not None:
            return jaxpr_as_fun(self.user_residual)(*inputs[1], *self._with(unknowns, carry, inputs))
        after = self.after(self.is_unknown, unknowns, carry, row, inputs)
        return [jaxi.on_device(jnp.subtract, *pair) for pair in zip(unknowns, after, strict=True)]

    def after(self, mask: Mask, unknowns: Sequence[Any], carry: Sequence[Any], row: Any, inputs: Any) -> list[Any]:
        """These leaves of the carry, after a step from the fixed point."""
        return select(mask, self.call.at(inputs[0]).step(row, self._with(unknowns, carry, inputs)).carry)

    def _with(self, unknowns: Sequence[Any], carry: Sequence[Any], inputs: Any) -> list[Any]:
        """The carry with these unknowns, and with the constants as the loop was given them: a step depends on them."""
        constants = select(self.is_constant, inputs[0].carry)
        carry = merge_lists(self.is_constant, reject(self.is_constant, carry), constants)
        return merge_lists(self.is_unknown, reject(self.is_unknown, carry), unknowns)


def raveled(arrays: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """The arrays as one vector of the widest of their dtypes, and the function that makes arrays of such a vector."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        dtype = jnp.result_type(*(x.dtype for x in arrays))
    ends = list(accumulate(x.size for x in arrays))

    def of_piece(piece: Any, x: Any) -> Any:
        piece = piece if jnp.issubdtype(x.dtype, jnp.complexfloating) else piece.real
        return jaxi.moved_like(x, jaxi.convert(piece, x.dtype).reshape(x.shape))

    def unravel(vector: Any) -> list[Any]:
        return list(map(of_piece, jnp.split(vector, ends[:-1]), arrays))

    return jnp.concatenate([jaxi.convert(jaxi.to_device(x), dtype).ravel() for x in arrays]), unravel


_RTOL = 1e-3


@jaxi.api_boundary
@dataclass(frozen=True)
class Implicit(Derivative):
    """Differentiate the fixed point to which a loop converges; store no step.

    A loop that converges to z = f(z, a) ends at a z that depends on a alone. By the implicit function theorem, the
    derivative is the solution of one linear system at the last carry: (I - df/dz) dz = (df/da) da. The number of steps
    does not matter, and the derivative with respect to the start is zero. Leaves of the carry that the body returns
    unchanged (weights) belong to a.

    Forward and reverse mode have the same derivative, in every order, up to the tolerances of the loop and of the
    solver.

    Parameters
    ----------
    linear_solver
        The solver for the linear system. Give one of these:

        - None (the default): the iteration x <- (df/dz) x + b. If the step of the loop is a contraction, the iteration
          converges as fast as the loop.
        - A solver of `lineax` with its own tolerances, such as `lineax.GMRES(rtol=1e-6, atol=1e-6)`.
        - A function `solver(matvec, b)` that returns x with matvec(x) = b, like those of `jax.scipy.sparse.linalg`. x
          and b are vectors.
    fixed_point
        A function that selects the fixed point from the carry, for carries that hold more (step sizes, histories). The
        function takes a carry and returns the leaves of the fixed point, as a pytree. Or the function returns a pair:
        these leaves, and a residual of the same structure that is zero at the solution. The function may close over
        what the body closes over. None: the fixed point consists of all real and complex leaves that the body changes.
        The remaining leaves get the derivative of one step from the fixed point.
    rtol
        The largest distance from a fixed point at which a loop may end: the norm of the residual, relative to the norm
        of the fixed point. The default is 1e-3. For a function as `linear_solver`, `rtol` also bounds the residual of
        the linear system, relative to b.
    atol
        The norm of the residual of a leaf that counts as zero, for fixed points that are zero or nearly so. None (the
        default): `rtol ** 2` times the norm of the leaf in the first carry, and at least the rounding error of 1.
    unsolved
        What happens where the loop ended further from a fixed point, or the system was not solved: `"error"` (the
        default), or `"nan"` for a derivative of NaN. The `throw` of the loop does not matter.

    Raises
    ------
    TypeError
        - `linear_solver` or `fixed_point` is not a function.
        - `fixed_point` does not return leaves of the carry, or returns a residual of other shapes or dtypes.
        - `rtol` or `atol` is not a Python number.
        - In a gradient: a `jax.vmap` stands around the loop, and the body calls a `jax.custom_vjp` function.
    ValueError
        - The loop has rows of `xs` or `ys`, or a `kind` that is not `"auto"` or `Auto(...)`.
        - No leaf of the carry is real or complex.
        - `rtol` is not positive, `atol` is negative, or `unsolved` is unknown.
    NotImplementedError
        `lanes="free"`, `lanes_map`, or a body that changes mutable arrays.
    equinox.EquinoxRuntimeError
        Where a derivative is taken: the loop ended further from a fixed point than `rtol` and `atol`, or the system was
        not solved. With `unsolved="nan"` the derivative is NaN instead.

    Notes
    -----
    Cost of a derivative: the body is linearised once, and each iteration of the solver applies its linear part once.
    Under `jax.vmap` each lane has its own system. With `lanes="compact"`, a lane leaves the batch when its system is
    solved.

    Source: Griewank & Walther (2008), chapter 15. See docs/references.md.

    """

    linear_solver: Any = None
    fixed_point: Callable[[Any], Any] | None = None
    rtol: float = _RTOL
    atol: float | None = None
    unsolved: Literal["error", "nan"] = "error"
    differs: ClassVar[Literal["on purpose", "by a tolerance"]] = "by a tolerance"
    uses_kind: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.linear_solver is not None and not is_solver(self.linear_solver):
            raise TypeError(
                f"Implicit(linear_solver=...): got {describe(self.linear_solver)}, expected a solver of lineax, or a "
                "function (matvec, b) -> x."
            )
        if self.fixed_point is not None and not callable(self.fixed_point):
            raise TypeError(
                f"Implicit(fixed_point=...): got {describe(self.fixed_point)}, expected a function of a carry."
            )
        object.__setattr__(self, "rtol", positive_float("Implicit(rtol=...)", self.rtol))
        if self.atol is not None:
            object.__setattr__(self, "atol", positive_float("Implicit(atol=...)", self.atol, or_zero=True))
        if self.unsolved not in ("error", "nan"):
            raise ValueError(f"Implicit(unsolved=...): got {describe(self.unsolved)}, expected 'error' or 'nan'.")

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        solver = "" if self.linear_solver is None else f"linear_solver={_name(self.linear_solver)}"
        function = "" if self.fixed_point is None else f"fixed_point={_name(self.fixed_point)}"
        rtol = "" if self.rtol == _RTOL else f"rtol={self.rtol:g}"
        atol = "" if self.atol is None else f"atol={self.atol:g}"
        unsolved = "" if self.unsolved == "error" else "unsolved='nan'"
        return f"Implicit({', '.join(filter(None, [solver, function, rtol, atol, unsolved]))})"

    def in_words(self, kind: Kind) -> str:
        """See `Derivative.in_words`."""
        del kind
        return "the last carry; its derivative solves a linear system there"

    def without_functions(self) -> "Implicit":
        """See `Derivative.without_functions`."""
        return replace(self, linear_solver=None, fixed_point=None)

    def run(self, call: LoopCall) -> Outcome:
        """See `Derivative.run`."""
        if call.loop.input_avals.xs or call.loop.output_avals.ys:
            raise ValueError(
                f"{call.where}: derivative=Implicit() is that of the fixed point of a body, and a body with rows of xs "
                "or ys has none. Use a while_loop or a fori_loop, or leave the derivative out."
            )
        # Steps are not differentiated, so nothing is stored of them.
        call = replace(call.stored_by(Lax()), checked=partial(call.checked, throw=self.unsolved == "error"))
        fixed_point = FixedPoint.of(call, self.fixed_point)
        if not any(fixed_point.is_unknown):  # the body returns all as it came
            return call.run()
        found = call.at(lax.stop_gradient(call.operands)).run()

        @jax.custom_jvp
        def implicit(real: list[Any], *_: Any) -> list[Any]:
            return real

        def rule(primals: Any, tangents: Any) -> Any:
            _, inputs, others, num_steps = primals
            real = implicit(*primals)  # so that it has its derivative in derivatives of the rule
            carry = merge_lists(fixed_point.is_real, others, real)
            return real, self._dots(fixed_point, carry, num_steps, inputs, tangents[1])

        implicit.defjvp(explained(rule, "Implicit()"), symbolic_zeros=True)
        real, others = select(fixed_point.is_real, found.carry), reject(fixed_point.is_real, found.carry)
        real = implicit(real, (call.operands, fixed_point.extras), others, found.num_steps)
        return found._replace(carry=merge_lists(fixed_point.is_real, others, real))

    def _dots(self, fixed_point: FixedPoint, carry: list[Any], num_steps: Any, inputs: Any, dots: Any) -> list[Any]:
        """The tangents of the leaves of the carry that have derivatives."""
        unknowns = select(fixed_point.is_unknown, carry)
        row = inputs[0].low + num_steps
        residual, matvec = jax.linearize(lambda x: fixed_point.residual(x, carry, row, inputs), unknowns)
        if calls_custom_vjp(fixed_point.call.loop.body):  # the solver would drop what its backward rule logs
            jax.eval_shape(jaxi.linear_transpose(matvec, [jax.typeof(x) for x in unknowns]), residual)
        _, b = jvp(lambda inputs: fixed_point.residual(unknowns, carry, row, inputs), inputs, dots)
        start = select(fixed_point.is_unknown, inputs[0].carry)
        b, reached = self._if_converged(fixed_point.call, *lax.stop_gradient((start, unknowns, residual)), b)
        # One vector: JAX's rule cannot transpose a system some of whose right-hand sides have no tangent.
        vector, unravel = raveled(b)
        # Typed as the system is under `jax.shard_map`, for so they come to be typed where they are residuals.
        num_steps, reached = (jaxi.vary_like(x, jax.typeof(vector)) for x in (num_steps, reached))
        solver = partial(solve, self.linear_solver, fixed_point.call, num_steps, self.rtol, reached)
        x = lax.custom_linear_solve(lambda x: raveled(matvec(unravel(x)))[0], vector, solver, solver)
        of_unknowns = [-dot for dot in unravel(x)]
        # The other leaves that have derivatives follow the fixed point and the inputs through one step.
        is_other = tuple(a and not b for a, b in zip(fixed_point.is_real, fixed_point.is_unknown, strict=True))
        if not any(is_other):
            return of_unknowns
        after = lambda pair: fixed_point.after(is_other, pair[0], carry, row, pair[1])  # noqa: E731
        _, of_others = jvp(after, (unknowns, inputs), (of_unknowns, dots))
        return merge_lists(select(fixed_point.is_real, fixed_point.is_unknown), of_others, of_unknowns)

    def _if_converged(
        self, call: LoopCall, start: list[Any], unknowns: list[Any], residual: list[Any], b: list[Any]
    ) -> tuple[list[Any], Any]:
        """`b`, or an error where the loop ended far from a fixed point; and how far, relative to the fixed point."""

        def as_zero(start: Any) -> Any:
            """The norm of the residual of a leaf that counts as zero, however small the fixed point is."""
            if self.atol is not None:
                return self.atol
            size = _norm(start)
            return jnp.maximum(self.rtol**2 * jnp.where(jnp.isfinite(size), size, 0), float(jnp.finfo(size.dtype).eps))

        far = [jnp.where(_norm(r) <= as_zero(s), 0, jaxi.to_device(r)) for r, s in zip(residual, start, strict=True)]
        size, distance = _norm(*unknowns), _norm(*far)
        divisor = jnp.where(size == 0, 1, size)
        message = (
            "derivative=Implicit() is that of the fixed point to which a loop converges, and this one ended "
            f"before{{amount}}: the norm of the residual is to be at most {self.rtol:g} of that of the fixed point. "
            "Take more steps, or a stricter condition, or leave the derivative out. If the fixed point is zero or "
            "nearly so, say which norm of a residual is small: Implicit(atol=1e-6). If the carry holds more than a "
            "fixed point, say what the fixed point is: Implicit(fixed_point=lambda val: val.x)."
        )
        b = call.checked(b, ~(distance <= self.rtol * size), message, distance / divisor)
        return b, jnp.minimum(_norm(*residual) / divisor, self.rtol)


def _norm(*arrays: Any) -> Any:
    return jnp.linalg.norm(raveled(arrays)[0])


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
