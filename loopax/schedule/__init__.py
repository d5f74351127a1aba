"""Which steps of a loop to keep and which to replay: integer mathematics, apart from differentiation."""

from loopax.schedule.blocks import block_size, two_level

__all__ = ["block_size", "two_level"]
