"""Which steps of a loop to keep and which to replay: integer mathematics, apart from differentiation."""

from loopax.schedule.actions import Action
from loopax.schedule.binomial import advance, binomial, evaluations, evaluations_from, forward, replay, starts
from loopax.schedule.blocks import block_size, shortest_block, two_level
from loopax.schedule.online import Online, online, online_stored, start, store
from loopax.schedule.picture import SchedulePicture, picture
from loopax.schedule.published import stumm_walther_1, stumm_walther_2, wang_moin_iaccarino
from loopax.schedule.saving import Blocks, Slots, saving_for
from loopax.schedule.stages import Stages

__all__ = [
    "Action",
    "Blocks",
    "Online",
    "SchedulePicture",
    "Slots",
    "Stages",
    "advance",
    "binomial",
    "block_size",
    "evaluations",
    "evaluations_from",
    "forward",
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
