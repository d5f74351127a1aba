"""Whether this version of XLA copies a whole array in every step of a loop that writes one row.

What is looked for stands in the compiled program, so that no time is measured: operations in the body of a loop that
write an array of all rows, and the temporary memory at two capacities.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import loopax as lx
from loopax._command.table import in_words

# What writes a whole array where a loop in place would write a row.
_WHOLE = {"copy", "copy-start", "select", "broadcast", "concatenate", "pad", "add", "convert", "transpose", "reverse"}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?[^=\n]+ = \(?(\w+)\[([\d,]*)\]\S* ([\w\-]+)\(", re.MULTILINE)
_ONE_CALLED = re.compile(r"(?:to_apply|calls|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_SEVERAL_CALLED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


def copied_in_steps(text: str, elements: int) -> list[str]:
    """What writes a whole array of at least so many elements in each step of an innermost loop: `copy f32[1000,8]`.

    Loops around others do not count: what they do once in a block of steps weighs little beside the steps.
    """
    parts = _HEAD.split(text)
    computations = dict(zip(parts[1::2], parts[2::2], strict=True))  # by name
    fused = {name for part in computations.values() for name in re.findall(r" fusion\([^\n]*calls=%?([\w.\-]+)", part)}
    bodies = {name for part in computations.values() for name in re.findall(r" while\([^\n]*?body=%?([\w.\-]+)", part)}
    reached = {name: _reached(name, computations) for name in bodies}
    innermost = [names for names in reached.values() if not any(" while(" in computations[name] for name in names)]
    found = {name: list(_whole_arrays(computations[name], elements, name in fused)) for name in set().union(*innermost)}
    return sorted(operation for operations in found.values() for operation in operations)


def _reached(name: str, computations: dict[str, str]) -> set[str]:
    """A computation and all that it calls."""
    seen, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += _ONE_CALLED.findall(computations[name])
            for several in _SEVERAL_CALLED.findall(computations[name]):
                waiting += (name.strip().lstrip("%") for name in several.split(","))
    return seen


def _whole_arrays(part: str, elements: int, fused: bool) -> Iterator[str]:
    """In a fusion only its result is written, and what is not a copy may be evaluated for a single row."""
    for root, dtype, shape, operation in _INSTRUCTION.findall(part):
        counts = operation in _WHOLE and (root or not fused or operation.startswith("copy"))
        if counts and prod(int(size or 1) for size in shape.split(",")) >= elements:
            yield f"{operation} {dtype}[{shape}]"


CAPACITIES = 1031, 2063  # no other array has so many rows; windows of so many are rings (`loopax.History`)
WIDTH = 16
# The rows, their cotangents, what is made of both outside of the loop. A loop that keeps a version of the array for
# every step or block has many more.
MOST_ARRAYS = 8.0


class CopyTest(NamedTuple):
    """A loop that writes rows."""

    name: str
    function: Callable[[int, Any, Any], Any]  # (capacity, x, steps) -> a number
    known: str = ""  # why it is copied by the versions of XLA that are known, if it is


class Verdict(NamedTuple):
    name: str
    arrays: float  # of all rows that the temporary memory holds
    copies: list[str]
    known: str
    error: str = ""  # where it does not compile

    @property
    def fails(self) -> bool:
        """Whether a loop costs more per step, or more memory, than it should."""
        return self.status.startswith("FAILS")

    @property
    def status(self) -> str:
        """In words: `ok`, or which arrays are copied."""
        if self.error:
            return f"FAILS: {self.error}"
        if self.arrays > MOST_ARRAYS:
            return f"FAILS: stores the rows {self.arrays:.0f} times"
        if self.copies:
            what = f"{', '.join(sorted(set(self.copies)))} in every step"
            return f"copies, as is known ({self.known}): {what}" if self.known else f"FAILS: {what}"
        return "ok"


def judge(program: CopyTest, gradient: bool) -> Verdict:
    """Compile a program, or its gradient, and look for copies; one that does not compile is reported."""
    name = f"{program.name}, {'gradient' if gradient else 'forward'}"
    function = jax.grad(program.function, 1) if gradient else program.function
    temporary, copies, row = [], [], jnp.ones(WIDTH)
    for capacity in CAPACITIES:
        try:
            compiled = jax.jit(partial(function, capacity)).lower(row, jnp.int32(50)).compile()
        except Exception as error:  # noqa: BLE001 - what is looked for here
            return Verdict(name, 0.0, [], program.known, in_words(error))
        analysis = compiled.memory_analysis()
        temporary.append(analysis.temp_size_in_bytes if analysis else 0)
        copies = copied_in_steps(compiled.as_text() or "", capacity * WIDTH)
    arrays = (temporary[1] - temporary[0]) / (row.nbytes * (CAPACITIES[1] - CAPACITIES[0]))
    return Verdict(name, arrays, copies, program.known)


def programs() -> list[CopyTest]:
    """Rows of `ys`, of `xs`, of a buffer, and of a window."""
    return [
        CopyTest("scan, rows of ys", _rows_written),
        CopyTest("scan, rows of xs", _rows_read),
        CopyTest("Buffer, appended and read", _buffer),
        CopyTest("History, pushes what it reads", _history),
        CopyTest("History, pushes something else", _delay_line, known="docs: Histories"),
    ]


def _rows_written(capacity: int, x: Any, n: Any) -> Any:
    _, ys = lx.scan(lambda x, _: (jnp.sin(x), x), x, length=n, max_steps=capacity, kind="checkpointed")
    return (ys**2).sum()


def _rows_read(capacity: int, x: Any, n: Any) -> Any:
    rows = jnp.outer(jnp.arange(capacity, dtype=x.dtype), x)
    last, _ = lx.scan(lambda x, row: (jnp.sin(x) + row, None), x, rows, length=n, kind="checkpointed")
    return (last**2).sum()


def _buffer(capacity: int, x: Any, n: Any) -> Any:
    def body(_: Any, carry: Any) -> Any:
        buffer, x = carry
        return buffer.append(x + 0.1 * buffer[-1]), jnp.sin(x)

    start = lx.Buffer(capacity, like=x).append(x), x
    buffer, _ = lx.fori_loop(0, n, body, start, max_steps=capacity - 1, kind="checkpointed")
    return (buffer.rows**2).sum()


def _history(capacity: int, x: Any, n: Any) -> Any:
    def step(_: Any, rows: Any) -> Any:
        return rows.push(jnp.sin(rows[-1]) + 0.1 * rows[0])

    start = lx.History(capacity, like=x, fill=0.5).push(x)
    return (lx.fori_loop(0, n, step, start, max_steps=capacity, kind="residuals")[-1] ** 2).sum()


def _delay_line(capacity: int, x: Any, n: Any) -> Any:
    def step(_: Any, carry: Any) -> Any:
        rows, x = carry
        return rows.push(jnp.sin(x)), 0.9 * x + 0.1 * rows[0]

    start = lx.History(capacity, like=x, fill=0.5), x
    return (lx.fori_loop(0, n, step, start, max_steps=capacity, kind="residuals")[1] ** 2).sum()
