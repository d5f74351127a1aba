"""The programs of `python -m loopax bench`."""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopax as lx
from loopax._src.command.measure import Contender, Program
from loopax._src.command.peers import Recurrence, gradient, installed, peers, with_loopax

ODE_STEPS, ODE_BOUND, DT = 500, 1000, 0.01
SEQUENCES, LONGEST, HIDDEN = 128, 400, 32
LANES, MOST_STEPS = 512, 1000
SMALL_STEPS = 1_000_000


def programs() -> list[Callable[[], Program]]:
    """Each is built when its turn comes."""
    return [neural_ode, ragged, uneven, small_body]


def neural_ode() -> Program:
    """The gradient of a perceptron's ODE, by Heun's method, for a number of steps known at run time."""
    weights = _weights((16, 64), (64, 16), scale=0.3)
    start = jnp.asarray(np.random.RandomState(1).randn(32, 16), jnp.float32)
    recurrence = Recurrence(_heun, ODE_BOUND)
    runs = {"loopax": with_loopax(recurrence), "loopax, Checkpointed()": with_loopax(recurrence, kind="checkpointed")}
    runs |= peers(recurrence)
    if installed("diffrax"):
        runs["Diffrax"] = _with_diffrax
    contenders = [Contender(name, gradient(run)) for name, run in runs.items()]
    name = f"gradient of an MLP ODE, {ODE_STEPS} steps, bound {ODE_BOUND}"
    return Program(name, contenders, (weights, start, None, jnp.int32(ODE_STEPS)))


def _field(weights: Any, y: Any) -> Any:
    return jnp.tanh(y @ weights[0]) @ weights[1]


def _heun(weights: Any, y: Any, _: Any) -> Any:
    first = _field(weights, y)
    return y + DT / 2 * (first + _field(weights, y + DT * first))


def _with_diffrax(weights: Any, start: Any, _: Any, n: Any) -> Any:
    import diffrax

    term = diffrax.ODETerm(lambda _, y, weights: _field(weights, y))  # pyright: ignore[reportArgumentType]
    # A little less than the last step's end, so that rounding does not add a step.
    end = (n - 1e-3) * DT
    controller = diffrax.ConstantStepSize()
    options = {"args": weights, "max_steps": ODE_BOUND, "stepsize_controller": controller}
    solution: Any = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, end, DT, start, **options)
    return solution.ys[0]


def ragged() -> Program:
    """The gradient of a recurrent network's weights, over a batch of sequences of different length."""
    random = np.random.RandomState(0)
    weights = _weights((HIDDEN, 3 * HIDDEN), (HIDDEN, 3 * HIDDEN), scale=0.1)
    rows = jnp.asarray(random.randn(SEQUENCES, LONGEST, HIDDEN), jnp.float32)
    lengths = jnp.asarray(np.clip(random.lognormal(4.0, 1.0, SEQUENCES), 1, LONGEST), jnp.int32)
    recurrence = Recurrence(_gated, LONGEST)
    runs = {
        "loopax, compact": with_loopax(recurrence, lanes="compact"),
        "loopax, compact, Checkpointed()": with_loopax(recurrence, lanes="compact", kind="checkpointed"),
        "loopax": with_loopax(recurrence),
        **peers(recurrence),
    }
    contenders = [Contender(name, gradient(_in_lanes(run))) for name, run in runs.items()]
    name = f"gradient of a GRU, {SEQUENCES} sequences of 1 to {LONGEST} rows"
    return Program(name, contenders, (weights, jnp.zeros((SEQUENCES, HIDDEN)), rows, lengths))


def _in_lanes(run: Any) -> Any:
    return jax.vmap(run, (None, 0, 0, 0))


def _gated(weights: Any, h: Any, x: Any) -> Any:
    from_input, from_state = (jnp.split(value, 3) for value in (x @ weights[0], h @ weights[1]))
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(from_input[:2], from_state[:2], strict=True))
    return (1 - update) * jnp.tanh(from_input[2] + reset * from_state[2]) + update * h


def uneven() -> Program:
    """A batch of while loops that end at different steps."""
    random = np.random.RandomState(0)
    (weights,) = _weights((32, 32), scale=0.2)
    counts = jnp.asarray(np.clip(random.lognormal(3.5, 1.2, LANES), 1, MOST_STEPS), jnp.int32)
    starts = jnp.asarray(random.randn(LANES, 32), jnp.float32)

    def batch(loop: Callable[..., Any]) -> Callable[..., Any]:
        def lane(start: Any, n: Any) -> Any:
            def body(carry: Any) -> Any:
                return jnp.tanh(carry[0] @ weights), carry[1] + 1

            return loop(lambda carry: carry[1] < n, body, (start, jnp.int32(0)))[0]

        return jax.vmap(lane)

    def compact(goes_on: Any, body: Any, start: Any) -> Any:
        return lx.while_loop(goes_on, body, start, lanes="compact")

    loops = {"loopax, compact": compact, "loopax": lx.while_loop, **_plain_while_loops()}
    contenders = [Contender(name, batch(loop)) for name, loop in loops.items()]
    return Program(f"batch of {LANES} while loops, 1 to {MOST_STEPS} steps", contenders, (starts, counts))


def small_body() -> Program:
    """A loop whose steps take nanoseconds."""

    def repeat(loop: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, n: Any) -> Any:
            return loop(lambda carry: carry[1] < n, lambda carry: (jnp.sin(carry[0]), carry[1] + 1), (x, jnp.int32(0)))[
                0
            ]

        return run

    loops = {"loopax": lx.while_loop, **_plain_while_loops()}
    contenders = [Contender(name, repeat(loop)) for name, loop in loops.items()]
    arguments = jnp.float32(0.5), jnp.int32(SMALL_STEPS)
    return Program(f"one while loop, {SMALL_STEPS} steps of one sine", contenders, arguments, steps=SMALL_STEPS)


def _plain_while_loops() -> dict[str, Callable[..., Any]]:
    """Those without reverse mode, which the peers have for loops that are not differentiated."""
    loops: dict[str, Callable[..., Any]] = {"jax.lax": lax.while_loop}
    loops["Equinox"] = lambda goes_on, body, start: eqxi.while_loop(goes_on, body, start, kind="lax")
    if installed("flax"):
        from flax import nnx

        loops["Flax NNX"] = nnx.while_loop
    return loops


def _weights(*shapes: tuple[int, int], scale: float) -> list[Any]:
    random = np.random.RandomState(0)
    return [jnp.asarray(scale * random.randn(*shape), jnp.float32) for shape in shapes]
