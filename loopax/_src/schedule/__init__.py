"""Which steps of a loop to keep and which to replay: integer mathematics, apart from differentiation.

May import: nothing of loopax.
"""

from loopax._src.schedule.binomial import (
    Action,
    advance,
    binomial,
    evaluations,
    evaluations_from,
    forward,
    replay,
    starts,
)
from loopax._src.schedule.mixed import Optimum, Prices, Sizes, mixed, mixed_evaluations, mixed_evaluations_from
from loopax._src.schedule.online import (
    Online,
    online,
    online_stored,
    start,
    store,
    stumm_walther_1,
    stumm_walther_2,
    wang_moin_iaccarino,
)
from loopax._src.schedule.saving import (
    Blocks,
    LastSteps,
    Slots,
    block_size,
    last_steps,
    saving_for,
    shortest_block,
    two_level,
)

__all__ = [
    "Action",
    "Blocks",
    "LastSteps",
    "Online",
    "Optimum",
    "Prices",
    "Sizes",
    "Slots",
    "advance",
    "binomial",
    "block_size",
    "evaluations",
    "evaluations_from",
    "forward",
    "last_steps",
    "mixed",
    "mixed_evaluations",
    "mixed_evaluations_from",
    "online",
    "online_stored",
    "replay",
    "saving_for",
    "shortest_block",
    "start",
    "starts",
    "store",
    "stumm_walther_1",
    "stumm_walther_2",
    "two_level",
    "wang_moin_iaccarino",
]
