"""Which carries of a loop to store and which steps to recompute: integer mathematics, apart from differentiation."""

from loopax._src.insight.schedule_picture import SchedulePicture, picture
from loopax._src.schedule.binomial import Action, binomial, replay
from loopax._src.schedule.online import online

__all__ = ["Action", "SchedulePicture", "binomial", "online", "picture", "replay"]
