"""How long a compiled program takes on a device, foretold from its text.

On a GPU, a kernel takes as long as it takes to start, or longer if it moves or computes much. A step of a loop starts
something, too; a loop whose length XLA does not know asks the host before each step, and so does a choice. On a TPU,
XLA writes the cycles that it expects of an operation into the text.
"""

import re
from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

from benchmarks.accelerators.counting import FREE, RUN_BY, Computations, Instruction, computations_of, loop_of

_TAKES_PART = {"dynamic-slice", "gather", "slice"}


class Device(NamedTuple):
    """What things take, in nanoseconds."""

    kernel: float  # the least
    step: float
    look: float
    byte: float
    flop: float
    cycle: float


# docs/accelerators.md has the sources.
DEVICES = {
    "h100": Device(kernel=600.0, step=5000.0, look=15_500.0, byte=1 / 3350, flop=1 / 250_000, cycle=0.0),
    "tpu-v5e": Device(kernel=0.0, step=0.0, look=0.0, byte=1 / 819, flop=0.0, cycle=1 / 1.5),
}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def milliseconds(text: str, device: Device, taken: Mapping[int, int]) -> float:
    """Of a program whose numbered loops take so many steps."""
    computations, entry = computations_of(text)
    return _Program(computations, device, taken).time(entry, 1) / 1e6


class _Program(NamedTuple):
    computations: Computations
    device: Device
    taken: Mapping[int, int]

    def time(self, name: str, runs: float) -> float:
        """Of so many runs of a computation."""
        known = {one.name: one for one in self.computations[name]}
        return sum(self._of_instruction(one, known, runs) for one in self.computations[name])

    def _of_instruction(self, one: Instruction, known: Mapping[str, Instruction], runs: float) -> float:
        if one.opcode == "while":
            return self._of_loop(one, runs)
        parts = [self.time(called, runs) for what in RUN_BY.get(one.opcode, ()) for called in one.called(what)]
        if one.opcode == "conditional":
            return runs * self.device.look + max(parts)
        if one.opcode in RUN_BY or one.opcode in FREE:
            return sum(parts)
        if (cycles := _CYCLES.search(one.rest)) and self.device.cycle:
            return runs * int(cycles[1]) * self.device.cycle
        if one.opcode in ("fusion", "fusion-start"):
            (called,) = one.called("calls")
            inner = {step.name: step for step in self.computations[called]}
        else:
            operands = {name: known[name]._replace(opcode="parameter") for name in one.operands if name in known}
            inner = operands | {one.name: one}
        flops = sum(_flops(step, inner) for step in inner.values())
        return runs * max(self.device.kernel, _moved(inner) * self.device.byte + flops * self.device.flop)

    def _of_loop(self, one: Instruction, runs: float) -> float:
        loop = loop_of(self.computations, one, "")
        # A loop that is not numbered is one of `lax.scan`, whose length is static.
        steps = (loop.trips or 0) * runs if loop.number is None else self.taken.get(loop.number, 0)
        looks = 0.0 if loop.trips is not None else self.device.look * (steps + runs)
        (condition,), (body,) = one.called("condition"), one.called("body")
        return looks + steps * self.device.step + self.time(condition, steps) + self.time(body, steps)


def _moved(inner: Mapping[str, Instruction]) -> int:
    """The bytes that a fused computation reads and writes; of what takes or writes a part of an array, the part's."""
    total = 0
    for one in inner.values():
        users = [user for user in inner.values() if one.name in user.operands]
        if one.opcode == "parameter":
            parts = [user for user in users if user.opcode in _TAKES_PART]
            written = [user for user in users if user.opcode == "dynamic-update-slice" and user.operands[0] == one.name]
            total += sum(part.bytes for part in parts) if len(parts) + len(written) == len(users) else one.bytes
        elif not users or all(user.opcode == "tuple" for user in users):
            while one.opcode in ("bitcast", "copy") and one.operands[0] in inner:
                one = inner[one.operands[0]]
            if one.opcode == "dynamic-update-slice":
                total += inner[one.operands[1]].bytes
            elif one.opcode != "tuple":
                total += one.bytes
    return total


def _flops(one: Instruction, known: Mapping[str, Instruction]) -> float:
    """Those of a product of matrices."""
    if one.opcode != "dot" and "gemm" not in one.rest:
        return 0.0
    sizes = [known[name].size for name in one.operands[:2] if name in known]
    return 2 * sqrt(sizes[0] * sizes[1] * one.size) if len(sizes) == 2 else 0.0
