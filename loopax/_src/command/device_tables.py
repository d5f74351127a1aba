"""The tables of `bench --device` that come with the package, and the flags that each is measured with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from loopax._src.command import every_k, programs, small_loops, unrolled
from loopax._src.command.bodies import perceptron, sines, two_flops
from loopax._src.command.device_flags import ALL, DEFAULT, LOOPS_AS_GRAPHS, Flags
from loopax._src.command.measure import Program
from loopax._src.command.sizes import Sizes


class Table(NamedTuple):
    """Programs that are compared with each other."""

    title: str
    build: Callable[[Sizes], Program]
    seconds: float  # expected for one set of flags: six to start JAX, then about two for each program
    flags: tuple[Flags, ...] = (DEFAULT,)


GRAPHS = (DEFAULT, LOOPS_AS_GRAPHS)
TABLES = (
    Table("One loop of two flops", small_loops.one_loop, 20, ALL),
    Table("A batch of loops of two flops", small_loops.batch, 20, ALL),
    Table("Gradient of a loop of two flops", small_loops.gradient, 25, ALL),
    Table("Condition every k steps: two flops", every_k.one_loop, 20, ALL),
    Table("Condition every k steps: two flops, a batch", every_k.batch, 20),
    Table("Condition every k steps: a small network", every_k.matrix_body, 20),
    Table("Condition every k steps: two flops, gradient", every_k.gradient, 20, GRAPHS),
    Table("Unrolled: two flops", partial(unrolled.forward, two_flops), 20, GRAPHS),
    Table("Unrolled: 64 sines", partial(unrolled.forward, sines), 20),
    Table("Unrolled: a small network", partial(unrolled.forward, perceptron), 25),
    Table("Unrolled: two flops, gradient", partial(unrolled.gradient, two_flops), 25),
    Table("Neural ODE, gradient", programs.neural_ode, 35, GRAPHS),
    Table("While loops that end at different steps", programs.uneven, 25, GRAPHS),
    Table("Recurrent network over ragged sequences, gradient", programs.ragged, 50),
)
BY_TITLE = {table.title: table for table in TABLES}
