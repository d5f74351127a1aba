"""Streams, a clock and displays for the tests of displays."""

import io
import sys
from types import SimpleNamespace

from loopax._src.display import render as _drawing


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def shown(self):
        """What stands in the terminal in the end, without bars."""
        lines = [line.split("\r")[-1].removeprefix("\x1b[K") for line in self.getvalue().split("\n")]
        return [line for line in lines if line]


def write_to(monkeypatch, stream):
    """Instead of `sys.stderr`, which pytest sets anew for each phase of a test."""
    monkeypatch.setattr(_drawing, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def begin(displays, key="loop", style="text", **options):
    options = {"total": 1000, "parts": 1, "lanes": 0, "size": 0, **options}
    return displays.begin(key, key, 0.1, style, **options)
