"""Compiled programs: when there are new ones, what stands in loops, and how much memory a device needs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that are compiled meanwhile."""
    found: list[str] = []

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def temporary(compiled: Any) -> int:
    """Temporary memory of one device, in bytes."""
    return compiled.memory_analysis().temp_size_in_bytes


def temporary_of(function: Any, *arguments: Any) -> int:
    """That of a function which is compiled for these arguments."""
    return temporary(jax.jit(function).lower(*arguments).compile())


def collectives(text: str) -> list[str]:
    """All collective operations in a program, by name."""
    return re.findall(rf"^\s.*? = .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", text, flags=re.MULTILINE)


def collectives_in_loops(text: str) -> list[str]:
    """Those in the bodies and conditions of its loops, and in what these call."""
    return [found for body in _in_loops(text) for found in collectives(body)]


def whole_arrays_in_loops(text: str, *shape: int) -> list[str]:
    """What copies, fills or computes an array of this shape in its loops: not what writes a part of one in place."""
    operation = rf"= \w+\[{','.join(map(str, shape))}\]\S* (?:copy|broadcast|add|multiply|pad|select|concatenate)\("
    return [line.strip() for body in _in_loops(text) for line in body.splitlines() if re.search(operation, line)]


def _in_loops(text: str) -> list[str]:
    """The bodies and conditions of the loops of a program, and what these call."""
    computations = _computations(text)
    seen: set[str] = set()
    waiting = [name for body in computations.values() for name in _loop_parts(body)]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += _called(computations[name])
    return [computations[name] for name in seen]


def _computations(text: str) -> dict[str, str]:
    """The computations of a module by name."""
    parts = re.split(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _loop_parts(body: str) -> list[str]:
    return [name for pair in re.findall(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", body) for name in pair]


def _called(body: str) -> list[str]:
    names = re.findall(r"(?:to_apply|calls|condition|body|true_computation|false_computation)=%?([\w.\-]+)", body)
    for several in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", body):
        names += [name.strip().lstrip("%") for name in several.split(",")]
    return names
