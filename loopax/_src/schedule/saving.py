"""Which schedule a number of checkpoints asks for: what the loops do, and the pictures draw."""

from dataclasses import dataclass, replace

from loopax._src.schedule.blocks import block_size, shortest_block

# Slots of a loop without a bound. Forward and gradient evaluate the body at most three times per step up to
# 2187 steps, four times up to 35 594 (docs/kinds.md).
DEFAULT_SLOTS = 64

# Not NamedTuples: those compare as tuples, and `Blocks(3)` would be equal to `(3,)` as a key of caches.


@dataclass(frozen=True)
class Blocks:
    """A loop saves the carry at the start of every block of so many steps."""

    size: int

    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""
        return -(-(bound or 0) // self.size)

    def num_checkpoint_rows(self) -> int:
        """Rows to remember: the first, from which the starts of all blocks follow."""
        return 1


@dataclass(frozen=True)
class Slots:
    """A loop saves its carry in so many slots: the binomial schedule, or the online one for an unknown length."""

    count: int
    length_known: bool

    def rows(self, bound: int | None) -> int:
        """The most carries that are saved."""
        del bound
        return self.count

    def num_checkpoint_rows(self) -> int:
        """Rows to remember: of each slot."""
        return self.count


Saving = Blocks | Slots


def saving_for(
    checkpoints: int | None, bound: int | None, carry_bytes: int, *, length_known: bool, always_to_bound: bool
) -> Saving | None:
    """How a loop saves so many carries, or about 2 sqrt(bound); None: the carry before every step.

    Two levels of blocks need no schedule while the loop runs. With at least about 2 sqrt(bound) checkpoints, and
    as many steps as the bound, they need hardly more evaluations than the binomial schedule (at most 2 %
    for a bound of 1000), so they are taken there.
    """
    if bound is None:
        return Slots(checkpoints or DEFAULT_SLOTS, length_known)
    if checkpoints is None:
        return _blocks(min(block_size(bound, carry_bytes), bound))
    if checkpoints >= bound:
        return None
    size = shortest_block(bound, checkpoints) if always_to_bound else None
    return Blocks(size) if size else Slots(checkpoints, length_known)


def saved_carries(bound: int, carry_bytes: int) -> int:
    """How many carries are stored for a bound where no number of checkpoints is given."""
    size = block_size(bound, carry_bytes)
    return bound if size == 1 else -(-bound // size) + size


def _blocks(size: int) -> Saving | None:
    return Blocks(size) if size > 1 else None


def length_known(saving: Saving) -> Saving:
    """How to save in a loop over the rows that another loop has walked: their number is known."""
    return replace(saving, length_known=True) if isinstance(saving, Slots) else saving
