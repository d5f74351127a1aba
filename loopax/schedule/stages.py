"""Which sizes a batch of lanes has as they finish."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """A batch is gathered into a smaller one whenever few enough lanes are left."""

    shrink: float  # one size over the next
    min_lanes: int  # no stage is smaller

    def sizes(self, lanes: int) -> list[int]:
        """The sizes of the stages of a batch, from the whole of it down."""
        sizes = [lanes]
        while (smaller := -int(-sizes[-1] // self.shrink)) >= self.min_lanes and smaller < sizes[-1]:
            sizes.append(smaller)
        return sizes
