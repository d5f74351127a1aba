"""Items of any iterable, fetched and made ready while the device runs."""

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread
from typing import Any

from loopax._src.queues.settings import Settings


class Source:
    """Items in their order. They are fetched ahead in a thread, or, with `ahead=0`, where they are taken.

    An error of the iterable, or of `ready`, is kept until all items before it are taken.
    """

    def __init__(self, items: Iterable[Any], ahead: int, ready: Callable[[Any], Any]) -> None:
        """Begin to fetch; what is taken is `ready(item)`."""
        self._iterator: Iterator[Any] = iter(items)
        self._ahead = ahead
        self._ready = ready
        self._fetched: deque[Any] = deque()
        self._changed = Condition()
        self._ended = self._stopping = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        if ahead:
            self._thread = Thread(target=self._as_here(), name="loopax items", daemon=True)
            self._thread.start()

    def take(self, most: int) -> list[Any]:
        """The next items, so many at most: with `ahead=0` all of these, else those that are there."""
        if not self._ahead:
            while len(self._fetched) < most and not self._ended:
                self._fetch_one()
        with self._changed:
            taken = [self._fetched.popleft() for _ in range(min(most, len(self._fetched)))]
            self._changed.notify_all()
        return taken

    def wait(self, seconds: float | None = None) -> None:
        """Until there is an item, or no more will come, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._fetched or self._ended or not self._ahead, seconds)

    @property
    def num_fetched(self) -> int:
        """How many items are there."""
        return len(self._fetched)

    @property
    def is_empty(self) -> bool:
        """Whether all items are taken."""
        with self._changed:
            return self._ended and not self._fetched

    def raise_error(self) -> None:
        """Raise what the iterable has raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget_error(self) -> None:
        """What the iterable has raised is not asked for any more."""
        self._error = None

    def stop(self, wait: bool = True) -> list[Any]:
        """Fetch no more; returns the items that are fetched and not taken. One that is being fetched is waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if wait and self._thread is not None:
            self._thread.join()
        with self._changed:
            self._ended = True
            fetched = list(self._fetched)
            self._fetched.clear()
            self._changed.notify_all()
        return fetched

    def _as_here(self) -> Callable[[], None]:
        """What another thread does: to fetch, with the context variables and settings of this one."""
        context, settings = contextvars.copy_context(), Settings.here()

        def fetch() -> None:
            with settings.applied():
                context.run(self._fetch_ahead)

        return fetch

    def _fetch_ahead(self) -> None:
        while self._has_room():
            self._fetch_one()

    def _has_room(self) -> bool:
        """Wait for room; false where nothing more is fetched."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._ended or len(self._fetched) < self._ahead)
            return not (self._stopping or self._ended)

    def _fetch_one(self) -> None:
        try:
            item = self._ready(next(self._iterator))
        except StopIteration:
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised behind the items before it
            self._end(error)
        else:
            with self._changed:
                self._fetched.append(item)
                self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()
