"""What the lanes of a stream did."""

from typing import NamedTuple


class StreamReport(NamedTuple):
    """What the lanes of a stream did.

    Attributes
    ----------
    items
        The number of finished items.
    lanes
        The number of lanes.
    iterations
        The number of batched steps. In each, all lanes are computed.
    useful
        The number of steps of single lanes that held an item.
    iterations_fed, useful_fed
        `iterations` and `useful`, counted until the source of items ended.
    seconds
        The seconds since the first item.

    """

    items: int
    lanes: int
    iterations: int
    useful: int
    iterations_fed: int
    useful_fed: int
    seconds: float

    @property
    def share(self) -> float:
        """The useful share: `useful / (lanes * iterations)`; 1 if there are no iterations."""
        return self.useful / (self.lanes * self.iterations) if self.iterations else 1.0

    @property
    def share_fed(self) -> float:
        """The useful share until the source of items ended."""
        return self.useful_fed / (self.lanes * self.iterations_fed) if self.iterations_fed else 1.0

    def __str__(self) -> str:
        """Return the report as two lines of text."""
        seconds = self.seconds or float("inf")
        return (
            f"{self.items} items through {self.lanes} lanes: {self.items / seconds:.4g} items/s, "
            f"{self.useful / seconds:.4g} steps/s\n"
            f"{self.iterations} iterations, {self.useful} steps of lanes: {self.share:.0%} useful, "
            f"{self.share_fed:.0%} until the source ended"
        )
