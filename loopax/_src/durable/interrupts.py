"""Ctrl-C and SIGTERM between the chunks of a durable loop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The first signal is remembered; a second one does what it does without loopax."""

    def __init__(self) -> None:
        """Nothing has been received."""
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def _remember(self, number: int, _: Any) -> None:
        if self.received is None:
            self.received = number
            return
        self.restore()
        signal.raise_signal(number)

    def restore(self) -> None:
        """Give signals back to those who had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def install(self) -> None:
        """Take them, but for those that the process is told to ignore, as `nohup` and shells do."""
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._remember)
            self._previous[number] = signal.SIG_DFL if previous is None else previous  # None: not set by Python

    def stop(self, message: str) -> BaseException:
        """What ends the run: what the signal would have raised, or how a process ends that was told to."""
        number, self.received = self.received, None
        return KeyboardInterrupt(message) if number == signal.SIGINT else Terminated(message)


class Terminated(SystemExit):
    """The process was told to end (SIGTERM): it exits with 143, as one that the signal kills."""

    def __init__(self, message: str) -> None:
        """Exit status 143."""
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        """What happened."""
        return self.message


@contextmanager
def watching() -> Iterator[Interrupts]:
    """Watch signals; outside of the main thread, which alone may, nothing is ever received."""
    interrupts = Interrupts()
    if threading.current_thread() is threading.main_thread():
        interrupts.install()
    try:
        yield interrupts
    finally:
        interrupts.restore()
    if interrupts.received is not None:  # too late for the run to see it
        signal.raise_signal(interrupts.received)
