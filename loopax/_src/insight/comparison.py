"""What `compare` returns: a row for each kind, as a table and as a picture."""

from dataclasses import dataclass, replace
from typing import Any

from loopax._src.extras import optional
from loopax._src.insight.advice import aligned, in_bytes

_COLUMNS = ("kind", "forward", "gradient", "compile", "memory", "traces")


@dataclass(frozen=True)
class Measured:
    """The measurements for one kind, or for several kinds that lead to the same program.

    Attributes
    ----------
    name
        The name of the kind.
    forward_ms, gradient_ms
        The median times of the function and of its gradient, in milliseconds.
    compile_seconds
        The seconds to trace and compile the gradient.
    temporary_bytes
        The temporary memory of the gradient in bytes, as XLA reports it.
    traces
        How often the function was traced: once for each of the two programs.
    problem
        Why there is no gradient with this kind; empty if there is one.
    is_chosen
        Whether this row is the function as written.

    """

    name: str
    forward_ms: float = float("nan")
    gradient_ms: float = float("nan")
    compile_seconds: float = float("nan")
    temporary_bytes: int = 0
    traces: int = 0
    problem: str = ""
    is_chosen: bool = False

    def _shared_with(self, name: str) -> "Measured":
        """Return the row with one more name. A name like `Auto() takes Bounded()` contains `Bounded()` already."""
        first, *others = self.name.split(" = ")
        is_first = first == name or (first.endswith(f" takes {name}") and ", " not in first)
        return self if is_first or name in others else replace(self, name=f"{self.name} = {name}")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The kinds of loops of one function, measured.

    `print` shows a table, and `plot` draws time against memory.

    Attributes
    ----------
    name
        The name of the function.
    rows : tuple of Measured
        One row for each program; the first row is the function as written.

    """

    name: str
    rows: tuple[Measured, ...]

    def __str__(self) -> str:
        """Return the comparison as a table."""
        cells = [_COLUMNS, *map(_cells, self.rows)]
        lines = [f"{self.name}: its loops by kind (* as written); medians, memory of the gradient"]
        lines += aligned(cells, numbers=range(1, len(_COLUMNS)))
        lines += [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the text of `str`, for notebooks and the Python prompt."""
        return str(self)

    def plot(self, axes: Any = None) -> Any:
        """Draw the time of the gradient against its memory, and return the axes (needs matplotlib).

        Both scales are logarithmic. A ring marks the function as written.
        """
        if axes is None:
            pyplot = optional("matplotlib.pyplot", "matplotlib", "A picture of a comparison")
            axes = pyplot.subplots(layout="constrained")[1]
        rows = [row for row in self.rows if not row.problem]
        for row in rows:
            memory = max(row.temporary_bytes, 1) / 2**20
            axes.scatter(memory, row.gradient_ms, label=f"as written: {row.name}" if row.is_chosen else row.name)
            if row.is_chosen:
                axes.scatter(memory, row.gradient_ms, s=180, facecolors="none", edgecolors="black", zorder=3)
        axes.set(xscale="log", yscale="log", xlabel="temporary memory of the gradient, MiB", ylabel="gradient, ms")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(self.name)
        if rows:
            axes.legend(frameon=False)
        return axes


def _cells(row: Measured) -> tuple[str, ...]:
    mark = "* " if row.is_chosen else "  "
    if row.problem:
        return (mark + row.name, "none")
    times = f"{row.forward_ms:.3g} ms", f"{row.gradient_ms:.3g} ms", f"{row.compile_seconds:.2f} s"
    return (mark + row.name, *times, in_bytes(row.temporary_bytes), str(row.traces))
