"""The programs of `python -m benchmarks --short`."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopax as lx
from benchmarks.short.measure import Contender, Program, Sizes
from loopax._src.extras import is_installed

# A recurrence of run-time length in each library, as its users would write it.
#
# A recurrence is a step `(parameters, state, row) -> state`, repeated `n` times, with at most `bound` steps.
# Libraries that have no gradient of such a loop run all steps of the bound, and keep the state as it is from step `n`
# on.


Run = Callable[[Any, Any, Any, Any], Any]  # (parameters, start, rows, n) -> last state


class Recurrence(NamedTuple):
    """What is repeated."""

    step: Callable[[Any, Any, Any], Any]
    bound: int


def with_loopax(recurrence: Recurrence, static: bool = False, **options: Any) -> Run:
    """A traced length, or all steps of the bound; the options are those of `scan`."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            return recurrence.step(parameters, state, row), None

        if rows is not None or static:
            return lx.scan(step, start, rows, recurrence.bound if static else n, **options)[0]
        return lx.fori_loop(0, n, lambda _, state: step(state, None)[0], start, max_steps=recurrence.bound, **options)

    return run


def with_while_loop(recurrence: Recurrence, loop: Callable[..., Any], **options: Any) -> Run:
    """A while loop that counts its steps, of whatever library: `loop(condition, body, start)`."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def body(carry: Any) -> Any:
            state, i = carry
            row = None if rows is None else rows[i]
            return recurrence.step(parameters, state, row), i + 1

        return loop(lambda carry: carry[1] < n, body, (start, jnp.int32(0)), **options)[0]

    return run


def with_equinox(recurrence: Recurrence) -> Run:
    """`equinox.internal.while_loop`, checkpointed."""
    return with_while_loop(recurrence, eqxi.while_loop, max_steps=recurrence.bound, kind="checkpointed")


def with_lax(recurrence: Recurrence) -> Run:
    """`lax.scan` over all steps of the bound."""

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            i, row = inputs
            return jnp.where(i < n, recurrence.step(parameters, state, row), state), None

        return lax.scan(step, start, (jnp.arange(recurrence.bound), rows))[0]

    return run


def with_nnx(recurrence: Recurrence) -> Run:
    """`nnx.scan` over all steps of the bound, with the parameters in a module."""
    from flax import nnx

    model = _nnx_model()

    @nnx.scan(in_axes=(None, None, nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def masked(module: Any, n: Any, state: Any, i: Any, row: Any) -> Any:
        return jnp.where(i < n, recurrence.step(module.parameters(), state, row), state)

    def run(parameters: Any, start: Any, rows: Any, n: Any) -> Any:
        steps = jnp.arange(recurrence.bound)
        return masked(model(parameters), n, start, steps, steps if rows is None else rows)

    return run


@cache
def _nnx_model() -> Any:
    """A module that has parameters, and nothing else."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, parameters: list[Any]) -> None:
            self.number = len(parameters)
            for i, array in enumerate(parameters):
                setattr(self, f"parameter{i}", nnx.Param(array))

        def parameters(self) -> list[Any]:
            return [getattr(self, f"parameter{i}")[...] for i in range(self.number)]

    return Model


def peers(recurrence: Recurrence) -> dict[str, Run]:
    """The recurrence in all other libraries that are installed."""
    runs = {"Equinox": with_equinox(recurrence), "jax.lax, to the bound": with_lax(recurrence)}
    if is_installed("flax"):
        runs["Flax NNX, to the bound"] = with_nnx(recurrence)
    return runs


def gradient(run: Run) -> Callable[..., Any]:
    """Of the sum of squares of the last state, by the parameters."""
    return jax.grad(lambda parameters, start, rows, n: (run(parameters, start, rows, n) ** 2).sum())


DT = 0.01


def programs() -> list[Callable[[Sizes], Program]]:
    """Return the functions that build the programs, so that each is built when its turn comes."""
    return [neural_ode, ragged, uneven, small_body]


def neural_ode(sizes: Sizes) -> Program:
    """The gradient of a perceptron's ODE, by Heun's method, for a number of steps known at run time."""
    weights = some_weights((16, 64), (64, 16), scale=0.3)
    start = jnp.asarray(np.random.RandomState(1).randn(32, 16), jnp.float32)
    recurrence = Recurrence(_heun, sizes.ode_bound)
    runs = {"loopax": with_loopax(recurrence), "loopax, Checkpointed()": with_loopax(recurrence, kind="checkpointed")}
    runs |= peers(recurrence)
    if is_installed("diffrax"):
        runs["Diffrax"] = partial(_with_diffrax, sizes.ode_bound)
    contenders = [Contender(name, gradient(run)) for name, run in runs.items()]
    name = f"gradient of an MLP ODE, {sizes.ode_steps} steps, bound {sizes.ode_bound}"
    return Program(name, contenders, (weights, start, None, jnp.int32(sizes.ode_steps)))


def _field(weights: Any, y: Any) -> Any:
    return jnp.tanh(y @ weights[0]) @ weights[1]


def _heun(weights: Any, y: Any, _: Any) -> Any:
    first = _field(weights, y)
    return y + DT / 2 * (first + _field(weights, y + DT * first))


def _with_diffrax(bound: int, weights: Any, start: Any, _: Any, n: Any) -> Any:
    import diffrax

    term = diffrax.ODETerm(lambda _, y, weights: _field(weights, y))  # pyright: ignore[reportArgumentType]
    # A little less than the last step's end, so that rounding does not add a step.
    end = (n - 1e-3) * DT
    controller = diffrax.ConstantStepSize()
    options = {"args": weights, "max_steps": bound, "stepsize_controller": controller}
    solution: Any = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, end, DT, start, **options)
    return solution.ys[0]


def ragged(sizes: Sizes) -> Program:
    """The gradient of a recurrent network's weights, over a batch of sequences of different length."""
    random, hidden = np.random.RandomState(0), sizes.hidden
    weights = some_weights((hidden, 3 * hidden), (hidden, 3 * hidden), scale=0.1)
    rows = jnp.asarray(random.randn(sizes.sequences, sizes.longest, hidden), jnp.float32)
    lengths = jnp.asarray(np.clip(random.lognormal(4.0, 1.0, sizes.sequences), 1, sizes.longest), jnp.int32)
    recurrence = Recurrence(gated_unit, sizes.longest)
    runs = {
        "loopax, compact": with_loopax(recurrence, lanes="compact"),
        "loopax, compact, Checkpointed()": with_loopax(recurrence, lanes="compact", kind="checkpointed"),
        "loopax": with_loopax(recurrence),
        **peers(recurrence),
    }
    contenders = [Contender(name, gradient(_in_lanes(run))) for name, run in runs.items()]
    name = f"gradient of a GRU, {sizes.sequences} sequences of 1 to {sizes.longest} rows"
    return Program(name, contenders, (weights, jnp.zeros((sizes.sequences, hidden)), rows, lengths))


def _in_lanes(run: Any) -> Any:
    return jax.vmap(run, (None, 0, 0, 0))


def gated_unit(weights: Any, h: Any, x: Any) -> Any:
    """A GRU cell, of one lane or of several."""
    size = h.shape[-1]
    from_input, from_state = x @ weights[0], h @ weights[1]
    reset = jax.nn.sigmoid(from_input[..., :size] + from_state[..., :size])
    update = jax.nn.sigmoid(from_input[..., size : 2 * size] + from_state[..., size : 2 * size])
    new = jnp.tanh(from_input[..., 2 * size :] + reset * from_state[..., 2 * size :])
    return (1 - update) * new + update * h


def uneven(sizes: Sizes) -> Program:
    """A batch of while loops that end at different steps."""
    random = np.random.RandomState(0)
    (weights,) = some_weights((32, 32), scale=0.2)
    counts = jnp.asarray(np.clip(random.lognormal(3.5, 1.2, sizes.lanes), 1, sizes.most_steps), jnp.int32)
    starts = jnp.asarray(random.randn(sizes.lanes, 32), jnp.float32)

    recurrence = Recurrence(lambda _, state, __: jnp.tanh(state @ weights), sizes.most_steps)

    def batch(loop: Callable[..., Any]) -> Callable[..., Any]:
        run = with_while_loop(recurrence, loop)
        return jax.vmap(lambda start, n: run(None, start, None, n))

    compact = partial(lx.while_loop, lanes="compact")
    loops = {"loopax, compact": compact, "loopax": lx.while_loop, **_plain_while_loops()}
    contenders = [Contender(name, batch(loop)) for name, loop in loops.items()]
    return Program(f"batch of {sizes.lanes} while loops, 1 to {sizes.most_steps} steps", contenders, (starts, counts))


def small_body(sizes: Sizes) -> Program:
    """A loop whose steps take nanoseconds on a CPU."""
    n = sizes.loop_steps
    recurrence = Recurrence(lambda _, x, __: jnp.sin(x), n)

    def repeat(loop: Callable[..., Any]) -> Callable[..., Any]:
        run = with_while_loop(recurrence, loop)
        return lambda x, n: run(None, x, None, n)

    loops = {"loopax": lx.while_loop, **_plain_while_loops()}
    contenders = [Contender(name, repeat(loop)) for name, loop in loops.items()]
    arguments = jnp.float32(0.5), jnp.int32(n)
    return Program(f"one while loop, {n} steps of one sine", contenders, arguments, steps=n)


def _plain_while_loops() -> dict[str, Callable[..., Any]]:
    """Those without reverse mode, which the peers have for loops that are not differentiated."""
    loops: dict[str, Callable[..., Any]] = {"jax.lax": lax.while_loop}
    loops["Equinox"] = partial(eqxi.while_loop, kind="lax")
    if is_installed("flax"):
        from flax import nnx

        loops["Flax NNX"] = nnx.while_loop
    return loops


def some_weights(*shapes: tuple[int, int], scale: float) -> list[Any]:
    """Normal numbers, always the same."""
    random = np.random.RandomState(0)
    return [jnp.asarray(scale * random.randn(*shape), jnp.float32) for shape in shapes]
