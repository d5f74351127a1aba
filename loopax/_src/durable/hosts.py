"""Decisions of several processes that run a loop together (`jax.distributed`); one process decides alone."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def agreed(signal: int, *numbers: int) -> list[int]:
    """What all processes go by: the signal that any of them has received, and what else the first one says."""
    if jax.process_count() == 1:
        return [signal, *numbers]
    from jax.experimental import multihost_utils

    everyone = multihost_utils.process_allgather(np.array([signal, *numbers], np.int32))
    return [int(everyone[:, 0].max()), *(int(number) for number in everyone[0, 1:])]


def all_agree(flag: bool) -> bool:
    """What the first process says."""
    return bool(agreed(0, int(flag))[1])


def on_first(action: Callable[[], Any]) -> None:
    """Do something in the first process while the others wait; an error there is one in all of them."""
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as found:  # noqa: BLE001, it is raised below
            error = found
    failed = all_agree(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("the first process of this run has stopped with an error; see what it says.")
