"""What is drawn of loops, and when; of several runs, and of loops that do not end. The clock is our own."""

import io
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import progress as public
from loopax._src.display import render
from loopax._src.display.manager import Displays, next_stride
from loopax._src.display.render import Facts, clock


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
    monkeypatch.setattr(render, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))


def begin(displays, key="loop", style="text", **options):
    options = {"total": 1000, "parts": 1, "lanes": 0, "size": 0, **options}
    return displays.begin(key, key, 0.1, style, **options)


@pytest.fixture
def clock_of(monkeypatch):
    """Displays whose time only passes when a test says so."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(Displays, "_watch", lambda self: None)
    return clock, Displays(lambda: clock.now)


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
    drawn = terminal.getvalue().split(render._CLEAR)
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
        ("auto", True, True, render.Bar),
        ("auto", False, True, render.Text),
        ("auto", True, False, render.Text),
        ("text", True, True, render.Text),
        ("tqdm", True, False, render.Bar),
    ):
        write_to(monkeypatch, Terminal() if live else io.StringIO())
        monkeypatch.setattr(render, "has_tqdm", lambda tqdm=tqdm: tqdm)
        drawing = render.drawing(style, 0)
        assert (type(drawing), drawing.stays) == (kind, not live)
    monkeypatch.setattr(render, "has_tqdm", lambda: True)
    shell = type("ZMQInteractiveShell", (), {})
    notebook = type("Module", (), {"get_ipython": staticmethod(shell)})
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]
    write_to(monkeypatch, io.StringIO())
    assert type(render.drawing("auto", 0)) is render.Bar


def test_runs_on_several_devices_share_a_display(clock_of, log):
    """The one that is furthest behind is shown, and one line at the end."""
    time, displays = clock_of
    numbers = [begin(displays) for _ in range(3)]
    time.now = 0.1
    for time.now in (0.9, 1.05):
        for number, steps in zip(numbers, (50, 30, 70), strict=True):
            displays.report(number, steps, -1)
    time.now = 1.1
    displays.report(numbers[0], 500, -1)
    assert log.getvalue().startswith("loop: 30/1000")
    for number in numbers:
        displays.end(number, 1000)
    assert len(log.getvalue().splitlines()) == 2


def test_stages_add_up(clock_of, log):
    time, displays = clock_of
    for steps, active in ((30, 2), (12, 1)):
        number = begin(displays, total=-1, parts=2)
        time.now += 1.1
        displays.report(number, steps, active)
        displays.end(number, steps)
    assert log.getvalue().splitlines() == [
        "loop: 30 steps, 27.3 steps/s, 2 lanes active",
        "loop: 42 steps, 19.1 steps/s, 1 lane active",
        "loop: 42 steps in 0:00:02, 19.1 steps/s",
    ]


def test_groups_of_lanes_add_up(clock_of, log):
    time, displays = clock_of
    for _ in range(3):
        number = begin(displays, parts=3, lanes=12, size=4)
        time.now += 2.0
        displays.report(number, 50, 3)
        displays.end(number, 100)
    lines = log.getvalue().splitlines()
    assert [re.findall(r"(\d+) lanes", line) for line in lines] == [["11"], ["7"], ["3"], []]
    assert lines[-1].startswith("loop: 300 steps")


def test_a_loop_that_is_gone_is_closed_and_comes_back(clock_of, log):
    time, displays = clock_of
    number = begin(displays)
    time.now = 0.05
    displays.report(number, 1, -1)
    displays.look()
    assert log.getvalue() == ""
    time.now = 100.0
    displays.look()
    assert log.getvalue() == "loop: last seen after 1/1000 steps (0%), in 0:01:40\n"
    displays.report(number, 500, -1)
    displays.end(number, 1000)
    assert log.getvalue().splitlines()[-1].startswith("loop: 1000 steps")


def test_a_run_that_died_does_not_hide_the_next(clock_of, log):
    time, displays = clock_of
    dead = begin(displays)
    time.now = 0.1
    displays.report(dead, 10, -1)
    time.now = 5.0
    number = begin(displays)
    time.now = 6.1
    displays.report(number, 700, -1)
    displays.end(number, 1000)
    said = ["last seen after 10/1000 steps (1%)", "700/1000 steps (70%)", "1000 steps in 0:00:01"]
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == [f"loop: {words}" for words in said]


def failing(at):
    def check(i):
        if i == at:
            raise ValueError("deliberately")
        return np.float32(i)

    step = lambda i, x: x + jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), i)
    return lambda: lx.fori_loop(0, 50, step, jnp.float32(0), progress=lx.Progress("failing"))


def test_a_loop_that_fails_closes_its_display(log):
    with pytest.raises(Exception, match="deliberately"):
        failing(20)()
    (line,) = [line for line in log.getvalue().splitlines() if line.startswith("failing")]
    assert line.startswith("failing: last seen after ")
    assert not public.DISPLAYS._open
    with pytest.raises(Exception, match="deliberately"):
        jax.block_until_ready(jax.jit(failing(20))())
    jax.block_until_ready(jax.jit(failing(-1))())
    public.DISPLAYS.close_all()
    assert log.getvalue().splitlines()[-1].startswith("failing: ")
    assert not public.DISPLAYS._open


def test_what_goes_wrong_in_a_display_does_not_stop_the_loop(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("broken pipe")

    write_to(monkeypatch, Broken())
    progress = lx.Progress("broken")
    run = jax.jit(lambda: lx.fori_loop(0, 5, lambda i, x: x + 1.0, 0.0, progress=progress))
    with pytest.warns(RuntimeWarning, match="broken pipe"):
        assert run() == 5.0
    assert run() == 5.0  # in silence


def test_other_processes_show_nothing(monkeypatch, log):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert lx.fori_loop(0, 5, lambda i, x: x + 1.0, 0.0, progress=True) == 5.0
    assert log.getvalue() == ""


INTERRUPTED = """
import os, signal, threading, time
import jax.numpy as jnp
import loopax as lx
from loopax._src.progress import DISPLAYS

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, and ignore it

def interrupt():
    while not DISPLAYS._open:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    lx.while_loop(lambda x: x >= 0, lambda x: jnp.sin(x) ** 2, 1.0, max_steps=2**30, throw=False, progress=True)
except BaseException as error:
    print(type(error).__name__)
print("after")
"""


@pytest.mark.slow
def test_an_interrupt_closes_the_display():
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == ["KeyboardInterrupt", "after"]
    assert "while_loop: last seen after" in found.stderr
