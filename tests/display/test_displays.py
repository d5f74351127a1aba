"""What is drawn of loops, and when; a clock of our own, so that nothing depends on the machine."""

import io
import re
import sys

import pytest

import loopax as lx
from loopax._src.display import render as _drawing
from loopax._src.display.manager import next_stride
from loopax._src.display.render import Facts, clock
from tests.display.terminals import Terminal, begin, write_to

# ---- how often


def test_strides_grow_to_the_interval():
    """A step of a microsecond: reports every tenth of a second in the end, and few before."""
    stride, reports, steps = 1, 0, 0
    while steps < 10_000_000:
        steps += stride
        stride = next_stride(stride, stride * 1e-6, 0.1, stride)
        reports += 1
    assert stride == pytest.approx(100_000, abs=1)
    assert reports <= 100 + 7
    for seconds, expected in ((10.0, 1), (0.0, 8 * 50), (1e-9, 8 * 50), (5.0, 1), (0.05, 100)):
        assert next_stride(50, seconds, 0.1, 50) == expected


# ---- what is written


FACTS = {
    Facts("a", 0, 10, 0.0, None): "a: 0/10 steps (0%), no step yet",
    Facts("a", 5, 10, 2.5, None): "a: 5/10 steps (50%), 2 steps/s, 0:00:02 left",
    Facts("a", 5, None, 10.0, 3): "a: 5 steps, 2 s/step, 3 lanes active",
    Facts("a", 0, 0, 1.0, None): "a: 0/0 steps, no step yet",
}


def test_words():
    assert [facts.running for facts in FACTS] == list(FACTS.values())
    assert [clock(s) for s in (0, 59.6, 3600, 90000)] == ["0:00:00", "0:01:00", "1:00:00", "25:00:00"]


def test_a_log_has_a_line_now_and_then(clock_of, log):
    """A loop of an hour, that reports ten times a second."""
    time, displays = clock_of
    number = begin(displays, total=36_000)
    for step in range(1, 36_001):
        time.now = step / 10
        displays.report(number, step, -1)
    displays.end(number, 36_000)
    lines = log.getvalue().splitlines()
    assert lines[0] == "loop: 10/36000 steps (0%), 10 steps/s, 0:59:59 left"
    assert lines[-1] == "loop: 36000 steps in 1:00:00, 10 steps/s"
    assert 20 < len(lines) < 100


def test_a_short_loop_in_a_log_is_one_line(log):
    """Its label is the name of the loop unless another is given; without steps there is no rate."""
    lx.rollout(lambda x: (x, x), 1.0, 10, progress=True)
    lx.fori_loop(0, 0, lambda i, x: x + 1.0, 0.0, progress=lx.Progress("none"))
    first, second = log.getvalue().splitlines()
    assert re.fullmatch(r"rollout: 10 steps in 0:00:00, .* steps/s", first)
    assert second == "none: 0 steps in 0:00:00"


@pytest.mark.parametrize("stream", ["log", "terminal"])
@pytest.mark.parametrize("style", ["text", "tqdm"])
def test_a_loop_that_runs_again_and_again_leaves_a_line_now_and_then(clock_of, request, stream, style):
    """As the inner loop of one that shows nothing: ten seconds, a line about every second."""
    stream = request.getfixturevalue(stream)
    time, displays = clock_of
    for _ in range(1000):
        number = begin(displays, style=style)
        time.now += 0.01
        displays.end(number, 1000)
    assert 9 <= stream.getvalue().count("\n") <= 11


def test_a_terminal_has_one_line(clock_of, terminal):
    time, displays = clock_of
    outer = begin(displays, "outer", total=3)
    for step in range(1, 4):
        for length in (0.05, 0.5):  # the first of the inner loops is too short to be shown
            inner = begin(displays, "inner", total=100)
            time.now += length
            displays.report(inner, 99, -1)
            displays.end(inner, 100)
        displays.report(outer, step, -1)
    displays.end(outer, 3)
    assert terminal.shown == ["outer: 3 steps in 0:00:02, 1.82 steps/s"]
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert sum("inner" in text for text in drawn) == 3
    assert " | inner: 99/100" in terminal.getvalue()


@pytest.mark.parametrize("stream", ["log", "terminal"])
def test_tqdm(clock_of, request, stream):
    stream = request.getfixturevalue(stream)
    time, displays = clock_of
    outer, inner = begin(displays, "outer", "tqdm", total=20), begin(displays, "inner", "tqdm", total=-1)
    time.now = 1.5
    displays.report(inner, 7, 2)
    displays.report(outer, 10, -1)
    displays.end(inner, 9)
    time.now = 2.0
    displays.end(outer, 20)
    for words in ("outer:  50%", "outer: 100%", "20/20", "7 steps", "2 lanes active"):
        assert words in stream.getvalue()


def test_style(monkeypatch, log):
    for style, tqdm, live, kind in (
        ("auto", True, True, _drawing.Bar),
        ("auto", False, True, _drawing.TextLine),
        ("auto", True, False, _drawing.Log),
        ("text", True, True, _drawing.TextLine),
        ("tqdm", True, False, _drawing.Bar),
    ):
        write_to(monkeypatch, Terminal() if live else io.StringIO())
        monkeypatch.setattr(_drawing, "has_tqdm", lambda tqdm=tqdm: tqdm)
        assert type(_drawing.drawing(style, 0)) is kind
    monkeypatch.setattr(_drawing, "has_tqdm", lambda: True)
    shell = type("ZMQInteractiveShell", (), {})
    notebook = type("Module", (), {"get_ipython": staticmethod(shell)})
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]
    write_to(monkeypatch, io.StringIO())
    assert type(_drawing.drawing("auto", 0)) is _drawing.Bar
