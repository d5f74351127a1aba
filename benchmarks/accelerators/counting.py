"""What a compiled program shows: the kernels of a step, the trip counts that the compiler knows, and copies."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from benchmarks.accelerators.iterations import number_of

# Instructions that compute nothing, and start no kernel.
FREE = {
    "after-all",
    "async-done",
    "bitcast",
    "constant",
    "copy-done",
    "fusion-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
RUN_BY = {
    "call": ("to_apply", "calls"),
    "async-start": ("to_apply", "calls"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*?\) -> .*? \{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$", re.MULTILINE)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    def called(self, what: str) -> list[str]:
        """The computations in an attribute."""
        found = re.search(rf"\b{what}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.rest)
        return re.findall(r"[\w.\-]+", found[1] or found[2]) if found else []

    @property
    def operands(self) -> list[str]:
        """Their names."""
        return _OPERAND.findall(self.rest.partition(")")[0])

    @property
    def _arrays(self) -> list[tuple[str, int]]:
        """The dtype of each result, and its numbers."""
        return [(dtype, prod(map(int, filter(None, shape.split(","))))) for dtype, shape in _ARRAY.findall(self.shape)]

    @property
    def size(self) -> int:
        """The numbers in all results."""
        return sum(size for _, size in self._arrays)

    @property
    def bytes(self) -> int:
        """Of all results."""
        return sum(BYTES.get(dtype, 0) * size for dtype, size in self._arrays)


class While(NamedTuple):
    """A loop of a program."""

    body: str
    kernels: int  # of a step, without loops in it, with the condition
    trips: int | None  # None: the compiler does not know it
    copies: tuple[int, ...]  # bytes of each array that a step copies
    inside: str  # the body of the loop around it; empty: none
    number: int | None  # as in `iterations.py`


Computations = dict[str, list[Instruction]]


def loops(text: str) -> list[While]:
    """The loops of a program, outer ones first."""
    computations, entry = computations_of(text)
    return list(_loops(computations, entry, ""))


def computations_of(text: str) -> tuple[Computations, str]:
    """All of a program by their names, and the name of the one that is run."""
    found = _COMPUTATION.findall(text)
    (entry,) = (name for is_entry, name, _ in found if is_entry)
    return {name: [Instruction(*one) for one in _INSTRUCTION.findall(block)] for _, name, block in found}, entry


def loop_of(computations: Computations, one: Instruction, inside: str) -> While:
    """What is known of the loop that an instruction runs."""
    (condition,), (body,) = one.called("condition"), one.called("body")
    trips = _TRIPS.search(one.rest)
    run = [*_flat(computations, body), *_flat(computations, condition)]
    return While(
        body,
        _kernels(computations, body) + _kernels(computations, condition),
        int(trips[1]) if trips else None,
        tuple(step.bytes for step in run if step.opcode == "copy"),
        inside,
        number_of(name for step in run for name in _OP_NAME.findall(step.rest)),
    )


def _loops(computations: Computations, name: str, inside: str) -> Iterator[While]:
    for one in _flat(computations, name):
        if one.opcode == "while":
            loop = loop_of(computations, one, inside)
            yield loop
            yield from _loops(computations, loop.body, loop.body)


def _flat(computations: Computations, name: str) -> Iterator[Instruction]:
    """The instructions of a computation and of those that it calls; of a choice, of all branches."""
    for one in computations[name]:
        yield one
        for called in _run_by(one):
            yield from _flat(computations, called)


def _run_by(one: Instruction) -> list[str]:
    """The computations of a call, or the branches of a choice."""
    return [called for what in RUN_BY.get(one.opcode, ()) for called in one.called(what)]


def _kernels(computations: Computations, name: str) -> int:
    """Those of a computation without the loops in it; of a choice, those of its largest branch."""
    total = 0
    for one in computations[name]:
        inner = [_kernels(computations, called) for called in _run_by(one)]
        if one.opcode == "conditional":
            total += 1 + max(inner)
        elif one.opcode in RUN_BY:
            total += sum(inner)
        else:
            total += one.opcode not in FREE
    return total


def kernels_started(found: Sequence[While], taken: Mapping[int, int]) -> int | None:
    """Those of all steps of all loops, of which numbered ones have taken so many; None: it is not known of each."""
    steps, total = {"": 1}, 0
    for one in found:
        known = taken.get(one.number, 0) if one.number is not None else None
        if known is None and one.trips is not None:
            known = one.trips * steps[one.inside]
        if known is None:
            return None
        steps[one.body] = known
        total += known * one.kernels
    return total
