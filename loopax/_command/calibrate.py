"""`python -m loopax calibrate FILE`: measure what operations cost on this machine, for `Auto()` and `lanes="auto"`.

loopax uses the file after `lx.configure(calibration=FILE)`, or if the environment variable LOOPAX_CALIBRATION names it.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from loopax._command.installed import machine
from loopax._command.table import show_table
from loopax._src import configuration
from loopax._src.insight.compare import compiled, interleaved
from loopax._src.settings import Costs

# What the constants of `Costs` are scaled by: small programs, each of which spends its time on one kind of operation.
# A probe of one operation does not measure what it costs in a program, where it stands among others. The constants
# were fitted on whole programs. On another machine, a constant is taken to differ as much as the time of its probe
# does.

ROUNDS = 7
MIB = 2**20


class Probe(NamedTuple):
    """A program for some of the constants."""

    constants: tuple[str, ...]
    reference: float  # nanoseconds for an operation, on the machine on which the constants were fitted
    program: Callable[..., Any]
    arguments: tuple[Array, ...]
    operations: float


def probes() -> list[Probe]:
    """All constants of `Costs` are named once."""
    numbers, image, kernel = _random(4096), _random(2, 32, 32, 8), _random(3, 3, 8, 8)
    axes = ("NHWC", "HWIO", "NHWC")
    convolution = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=axes)
    return [
        _rows(("near_byte", "cached_byte"), 0.26, row=16 * 1024, in_all=8 * MIB),
        _rows(("memory_byte",), 0.63, row=64 * 1024, in_all=48 * MIB),
        _repeated("product", 0.0095, jnp.matmul, 2 * 32 * 128**2, 400, _random(32, 128), _random(128, 128)),
        _repeated("convolution", 0.053, convolution, 2 * image.size * 3 * 3 * 8, 20, image, kernel),
        _repeated("elementwise", 0.0147, lambda y: y + 0.01 * y * (1 - y) * (y - 0.3), 6 * numbers.size, 4000, numbers),
        _repeated(
            ("function", "narrow_function"), 0.48, lambda y: jnp.exp(-jnp.tanh(y)), 2 * numbers.size, 1000, numbers
        ),
        _repeated("slow_function", 3.2, lambda y: jnp.sin(y) + 0.1, numbers.size, 500, numbers),
        _repeated("comparison", 5.4, lambda y: jnp.sort(-y), 12 * numbers.size, 20, numbers),
        _repeated("call", 218.0, _calls, 2 * 8, 3000, _random(256)),
        _repeated("step", 38.0, lambda y: 0.999 * y, 1, 20_000, _random(512)),
    ]


def measured() -> list[tuple[Probe, float]]:
    """Every probe with the nanoseconds that an operation takes here, in some seconds."""
    made = probes()
    times = interleaved([compiled(probe.program, probe.arguments).call for probe in made], ROUNDS, warm=True)
    return [(probe, 1e6 * time / probe.operations) for probe, time in zip(made, times, strict=True)]


def scaled(found: list[tuple[Probe, float]]) -> Costs:
    """The constants of this machine."""
    slower = {name: nanoseconds / probe.reference for probe, nanoseconds in found for name in probe.constants}
    return Costs(*(fitted * slower[name] for name, fitted in Costs()._asdict().items()))


def _random(*shape: int) -> Array:
    """Numbers with which products stay small."""
    numbers = np.random.RandomState(0).randn(*shape) / np.sqrt(prod(shape[:-1]) or 1)
    return jnp.asarray(numbers, jnp.float32)


def _repeated(
    constants: str | tuple[str, ...],
    reference: float,
    operation: Callable[..., Array],
    count: int,
    steps: int,
    *arguments: Array,
) -> Probe:
    """An operation on its own result, which counts as so many."""

    def program(x: Array, *others: Array) -> Array:
        return lax.fori_loop(0, steps, lambda _, x: operation(x, *others), x)

    constants = (constants,) if isinstance(constants, str) else constants
    return Probe(constants, reference, program, arguments, steps * count)


def _calls(y: Array) -> Array:
    """Eight reductions in a row, with an operation between any two."""
    for _ in range(8):
        y = y - 0.5 * y.max()
    return y


def _rows(constants: tuple[str, ...], reference: float, *, row: int, in_all: int) -> Probe:
    """Rows of so many bytes are stored, and read again from the last to the first."""

    def program(x: Array) -> Array:
        rows = lax.scan(lambda c, _: (0.9 * c, c), x, None, length=in_all // row)[1]
        return lax.scan(lambda c, y: (0.5 * c + y, None), jnp.zeros_like(x), rows, reverse=True)[0]

    return Probe(constants, reference, program, (_random(row // 4),), in_all)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit code is 2 where the file cannot be written, else 0."""
    if not arguments.file.parent.is_dir():
        print(f"{arguments.file}: there is no folder {arguments.file.parent}", file=sys.stderr)
        return 2
    found = measured()
    rows = [[", ".join(probe.constants), f"{time:.3g}", f"{time / probe.reference:.2f}"] for probe, time in found]
    headers = ["operation", "ns", "times as slow as expected"]
    show_table(f"Operations on {machine()}", headers, rows, numeric=headers[1:])
    configuration.write(arguments.file, scaled(found), machine())
    print(f"Wrote {arguments.file}. Give it to lx.configure(calibration=...), or name it in {configuration.VARIABLE}.")
    return 0
