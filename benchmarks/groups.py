"""What is compared with what, and the bounds on the ratios."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Case, Measurement

EQUINOX, EVERY_CARRY, LAX_SCAN = "Equinox checkpointed", "lax.scan of jax.checkpoint", "lax.scan"


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


def markdown_of(title: str, rows: list[dict[str, Any]], remark: str = "") -> str:
    """Rows as a table."""
    lines = [
        f"## {title}",
        *(["", remark] if remark else []),
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows),
    ]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return value if isinstance(value, str) else f"{value:.4g}"
