"""What the lanes of a stream did."""

from typing import NamedTuple


class StreamReport(NamedTuple):
    """What the lanes of a stream did.

    Attributes
    ----------
    items
        That are finished.
    lanes
        Of the stream.
    iterations, useful
        Batched steps, and the steps of lanes with an item in them.
    iterations_fed, useful_fed
        These two, counted until the source ended.
    seconds
        Since the first item.

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
        """Of the lane-steps that were computed, those of lanes with an item; 1 where there are none."""
        return self.useful / (self.lanes * self.iterations) if self.iterations else 1.0

    @property
    def share_fed(self) -> float:
        """The useful share until the source ended."""
        return self.useful_fed / (self.lanes * self.iterations_fed) if self.iterations_fed else 1.0

    def __str__(self) -> str:
        """In two lines."""
        seconds = self.seconds or float("inf")
        return (
            f"{self.items} items through {self.lanes} lanes: {self.items / seconds:.4g} items/s, "
            f"{self.useful / seconds:.4g} steps/s\n"
            f"{self.iterations} iterations, {self.useful} steps of lanes: {self.share:.0%} useful, "
            f"{self.share_fed:.0%} until the source ended"
        )
