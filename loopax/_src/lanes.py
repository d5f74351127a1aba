"""Lanes: how a batch of loops under `jax.vmap` runs, when its lanes take different numbers of steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import jax

from loopax._src.core.ir.lane_stages import Choice, HowLanesRun, OneByOne, Stages
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import Why, positive_int, refuse_arrays, refuse_tracers

# Lanes that keep a device busy: those of a CPU are measured (docs/benchmark.md), the other is a guess. A group walks
# forward and back; a stage walks forward only, and is worth it with fewer lanes.
CPU_LANES, CPU_STAGE, OTHER_LANES = 32, 4, 4096
_STAGES = Why("the sizes of the batches in the program", "choose one for all calls: results do not depend on it")
_LANES = Why("how the program runs a batch", "choose one for all calls: results do not depend on it")


class Lanes(ABC):
    """How a batch of loops runs. Choose one of its subclasses."""

    @property
    @abstractmethod
    def stages(self) -> HowLanesRun:
        """The smaller batches in which the lanes that are left go on; None: all lanes go on together."""

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether a loop in the body of this one is made part of it."""


@dataclass(frozen=True)
class Lockstep(Lanes):
    """The default: all lanes step together until the slowest is done.

    Lanes that have finished keep their carry, and nothing else comes from them: no NaN, no error, no effect, and no
    iteration of a loop in the body.
    Body evaluations of a batch: lanes times the steps of the slowest.
    """

    @property
    def stages(self) -> None:
        """See `Lanes.stages`."""

    @property
    def is_free(self) -> bool:
        """See `Lanes.is_free`."""
        return False


@dataclass(frozen=True)
class Compact(Lanes):
    """Finished lanes leave the batch.

    Where the numbers of steps are known at the start (`fori_loop`, `scan` without `stop`), lanes are sorted by them
    and run in groups, one after another: the eighth with the most steps in groups of `min_lanes`, the others in
    groups of an eighth of the lanes, at most about four times `min_lanes`. Where they are not (`while_loop`, `scan`
    with `stop`), all lanes start together; when no more than half of them are left, these are gathered into a smaller
    batch, which goes on, and so forth down to `min_lanes`. Results are those of `Lockstep()`, in the same
    order. Reverse mode runs in groups in any case; after stages, which store nothing, it walks forward once more.

    Groups take about 3 times as long to compile as lockstep does; stages of 1024 lanes 6 times, with a gradient 7. A
    batch in which all lanes take the same steps gains nothing, and a loop that is not batched is as it is without.

    A second `jax.vmap` under which lanes take different numbers of steps joins the same batch, unless what only one of
    both maps (weights, say) would have to be repeated for so many lanes that the operands of the loop take more than
    twice the memory.

    Parameters
    ----------
    shrink
        The size of a stage over that of the next, a number from 2 on. None is 2 while many lanes are left, and more for
        the last lanes: 1024, 512, 256, 95, 32, 8. For a body of a few operations on a few numbers it is 3, down to 32
        lanes. 2 compiles most stages, and is a few per cent faster than None.
    min_lanes
        No group or stage has fewer lanes (a batch that is smaller itself apart), from 1 on. As many as keep the
        device busy: None is 4 for stages and 32 for groups on a CPU, and 4096 elsewhere (not measured).

    Raises
    ------
    TypeError
        `shrink` is not a number, `min_lanes` is not an int, or one of them is traced.
    ValueError
        `shrink` is less than 2, or `min_lanes` less than 1.
    NotImplementedError
        In a loop: the body communicates over the mapped axis (`jax.lax.psum`), and lanes stop at different steps.

    """

    shrink: float | None = None
    min_lanes: int | None = None

    def __post_init__(self) -> None:
        """Refuse stages that do not get smaller."""
        if self.shrink is not None:
            _check_shrink(self.shrink)
        if self.min_lanes is not None:
            lanes = positive_int("Compact(min_lanes=...)", self.min_lanes, "lanes", _STAGES)
            object.__setattr__(self, "min_lanes", lanes)

    def __repr__(self) -> str:
        """As a user writes it."""
        given = {"shrink": self.shrink, "min_lanes": self.min_lanes}
        return f"Compact({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"

    @property
    def stages(self) -> Stages:
        """See `Lanes.stages`."""
        if self.min_lanes is not None:
            return Stages(self.shrink, self.min_lanes)
        if jax.default_backend() == "cpu":
            return Stages(self.shrink, CPU_STAGE, CPU_LANES)
        return Stages(self.shrink, OTHER_LANES)

    @property
    def is_free(self) -> bool:
        """See `Lanes.is_free`."""
        return False


@dataclass(frozen=True)
class Free(Lanes):
    """For a loop whose body holds one inner loop: lanes do not wait for each other between outer steps.

    In lockstep a batch of nested loops waits at every outer step for the lane with the most inner steps. Here a lane
    that has finished its inner loop goes on with its next outer step while others are still inside theirs.
    Batched iterations: at most the largest sum of a lane's inner steps, and one for each outer step without any.

    What stands before and after the inner loop runs whenever any lane needs it, for all lanes: in nearly every
    iteration of a large batch, where lockstep runs it once per outer step. So free lanes are slower where that part
    costs more than the inner steps that they save; `lane_report` says how often it runs. They are slower as well
    for a loop that is not batched.

    The body must hold exactly one call of a loop of loopax, which is not batched itself, outside of `cond`, `scan`,
    `jax.checkpoint` and other loops. Rows of `xs` of both loops are gathered for each lane, and rows of `ys` written
    into the lanes' own arrays: both cost time that grows with their number of rows.

    Raises
    ------
    ValueError
        In a loop: the body holds no inner loop, or several; or the kind stores every step and one of the loops has no
        static bound.

    """

    @property
    def stages(self) -> None:
        """See `Lanes.stages`."""

    @property
    def is_free(self) -> bool:
        """See `Lanes.is_free`."""
        return True


@dataclass(frozen=True)
class Sequential(Lanes):
    """One lane after another, each alone.

    Each lane is bit by bit what it is without `jax.vmap`, also where all lanes take the same steps. Body evaluations:
    those of all lanes together. On a CPU this beats a batch where a step is costly and the numbers of steps
    differ much; where a step is cheap, a batch shares what XLA spends on each operation. A gradient that is taken
    outside of `jax.vmap` stores for every lane what its kind says, and sums cotangents of shared weights in place.

    Raises
    ------
    NotImplementedError
        In a loop: the body communicates over the mapped axis (`jax.lax.psum`).

    """

    @property
    def stages(self) -> OneByOne:
        """See `Lanes.stages`."""
        return OneByOne()

    @property
    def is_free(self) -> bool:
        """See `Lanes.is_free`."""
        return False


@dataclass(frozen=True)
class AutoLanes(Lanes):
    """Lockstep, compact or sequential, whichever is expected to be fastest.

    The choice is made where lanes turn out to take different numbers of steps, from the number of lanes and from what a
    step costs for one lane and for a batch, which is estimated from its operations. The numbers of steps are not known
    there: they are taken to differ as exponential ones do. On a GPU it is lockstep or compact. Results are the same, to
    rounding.

    Raises
    ------
    NotImplementedError
        In a loop: the body communicates over the mapped axis (`jax.lax.psum`), and lanes stop at different steps.

    """

    @property
    def stages(self) -> Choice:
        """See `Lanes.stages`."""
        return Choice(Compact().stages, jax.default_backend() == "cpu")

    @property
    def is_free(self) -> bool:
        """See `Lanes.is_free`."""
        return False


def _check_shrink(shrink: object) -> None:
    refuse_arrays("Compact(shrink=...)", shrink, "a Python number", _STAGES)
    if isinstance(shrink, bool) or not isinstance(shrink, Real):
        raise TypeError(
            f"Compact(shrink=...): got {describe(shrink)}, expected a number from 2 on, the size of a stage over that "
            "of the next."
        )
    if not float(shrink) >= 2:
        raise ValueError(
            f"Compact(shrink=...): got {shrink}, expected at least 2, the size of a stage over that of the next. "
            "Smaller steps cost more gathering and compiling than they save."
        )


LanesLike = Lanes | Literal["lockstep", "compact", "sequential", "auto", "free"]
_BY_NAME: dict[str, type[Lanes]] = {
    "lockstep": Lockstep,
    "compact": Compact,
    "sequential": Sequential,
    "auto": AutoLanes,
    "free": Free,
}


def to_lanes(lanes: LanesLike) -> Lanes:
    """The object behind the `lanes` argument."""
    refuse_tracers("lanes=...", lanes, "a way to run lanes or the name of one", _LANES)
    if isinstance(lanes, Lanes):
        return lanes
    if isinstance(lanes, str) and lanes in _BY_NAME:
        return _BY_NAME[lanes]()
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in _BY_NAME.items())
    raise ValueError(f"lanes={lanes!r} is not a way to run lanes. Choose one of {choices}.")
