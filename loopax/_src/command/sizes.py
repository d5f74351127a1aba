"""How large the measured programs are, and how often each runs: the sizes of all tables are chosen here.

A step of a loop takes nanoseconds on a CPU and 10 to 50 microseconds on a GPU, where the host starts a kernel for each
operation. So a loop of a million steps is a good measurement on a CPU, and takes a minute on a GPU. With `DEVICE` each
program takes less than a second on a GPU, and all of `bench --device` less than twenty minutes.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Sizes:
    """The sizes of the programs, and the number of repetitions.

    Parameters
    ----------
    ode_steps, ode_bound
        The steps of the neural ODE, and the bound of its loop.
    sequences, longest, hidden
        The number of sequences of the recurrent network, the rows of the longest, and the units.
    lanes, most_steps
        The number of while loops in a batch, and the most steps that one of them takes.
    loop_steps, gradient_steps
        The steps of loops whose bodies are a few operations: forward, and where a gradient is taken.
    batch
        The lanes of batches of such loops.
    rounds
        How often each program is timed; the median counts.
    seconds
        After so many seconds three rounds are enough.
    warm
        Whether each program runs once, untimed, before each timed run.

    """

    ode_steps: int = 500
    ode_bound: int = 1000
    sequences: int = 128
    longest: int = 400
    hidden: int = 32
    lanes: int = 512
    most_steps: int = 1000
    loop_steps: int = 1_000_000
    gradient_steps: int = 100_000
    batch: int = 64
    rounds: int = 7
    seconds: float = inf
    warm: bool = False


PROCESSOR = Sizes()
DEVICE = Sizes(loop_steps=2000, gradient_steps=1000, batch=1024, rounds=5, seconds=15.0, warm=True)
QUICK = Sizes(
    ode_steps=5,
    ode_bound=9,
    sequences=40,
    longest=12,
    hidden=4,
    lanes=40,
    most_steps=9,
    loop_steps=32,
    gradient_steps=16,
    batch=4,
    rounds=1,
    warm=True,
)
BY_NAME = {"device": DEVICE, "quick": QUICK}
MINUTES = 20  # after which `bench --device` begins no further table
