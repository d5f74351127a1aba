"""Read compiled programs: which whole arrays are written again in every step of a loop."""

import re
from collections.abc import Iterator
from math import prod

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
    computations = _computations(text)
    fused = {name for part in computations.values() for name in re.findall(r" fusion\([^\n]*calls=%?([\w.\-]+)", part)}
    bodies = {name for part in computations.values() for name in re.findall(r" while\([^\n]*?body=%?([\w.\-]+)", part)}
    reached = {name: _reached(name, computations) for name in bodies}
    innermost = [names for names in reached.values() if not any(" while(" in computations[name] for name in names)]
    found = {name: list(_whole_arrays(computations[name], elements, name in fused)) for name in set().union(*innermost)}
    return sorted(operation for operations in found.values() for operation in operations)


def _computations(text: str) -> dict[str, str]:
    """The computations of a program by name."""
    parts = _HEAD.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _reached(name: str, computations: dict[str, str]) -> set[str]:
    """A computation and all that it calls."""
    seen, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += _called(computations[name])
    return seen


def _called(part: str) -> Iterator[str]:
    yield from _ONE_CALLED.findall(part)
    for several in _SEVERAL_CALLED.findall(part):
        yield from (name.strip().lstrip("%") for name in several.split(","))


def _whole_arrays(part: str, elements: int, fused: bool) -> Iterator[str]:
    """In a fusion only its result is written, and what is not a copy may be evaluated for a single row."""
    for root, dtype, shape, operation in _INSTRUCTION.findall(part):
        counts = operation in _WHOLE and (root or not fused or operation.startswith("copy"))
        if counts and prod(int(size or 1) for size in shape.split(",")) >= elements:
            yield f"{operation} {dtype}[{shape}]"
