"""Measure one table of `bench --device`, and print it as JSON: a table that fails or hangs takes no other with it.

`python -m benchmarks.short.device_worker TITLE SIZES` is that process.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from benchmarks.short import every_k, programs, small_loops, unrolled
from benchmarks.short.bodies import perceptron, sines, two_flops
from benchmarks.short.device import ALL, DEFAULT, LOOPS_AS_GRAPHS, Flags
from benchmarks.short.measure import BY_NAME, Measurement, Program, Sizes, measure

# The tables of `bench --device` that come with the package, and the flags that each is measured with.


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


def measured(title: str, sizes: Sizes) -> dict[str, Any]:
    """Return the table as a record."""
    program = BY_TITLE[title].build(sizes)
    rows = measure(program, sizes.rounds, warm=sizes.warm, seconds=sizes.seconds)
    return record(title, program.name, rows)


def record(title: str, about: str, rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return what was measured, as it is written to a file."""
    return {"title": title, "about": about, "rows": [_row(row) for row in rows]}


def _row(row: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "program"}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], BY_NAME[sys.argv[2]])))
