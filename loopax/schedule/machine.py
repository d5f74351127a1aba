"""An imaginary machine that carries out a schedule and refuses impossible ones."""

from loopax._src.schedule.machine import execute

__all__ = ["execute"]
