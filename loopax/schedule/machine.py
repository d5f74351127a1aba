"""An imaginary machine that executes a schedule and raises an error for impossible actions."""

from loopax._src.schedule.machine import execute

__all__ = ["execute"]
