"""How `Implicit` solves its linear system: the fixed-point iteration, or a solver of the user's."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core import Decided, LoopCall, NoReverseMode, run_function
from loopax._src.core.jaxpr.util import MOST_STEPS

# The iteration may take this many times the steps of the loop, and so many more: it converges as the loop did.
_STEPS = 10
_MORE_STEPS = 1000

Matvec = Callable[[Any], Any]


def is_solver(solver: Any) -> bool:
    """Whether this is a solver of lineax, or a function that may be one."""
    return _is_of_lineax(solver) or (callable(solver) and not isinstance(solver, type))


def _is_of_lineax(solver: Any) -> bool:
    """Whoever has one has imported lineax."""
    lineax = sys.modules.get("lineax")
    return lineax is not None and isinstance(solver, lineax.AbstractLinearSolver)


def solve(solver: Any, call: LoopCall, num_steps: Any, rtol: float, reached: Any, matvec: Matvec, b: Any) -> Any:
    """Solve the system of an `Implicit(linear_solver=solver)`, for a loop that took so many steps.

    `reached` is how far from a fixed point the loop has ended, relative to it.
    """
    what, size, failed = "derivative=Implicit() solves a linear system by ", jnp.linalg.norm(b), None
    if solver is None:
        x, residual, failed = _iterate(call, num_steps, reached, matvec, b)
        message = (
            f"{what}a fixed-point iteration, which did not converge in {_STEPS} times the steps of the loop and "
            f"{_MORE_STEPS} more{{amount}}. Either the Jacobian of the body has an eigenvalue near one or beyond, and "
            "the fixed point no derivative; or the loop converges in another way than by contraction, and needs "
            "another solver: Implicit(linear_solver=lineax.GMRES(rtol=1e-6, atol=1e-6))."
        )
    elif _is_of_lineax(solver):
        lineax = sys.modules["lineax"]
        operator = lineax.FunctionLinearOperator(matvec, jax.ShapeDtypeStruct(b.shape, b.dtype))
        solution = lineax.linear_solve(operator, b, solver, throw=False)
        x, failed = solution.value, solution.result != lineax.RESULTS.successful
        residual = b - matvec(x)
        message = (
            f"{what}{type(solver).__name__}, which failed{{amount}}. The Jacobian of the body may have an eigenvalue "
            "near one, and the fixed point no derivative; or the solver needs more steps or a wider tolerance."
        )
    else:
        result = solver(matvec, b)
        x = result[0] if isinstance(result, tuple) else result  # those of JAX also return whether they have converged
        residual = b - matvec(x)
        message = (
            f"{what}a function of the user, whose residual is more than {rtol:g} of b{{amount}}. The Jacobian of the "
            "body may have an eigenvalue near one, and the fixed point no derivative; or the solver needs more steps."
        )
    relative = jnp.linalg.norm(residual) / jnp.where(size == 0, 1, size)
    return call.checked(x, ~(relative <= rtol) if failed is None else failed, message, relative)


def _iterate(call: LoopCall, num_steps: Any, reached: Any, matvec: Matvec, b: Any) -> tuple[Any, Any, Any]:
    """Solve A x = b by x <- x + r, r the residual, which converges where all eigenvalues of 1 - A are less than one.

    The residual of the next x is r - A r, and so is known to the rounding of r, however small that is. Computed as
    b - A x, it would have the rounding errors of A x, which are large where a step of the loop solves a stiff system.

    A system counts as solved where it is solved as exactly as the loop has found its fixed point.
    """
    size, tolerance = jnp.linalg.norm(b), jnp.finfo(b.dtype).eps ** 0.75

    def is_above(tolerance: Any, x: Any, residual: Any) -> Any:
        return jnp.linalg.norm(residual) > tolerance * jnp.maximum(size, jnp.linalg.norm(x))

    def step(row: Any, _: Any, x: Any, residual: Any) -> list[Any]:
        x, residual = x + residual, residual - matvec(residual)
        return [is_above(tolerance, x, residual) & (row + 1 < most), x, residual]

    most = jnp.minimum(num_steps, (MOST_STEPS - _MORE_STEPS) // _STEPS) * _STEPS + _MORE_STEPS
    residual = b - matvec(b)
    carry = [is_above(tolerance, b, residual), b, residual]
    # They leave as those of the user's loop do.
    kind = Decided(NoReverseMode(AssertionError, "a solver is not differentiated"))
    _, x, residual = run_function(step, carry, bound=None, predicated=True, kind=kind, lanes=call.loop.lanes).carry
    # An iteration that diverged ends where the norm of x is infinite, and that of the residual too, or NaN.
    is_solved = ~is_above(jnp.maximum(tolerance, reached), x, residual) & jnp.isfinite(jnp.linalg.norm(residual))
    return x, residual, ~is_solved
