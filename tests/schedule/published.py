"""Published online algorithms, to compare `online` with: each yields, for each step, the carries that are stored."""

from collections.abc import Iterator
from math import comb


def stumm_walther_1(slots: int) -> Iterator[tuple[int, ...]]:
    """Algorithm I of Stumm & Walther (2010), for up to C(c + 2, 2) - 2 steps with c slots.

    It has rounds, each one step shorter than the round before. The carry before the first step of a round is not
    stored. The carry before the second step replaces the latest carry that does not have its final place. Each other
    carry replaces the earliest of these.
    """
    stored = []
    for step in range(slots):
        stored.append(step)
        yield tuple(stored)
    step = slots
    for loose in range(slots - 1, 0, -1):  # stored carries that have not found their final place
        yield tuple(stored)
        for turn in range(loose):
            step += 1
            dropped = -1 if turn == 0 else slots - loose
            stored = [*stored[:dropped], *stored[dropped:][1:], step]
            yield tuple(stored)
        step += 1


def stumm_walther_2(slots: int) -> Iterator[tuple[int, ...]]:
    """Algorithm II of Stumm & Walther (2010), for C(c + 2, 2) - 1 up to C(c + 3, 3) - 3 steps, following Algorithm I.

    A carry is stored three steps after the last one, or where it has its final place. It replaces the latest carry
    whose neighbours are then no further apart than in the end.
    """
    *_, stored = stumm_walther_1(slots)
    gaps = [comb(free + 2, 2) for free in range(slots, 1, -1)]
    final = [sum(gaps[:i]) for i in range(slots)]
    first = comb(slots + 2, 2) - 2
    for step in range(first, comb(slots + 3, 3) - 3):
        last = stored[-1]
        if step == (last + 1 if last + 1 in final else last + 3):
            after = (*stored, step)
            loose = (i for i in range(slots - 1, 0, -1) if after[i] not in final)
            dropped = next((i for i in loose if after[i + 1] - after[i - 1] <= gaps[i - 1]), slots - 1)
            stored = (*after[:dropped], *after[dropped + 1 :])
        yield stored


def wang_moin_iaccarino(slots: int) -> Iterator[tuple[int, ...]]:
    """The algorithm of Wang, Moin & Iaccarino (2009), for any number of steps, with as few repetitions as possible.

    Each stored carry has a level. A carry may be dropped if a later carry has a higher level. If there is none, the
    last carry is dropped, and the new carry gets its level plus one. The first carry is never dropped.
    """
    stored: list[tuple[int, int]] = []  # steps and levels, in order
    step = 0
    while True:
        level = 0
        if len(stored) == slots > 1:
            higher = (i for i in range(slots - 1, 0, -1) if any(later[1] > stored[i][1] for later in stored[i + 1 :]))
            dropped = next(higher, None)
            if dropped is None:
                dropped, level = slots - 1, stored[-1][1] + 1
            del stored[dropped]
        if len(stored) < slots:
            stored.append((step, level))
        yield tuple(s for s, _ in stored)
        step += 1
