"""Which steps of a loop to keep and which to replay: integer mathematics, apart from differentiation.

May import: nothing of loopax.
"""

from loopax._src.schedule.binomial import Division, divisions
from loopax._src.schedule.online import Online, due_in, start, start_in_one_array, store, store_if_due, unused_in

__all__ = [
    "Division",
    "Online",
    "divisions",
    "due_in",
    "start",
    "start_in_one_array",
    "store",
    "store_if_due",
    "unused_in",
]
