"""Which steps of a loop to keep and which to replay: integer mathematics, apart from differentiation."""

from loopax.schedule.actions import Action
from loopax.schedule.binomial import advance, binomial, evaluations, evaluations_from, forward, replay, starts
from loopax.schedule.blocks import block_size, shortest_block, two_level
from loopax.schedule.online import Online, online, start, store
from loopax.schedule.published import stumm_walther_1, stumm_walther_2, wang_moin_iaccarino
from loopax.schedule.stages import Stages

__all__ = [
    "Action",
    "Online",
    "Stages",
    "advance",
    "binomial",
    "block_size",
    "evaluations",
    "evaluations_from",
    "forward",
    "online",
    "replay",
    "shortest_block",
    "start",
    "starts",
    "store",
    "stumm_walther_1",
    "stumm_walther_2",
    "two_level",
    "wang_moin_iaccarino",
]
