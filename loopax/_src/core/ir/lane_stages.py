"""How a batch runs that is not in lockstep: how many stages or groups of lanes it has, and how large they are."""

from dataclasses import dataclass

# Measured on a CPU (docs/benchmark.md): an eighth of the lanes is in the smallest groups. The others are in groups of
# an eighth of the lanes, and at most so many times as large.
PART = 8
LARGER = 4


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

    def groups(self, lanes: int) -> list[tuple[int, int]]:
        """How many groups, and of how many lanes, a batch is cut into whose lanes are sorted by their steps.

        The lanes with the most steps differ most, so these are in smaller groups than the others. Together groups
        may have a few places more than there are lanes.
        """
        if lanes < 2 * self.min_lanes:
            return [(1, lanes)]
        few = max(lanes // PART // self.min_lanes, 1)
        others = lanes - few * self.min_lanes
        size = min(max(lanes // PART, self.min_lanes), LARGER * self.min_lanes)
        number = max(others // size, 1)
        return [(few, self.min_lanes), (number, -(-others // number))]


@dataclass(frozen=True)
class OneByOne:
    """One lane runs after another, each alone."""
