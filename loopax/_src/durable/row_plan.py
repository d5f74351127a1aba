"""Which rows of outputs belong to which steps of a scan."""

from typing import NamedTuple


class RowPlan(NamedTuple):
    """Where the outputs of a scan stand."""

    capacity: int
    first: int  # the row of the first step
    reverse: bool

    @property
    def direction(self) -> int:
        """From the row of a step to that of the next."""
        return -1 if self.reverse else 1

    def of_step(self, steps: int) -> int:
        """The row of the step that comes after so many."""
        return self.first + self.direction * steps

    def lowest(self, steps: int, some: int) -> int:
        """The lowest row of some steps that come after so many."""
        return self.of_step(steps + some - 1 if self.reverse else steps)

    def taken(self, steps: int) -> tuple[int, int]:
        """The rows of so many first steps, from and to."""
        low = self.lowest(0, steps)
        return low, low + steps
