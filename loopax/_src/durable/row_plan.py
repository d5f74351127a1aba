"""Which rows of outputs belong to which steps of a scan."""

from typing import NamedTuple


class RowPlan(NamedTuple):
    """Where the outputs of a scan stand."""

    capacity: int
    first: int  # the row of the first step
    reverse: bool

    def lowest(self, steps: int, some: int) -> int:
        """The lowest row of some steps that come after so many."""
        return self.first - steps - some + 1 if self.reverse else self.first + steps

    def taken(self, steps: int) -> tuple[int, int]:
        """The rows of so many first steps, from and to."""
        low = self.lowest(0, steps)
        return low, low + steps
