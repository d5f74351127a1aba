"""How `Implicit` solves its linear system: the fixed-point iteration, or a solver of the user's."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core import Decided, Loop, LoopCall, NoReverseMode, run
from loopax._src.core.jaxpr.types import settled
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, split_list
from loopax._src.jax_internals import open_constants, replace_jaxpr, vary_like

# The iteration may take this many times the steps of the loop, and so many more: it converges as the loop did.
_STEPS = 10
_MORE_STEPS = 1000

Matvec = Callable[[Any], Any]


def solve_with(solver: Any, call: LoopCall, num_steps: Any, rtol: float, reached: Any) -> Callable[[Matvec, Any], Any]:
    """The solver of an `Implicit(linear_solver=solver)`, for a loop that took so many steps.

    `reached` is how far from a fixed point the loop has ended, relative to it.
    """
    if solver is None:
        return partial(iterate, call, num_steps, reached)
    return partial(_by_lineax, solver, call) if _is_of_lineax(solver) else partial(_by_function, solver, call, rtol)


def is_solver(solver: Any) -> bool:
    """Whether this is a solver of lineax, or a function that may be one."""
    return _is_of_lineax(solver) or (callable(solver) and not isinstance(solver, type))


def _is_of_lineax(solver: Any) -> bool:
    """Whoever has one has imported lineax."""
    lineax = sys.modules.get("lineax")
    return lineax is not None and isinstance(solver, lineax.AbstractLinearSolver)


def iterate(call: LoopCall, num_steps: Any, reached: Any, matvec: Matvec, b: Any) -> Any:
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
    opened, consts = open_constants(settled(step, INDEX, list(map(jax.typeof, carry)), []))
    given, (row, *leaves) = split_list(opened.invars, [len(consts)])
    carry = list(map(vary_like, carry, opened.out_avals))
    loop = Loop(
        replace_jaxpr(opened, [row, *given, *leaves], opened.outvars),
        num_consts=len(consts),
        num_carry=len(carry),
        bound=None,
        reverse=False,
        predicated=True,
        unroll=1,
        kind=Decided(NoReverseMode(AssertionError, "a solver is not differentiated")),
        lanes=call.loop.lanes,  # they leave as those of the user's loop do
    )
    _, x, residual = run(loop, jnp.int32(0), jnp.int32(MOST_STEPS), consts, carry, []).carry
    message = (
        "derivative=Implicit() solves a linear system by a fixed-point iteration, which did not converge "
        f"in {_STEPS} times the steps of the loop and {_MORE_STEPS} more{{amount}}. Either the Jacobian of the body "
        "has an eigenvalue near one or beyond, and the fixed point no derivative; or the loop converges in another way "
        "than by contraction, and needs another solver: Implicit(linear_solver=lineax.GMRES(rtol=1e-6, atol=1e-6))."
    )
    # An iteration that diverged ends where the norm of x is infinite, and that of the residual too, or NaN.
    is_solved = ~is_above(jnp.maximum(tolerance, reached), x, residual) & jnp.isfinite(jnp.linalg.norm(residual))
    return call.checked(x, ~is_solved, message, _relative(residual, b))


def _by_lineax(solver: Any, call: LoopCall, matvec: Matvec, b: Any) -> Any:
    lineax = sys.modules["lineax"]
    operator = lineax.FunctionLinearOperator(matvec, jax.ShapeDtypeStruct(b.shape, b.dtype))
    solution = lineax.linear_solve(operator, b, solver, throw=False)
    message = (
        f"derivative=Implicit() solves a linear system by {type(solver).__name__}, which "
        "failed{amount}. The Jacobian of the body may have an eigenvalue near one, and the fixed point no derivative; "
        "or the solver needs more steps or a wider tolerance."
    )
    failed = solution.result != lineax.RESULTS.successful
    return call.checked(solution.value, failed, message, _relative(b - matvec(solution.value), b))


def _by_function(solver: Callable[..., Any], call: LoopCall, rtol: float, matvec: Matvec, b: Any) -> Any:
    result = solver(matvec, b)
    x = result[0] if isinstance(result, tuple) else result  # those of JAX also return whether they have converged
    relative = _relative(b - matvec(x), b)
    message = (
        "derivative=Implicit() solves a linear system by a function of the user, whose "
        f"residual is more than {rtol:g} of b{{amount}}. The Jacobian of the body may have an eigenvalue near one, and "
        "the fixed point no derivative; or the solver needs more steps."
    )
    return call.checked(x, ~(relative <= rtol), message, relative)


def _relative(residual: Any, b: Any) -> Any:
    """The norm of the residual relative to that of b."""
    size = jnp.linalg.norm(b)
    return jnp.linalg.norm(residual) / jnp.where(size == 0, 1, size)
