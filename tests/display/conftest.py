"""Displays under a clock of our own, and what they write to."""

import io

import pytest

from loopax._src.display.manager import Displays
from tests.display.terminals import Clock, Terminal, write_to


@pytest.fixture
def clock_of(monkeypatch):
    """Displays whose time only passes when a test says so."""
    found = Clock()
    monkeypatch.setattr(Displays, "_watch", lambda self: None)
    return found, Displays(found)


@pytest.fixture
def log(monkeypatch):
    stream = io.StringIO()
    write_to(monkeypatch, stream)
    return stream


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    write_to(monkeypatch, stream)
    return stream
