"""Which carries of a loop to store and which steps to recompute: integer mathematics, apart from differentiation."""

from loopax._src.core.ir.annotations import Stages
from loopax._src.insight.schedule_picture import SchedulePicture, picture
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
    "SchedulePicture",
    "Sizes",
    "Slots",
    "Stages",
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
    "picture",
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
