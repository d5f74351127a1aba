"""An adaptive solver of ordinary differential equations, in which every lane of a batch takes the steps that it needs.

A Runge-Kutta method with an estimate of its error takes a step, keeps it if the error is small enough, and chooses the
size of the next one. How many steps that takes is known when it is done, and differs between the lanes of a
batch. Each accepted step appends the solution at the requested times that lie in it, any number, to a
`loopax.Buffer`. All of it is differentiable in reverse mode, with 64 stored states whatever the number of steps.

`python examples/adaptive_ode.py` solves van der Pol's equation in 64 lanes, from a smooth oscillation to a stiff one,
with loopax and with Diffrax, prints what both cost, and draws `examples/adaptive_ode.png`. It fails if the
numbers of steps, the solutions or the gradients differ.
"""

import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

# The method -----------------------------------------------------------------------------------------------

# J. R. Dormand and P. J. Prince, "A family of embedded Runge-Kutta formulae", Journal of Computational and Applied
# Mathematics 6 (1980), table 2: the weights of each stage. The last stage is the solution, of order 5.
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
# L. F. Shampine, "Some practical Runge-Kutta formulas", Mathematics of Computation 46 (1986): the difference to a
# solution of order 4. It is two thirds of Dormand and Prince's.
ERROR = (71 / 86400, 0, -142 / 50085, 71 / 2880, -5751 / 169600, 44 / 1575, -1 / 60)
# E. Hairer, S. P. Norsett and G. Wanner, "Solving Ordinary Differential Equations I", 2nd edition (1993), section II.6:
# the last weights of the solution between the ends of a step, of order 4.
DENSE = (
    -12715105075 / 11282082432,
    0,
    87487479700 / 32700410799,
    -10690763975 / 1880347072,
    701980252875 / 199316789632,
    -1453857185 / 822651844,
    69997945 / 29380423,
)
ORDER = 5

# E. Hairer and G. Wanner, "Solving Ordinary Differential Equations II", 2nd edition (1996), section IV.2: control of
# the step by the error of this step and of the last.
THIS_STEP, LAST_STEP = 0.7 / ORDER, -0.4 / ORDER
SAFETY, LEAST, MOST = 0.9, 0.2, 10.0
LEAST_ERROR = 1e-10

MAX_STEPS = 4096
KIND = lx.Checkpointed(64)

State = Float[Array, " n"]
Field = Callable[[Float[Array, ""], State], State]  # (t, y) -> dy/dt


class Step(NamedTuple):
    """A step that has been tried."""

    t: Float[Array, ""]  # where it begins
    t_next: Float[Array, ""]  # where it ends
    dt: Float[Array, ""]
    y: State  # at the beginning
    y_next: State  # at the end
    slopes: list[State]  # dy/dt at all stages: the first is the beginning, the last the end


class Progress(NamedTuple):
    """The carry of the solver: what is known after some steps."""

    t: Float[Array, ""]
    t_next: Float[Array, ""]  # where the step that is tried next ends
    y: State  # at t
    slope: State  # at t
    margin: Float[Array, ""]  # the tolerance over the error of the last accepted step
    saved: lx.Buffer  # the solution at the requested times up to t


class Solution(NamedTuple):
    """The solution at the requested times."""

    ys: Float[Array, "times n"]
    num_steps: Int[Array, ""]  # accepted or not


def weighted(weights: tuple[float, ...], slopes: list[State]) -> State:
    terms = [weight * slope for weight, slope in zip(weights, slopes, strict=True) if weight]
    return sum(terms[1:], terms[0])


def take_step(field: Field, now: Progress) -> Step:
    """A step of the method. Its first stage is the last one of the step before."""
    dt, y, slopes = now.t_next - now.t, now.y, [now.slope]
    for weights in STAGES:
        y = now.y + dt * weighted(weights, slopes)
        slopes.append(field(now.t + sum(weights) * dt, y))
    return Step(now.t, now.t_next, dt, now.y, y, slopes)


def interpolant(step: Step) -> Callable[[Float[Array, ""]], State]:
    """The solution at any time in the step: a polynomial of order 4."""
    rise = step.y_next - step.y
    at_begin = step.dt * step.slopes[0] - rise
    at_end = rise - step.dt * step.slopes[-1] - at_begin
    within = step.dt * weighted(DENSE, step.slopes)

    def solution(t: Float[Array, ""]) -> State:
        x = (t - step.t) / step.dt
        return step.y + x * (rise + (1 - x) * (at_begin + x * (at_end + (1 - x) * within)))

    return solution


def margin_of(step: Step, rtol: float, atol: float) -> Float[Array, ""]:
    """The tolerance over the error. What it decides, the sizes of the steps, is not differentiated."""
    scale = atol + rtol * jnp.maximum(jnp.abs(step.y), jnp.abs(step.y_next))
    error = step.dt * weighted(ERROR, step.slopes) / scale
    return lax.stop_gradient(1 / jnp.maximum(jnp.sqrt(jnp.mean(error**2)), LEAST_ERROR))


def growth(margin: Float[Array, ""], last_margin: Float[Array, ""], accepted: Bool[Array, ""]) -> Float[Array, ""]:
    """The size of the next step over the size of this one."""
    factor = SAFETY * margin**THIS_STEP * last_margin**LAST_STEP
    return jnp.clip(factor, jnp.where(accepted, 1.0, LEAST), jnp.where(accepted, MOST, SAFETY))


def save(times: Float[Array, " times"], step: Step, accepted: Bool[Array, ""], saved: lx.Buffer) -> lx.Buffer:
    """Append the solution at all requested times that lie in the step, if it is accepted."""
    solution = interpolant(step)  # once, whatever the number of times

    def is_due(saved: lx.Buffer) -> Bool[Array, ""]:
        return accepted & (saved.count < len(times)) & (times[saved.count] <= step.t_next)

    def append(saved: lx.Buffer) -> lx.Buffer:
        return saved.append(solution(times[saved.count]))

    return lx.while_loop(is_due, append, saved, max_steps=len(times))


def solve(
    field: Field,
    y: State,
    times: Float[Array, " times"],
    *,
    first_step: float,
    rtol: float,
    atol: float,
    max_steps: int | None = MAX_STEPS,
    **options: Any,
) -> Solution:
    """Solve `dy/dt = field(t, y)` from the first of the times to the last; `options` are those of the loop."""
    begin, end = times[0], times[-1]

    def attempt(now: Progress) -> Progress:
        step = take_step(field, now)
        margin = margin_of(step, rtol, atol)
        accepted = margin > 1
        dt = step.dt * growth(margin, now.margin, accepted)
        t = jnp.where(accepted, step.t_next, step.t)
        y = jnp.where(accepted, step.y_next, step.y)
        slope = jnp.where(accepted, step.slopes[-1], step.slopes[0])
        last_margin = jnp.where(accepted, margin, now.margin)
        return Progress(t, jnp.minimum(t + dt, end), y, slope, last_margin, save(times, step, accepted, now.saved))

    start = Progress(begin, begin + first_step, y, field(begin, y), jnp.ones_like(begin), lx.Buffer(len(times), like=y))
    options = {"kind": KIND, "max_steps": max_steps, **options}
    now, info = lx.while_loop(lambda now: now.t < end, attempt, start, info=True, **options)
    return Solution(now.saved.rows, info.num_steps)


# The comparison -------------------------------------------------------------------------------------------

TOLERANCES = {"rtol": 1e-5, "atol": 1e-7}
FIRST_STEP = 0.01
STIFFNESS = np.geomspace(1.0, 20.0, 64)
START = np.array([2.0, 0.0])
TIMES = np.linspace(0.0, 20.0, 101)
TIMINGS = 5
# Control multiplies rounding: where the stiffness differs by 1e-15, either solver may take another number of steps.
STEPS_AGREE, AGREE = 0.03, 1e-3

Solver = Callable[[Any, Any, Any], Solution]  # (stiffness, y, times)


def van_der_pol(stiffness: Float[Array, ""], y: State) -> State:
    position, velocity = y
    return jnp.stack([velocity, stiffness * (1 - position**2) * velocity - position])


def with_loopax(stiffness: Any, y: Any, times: Any, **options: Any) -> Solution:
    return solve(lambda _, y: van_der_pol(stiffness, y), y, times, first_step=FIRST_STEP, **TOLERANCES, **options)


def with_diffrax(stiffness: Any, y: Any, times: Any, **options: Any) -> Solution:
    """The same method, control and tolerances."""
    import diffrax as dfx

    coefficients: Any = {"pcoeff": -ORDER * LAST_STEP, "icoeff": ORDER * (THIS_STEP + LAST_STEP)}
    term = dfx.ODETerm(lambda _, y, stiffness: van_der_pol(stiffness, y))
    options["stepsize_controller"] = dfx.PIDController(**TOLERANCES, **coefficients)
    options["saveat"] = dfx.SaveAt(ts=times)
    found: Any = dfx.diffeqsolve(term, dfx.Dopri5(), times[0], times[-1], FIRST_STEP, y, stiffness, **options)
    return Solution(found.ys, found.stats["num_steps"])


def energy(solver: Solver, stiffness: Any, y: Any, times: Any) -> Float[Array, ""]:
    """A loss: the mean square of the position at the requested times."""
    return jnp.mean(solver(stiffness, y, times).ys[:, 0] ** 2)


class Result(NamedTuple):
    """What a solver finds in all lanes, and what it costs."""

    solution: Solution
    slopes: Float[Any, " lanes"]  # of the energy with respect to the stiffness
    forward: float  # milliseconds
    gradient: float
    memory: float  # of the gradient: temporary, KiB


def result_of(solver: Solver) -> Result:
    arguments = jnp.asarray(STIFFNESS), jnp.asarray(START), jnp.asarray(TIMES)
    in_lanes = partial(jax.vmap, in_axes=(0, None, None))
    forward, gradient = (
        jax.jit(in_lanes(f)).lower(*arguments).compile() for f in (solver, jax.grad(partial(energy, solver)))
    )
    costs = milliseconds(forward, arguments), milliseconds(gradient, arguments)
    analysis: Any = gradient.memory_analysis()
    solution, slopes = jax.device_get((forward(*arguments), gradient(*arguments)))
    return Result(solution, slopes, *costs, analysis.temp_size_in_bytes / 2**10)


def milliseconds(program: Callable[..., Any], arguments: Any) -> float:
    """The median of some evaluations, after one that is not counted."""
    seconds = timeit.repeat(lambda: jax.block_until_ready(program(*arguments)), number=1, repeat=TIMINGS + 1)
    return 1e3 * float(np.median(seconds[1:]))


def results() -> dict[str, Result]:
    with jax.enable_x64(True):
        return {"loopax": result_of(with_loopax), "Diffrax": result_of(with_diffrax)}


def table(found: dict[str, Result]) -> Table:
    title = f"van der Pol's equation in {len(STIFFNESS)} lanes"
    rows = Table("", "steps of a lane", "forward, ms", "gradient, ms", "its memory, KiB", title=title)
    for name, r in found.items():
        steps = f"{r.solution.num_steps.min()} to {r.solution.num_steps.max()}"
        rows.add_row(name, steps, f"{r.forward:.1f}", f"{r.gradient:.1f}", f"{r.memory:.0f}")
    return rows


def draw(found: dict[str, Result]) -> Figure:
    """Some solutions, and of all lanes the steps and the gradients."""
    figure = Figure(figsize=(5, 7), layout="constrained", dpi=150)
    solutions, steps, slopes = figure.subplots(3, 1)
    for lane in range(0, len(STIFFNESS), 21):
        positions = found["loopax"].solution.ys[lane, :, 0]
        solutions.plot(TIMES, positions, ".-", lw=1, ms=3, label=f"{STIFFNESS[lane]:.1f}")
    for name, style in [("Diffrax", {"color": "darkgray", "lw": 5}), ("loopax", {"color": "C0"})]:
        steps.semilogx(STIFFNESS, found[name].solution.num_steps, label=name, **style)
        slopes.semilogx(STIFFNESS, found[name].slopes, **style)
    solutions.legend(title="stiffness", loc="upper center", ncols=4, frameon=False)
    solutions.set_ylim(-2.2, 4.2)
    steps.legend(frameon=False)
    solutions.set(title="Solution at the requested times", xlabel="time", ylabel="position")
    steps.set(title="Steps of a lane", xlabel="stiffness")
    slopes.set(title="d energy / d stiffness", xlabel="stiffness")
    for axes in (steps, slopes):
        axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.minorticks_off()
    return figure


def main() -> None:
    """Solve, compare, draw."""
    found = results()
    Console().print(table(found))
    draw(found).savefig(FIGURE)
    ours, theirs = found.values()
    np.testing.assert_allclose(ours.solution.num_steps, theirs.solution.num_steps, rtol=STEPS_AGREE)
    np.testing.assert_allclose(ours.solution.ys, theirs.solution.ys, atol=AGREE)
    np.testing.assert_allclose(ours.slopes, theirs.slopes, rtol=AGREE)


if __name__ == "__main__":
    main()
