"""Lanes: how a batch of loops under `jax.vmap` runs, when its lanes take different numbers of steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from loopax._carry import describe
from loopax._static import positive_int
from loopax.schedule import Stages


class Lanes(ABC):
    """How a batch of loops runs. Choose one of its subclasses."""

    @property
    @abstractmethod
    def stages(self) -> Stages | None:
        """The smaller batches in which the lanes that are left go on; None: there are none."""


@dataclass(frozen=True)
class Lockstep(Lanes):
    """The default: all lanes step together until the slowest is done.

    Lanes that have finished keep their carry, and evaluate nothing outside the body's domain.
    Body evaluations of a batch: lanes times the steps of the slowest.
    """

    @property
    def stages(self) -> None:
        """See `Lanes.stages`."""


@dataclass(frozen=True)
class Compact(Lanes):
    """Finished lanes leave the batch.

    When no more than 1 / `shrink` of the lanes are left, they are gathered into a smaller batch, which goes on,
    and so forth down to `min_lanes`. Results are those of `Lockstep()`, in the same order; so are derivatives,
    whose loops run in the same stages. Where the number of steps is known at the start (`fori_loop`, `scan` with
    `length`), lanes are sorted by it once; else they are gathered at the end of every stage.

    Every stage is a program of its own, so compilation takes longer the more of them there are. A batch in which all
    take the same steps gains nothing, and a loop that is not batched is as it is without.

    A second `jax.vmap` joins the same batch, unless what only one of both maps (weights, say) would have to be
    repeated for so many lanes that the operands of the loop take more than twice the memory.

    Parameters
    ----------
    shrink
        The size of a stage over that of the next, a number from 2 on.
    min_lanes
        No stage has fewer lanes, from 1 on.

    Raises
    ------
    TypeError
        `shrink` is not a number, `min_lanes` is not an int, or one of them is traced.
    ValueError
        `shrink` is less than 2, or `min_lanes` less than 1.
    NotImplementedError
        In a loop: the body communicates over the mapped axis (`jax.lax.psum`), and lanes stop at different steps.

    """

    shrink: float = 2
    min_lanes: int = 32

    def __post_init__(self) -> None:
        """Refuse stages that do not get smaller."""
        _check_shrink(self.shrink)
        lanes = positive_int("Compact(min_lanes=...)", self.min_lanes, "lanes", "stages are decided")
        object.__setattr__(self, "min_lanes", lanes)

    @property
    def stages(self) -> Stages:
        """See `Lanes.stages`."""
        return Stages(self.shrink, self.min_lanes)


def _check_shrink(shrink: object) -> None:
    if isinstance(shrink, bool) or not isinstance(shrink, Real):
        raise TypeError(
            f"Compact(shrink=...): got {describe(shrink)}, expected a number from 2 on, the size of a stage over that "
            "of the next. It is static: stages are decided when the loop is compiled, not when it runs."
        )
    if not float(shrink) >= 2:
        raise ValueError(
            f"Compact(shrink=...): got {shrink}, expected at least 2, the size of a stage over that of the next. "
            "Smaller steps cost more gathering and compiling than they save."
        )


LanesLike = Lanes | Literal["lockstep", "compact"]
_BY_NAME: dict[str, type[Lanes]] = {"lockstep": Lockstep, "compact": Compact}


def to_lanes(lanes: LanesLike) -> Lanes:
    """The object behind the `lanes` argument."""
    if isinstance(lanes, Lanes):
        return lanes
    if isinstance(lanes, str) and lanes in _BY_NAME:
        return _BY_NAME[lanes]()
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in _BY_NAME.items())
    raise ValueError(f"lanes={lanes!r} is not a way to run lanes. Choose one of {choices}.")
