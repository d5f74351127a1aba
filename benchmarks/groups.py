"""What is compared with what, and the bounds on the ratios."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Case, Measurement

EQUINOX, EVERY_CARRY, LAX_SCAN = "Equinox checkpointed", "lax.scan of jax.checkpoint", "lax.scan"

# What the names of other libraries' programs begin with.
PEERS = (
    "Diffrax",
    "Equinox",
    "brainstate",
    "jaxmore",
    "lax",
    "matfree",
    "nnx",
    "optimistix",
    "padded and masked lax",
    "traceax",
    "vmapped lax",
    "vmapped optimistix",
)


@dataclass(frozen=True)
class Target:
    """A bound on a ratio."""

    quantity: str
    of: str
    to: str | tuple[str, ...]  # several: the best of them
    bound: float
    attribute: str = "milliseconds"

    @property
    def title(self) -> str:
        """In words."""
        to = self.to if isinstance(self.to, str) else f"the best of {', '.join(self.to)}"
        return f"{self.quantity}: {self.of} / {to}"


@dataclass(frozen=True)
class Group:
    """Programs that are compared with each other."""

    title: str
    cases: list[Case]
    targets: list[Target]
    rounds: int = 11
    compilations: int = 1
    steps: int | None = None  # of every program, where steps per second say more than milliseconds
    missing: tuple[str, ...] = ()  # libraries that are not installed, and whose programs are left out


def ratio(target: Target, found: dict[str, Measurement]) -> float:
    """What was measured for a target."""
    others = [target.to] if isinstance(target.to, str) else target.to
    best = min(getattr(found[name], target.attribute) for name in others)
    return getattr(found[target.of], target.attribute) / best


@dataclass(frozen=True)
class Findings:
    """Numbers that are not times of programs, in rows of the same columns."""

    title: str
    rows: Callable[[], list[dict[str, Any]]]
    remark: str = ""
    counts: tuple[str, ...] = ()  # columns of counts, the same on every machine: fewer is better
    memory: tuple[str, ...] = ()  # columns of memory, the same on every machine of a kind


@dataclass(frozen=True)
class Counts:
    """Numbers that are counted once, and are the same on every machine: fewer is better."""

    title: str
    values: Callable[[], dict[str, Any]]


Item = Group | Findings | Counts


def is_peer(program: str) -> bool:
    """Whether a program is another library's."""
    return program.startswith(PEERS)
