"""How many steps a chunk takes, from measured times."""

SECONDS = 0.05  # of a chunk, about: so long a finished item waits, and a new one, where items are slow to come
FIRST = 64  # steps
_GROWTH = 8
_MOST = 2**24


class Pace:
    """Steps between two looks of the host."""

    def __init__(self, given: int | None) -> None:
        """So many, or as many as take `SECONDS`."""
        self._given = given
        self._steps = FIRST if given is None else given

    @property
    def steps(self) -> int:
        """The most of the next chunk."""
        return self._steps

    def measured(self, steps: int, seconds: float, at_most: bool) -> None:
        """A chunk took so long, or `at_most` so long: it was done before the host looked."""
        if self._given is None and steps:
            wanted = int(SECONDS * steps / max(seconds, 1e-9))
            least = self._steps if at_most else 1
            self._steps = max(least, min(wanted, self._steps * _GROWTH, _MOST))
