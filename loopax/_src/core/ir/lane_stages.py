"""How a batch runs that is not in lockstep: how many stages or groups of lanes it has, and how large they are."""

from dataclasses import dataclass

# Measured on a CPU (docs/benchmark.md): an eighth of the lanes is in the smallest groups. The others are in groups of
# an eighth of the lanes, and at most so many times as large.
PART = 8
LARGER = 4

# Stages by default: half of the lanes, then half of these, and so forth. Most steps are taken by many lanes; few lanes
# take the last steps, and a stage for them saves less than it takes to compile.
SHRINKS = (2.0, 2.0, 2.7)
LAST_SHRINK, FEW_LANES = 4.0, 64
# Of a step that costs little, a larger batch costs little more.
SHRINK_IF_CHEAP, FEWEST_IF_CHEAP = 3.0, 32


@dataclass(frozen=True)
class Stages:
    """The sizes of the smaller batches that `Compact` makes.

    Parameters
    ----------
    shrink
        The size of a stage divided by the size of the next stage. None: as measured on a CPU.
    min_lanes
        The fewest lanes in a stage.
    group_lanes
        The fewest lanes in a group, for numbers of steps that are known. None: `min_lanes`.

    """

    shrink: float | None  # one size over the next; None: as measured
    min_lanes: int  # no stage is smaller
    group_lanes: int | None = None  # where numbers of steps are known: no group is smaller; None: as no stage is

    @property
    def min_group(self) -> int:
        """The fewest lanes in a group."""
        return self.min_lanes if self.group_lanes is None else self.group_lanes

    def sizes(self, lanes: int, is_cheap: bool = False) -> list[int]:
        """Return the sizes of the stages, from the whole batch down. A cheap step has fewer stages."""
        by_default = is_cheap and self.shrink is None
        fewest = max(self.min_lanes, FEWEST_IF_CHEAP) if by_default else self.min_lanes
        sizes = [lanes]
        while (smaller := -int(-sizes[-1] // self._shrink(sizes, is_cheap))) >= fewest and smaller < sizes[-1]:
            sizes.append(smaller)
        return sizes

    def _shrink(self, sizes: list[int], is_cheap: bool) -> float:
        """The last of these sizes over the next."""
        if self.shrink is not None:
            return self.shrink
        if is_cheap:
            return SHRINK_IF_CHEAP
        if sizes[-1] <= FEW_LANES:
            return LAST_SHRINK
        return SHRINKS[len(sizes) - 1] if len(sizes) <= len(SHRINKS) else SHRINK_IF_CHEAP

    def groups(self, lanes: int) -> list[tuple[int, int]]:
        """Return the groups of a batch whose lanes are sorted by their numbers of steps.

        Each pair is a number of groups, and the number of lanes in each of them.

        The lanes with the most steps differ most, so they are in smaller groups. All groups together may have a few
        places more than there are lanes.
        """
        if lanes < 2 * self.min_group:
            return [(1, lanes)]
        few = max(lanes // PART // self.min_group, 1)
        others = lanes - few * self.min_group
        size = min(max(lanes // PART, self.min_group), LARGER * self.min_group)
        number = max(others // size, 1)
        return [(few, self.min_group), (number, -(-others // number))]


@dataclass(frozen=True)
class OneByOne:
    """One lane runs after another, each alone."""


@dataclass(frozen=True)
class Choice:
    """Lockstep, these stages, or one by one, whichever is expected to be fastest."""

    stages: Stages
    alone_is_fast: bool  # one lane keeps a core busy, as on a CPU


HowLanesRun = Stages | OneByOne | Choice | None  # None: in lockstep
