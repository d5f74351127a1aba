"""`Tuned`: the kind that is fastest where it is measured, at the first trace of a gradient."""

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax

from loopax._src.core import Kind, LoopFacts, Plan
from loopax._src.jax_internals import api_boundary, told_by_first
from loopax._src.kinds.auto import LANES, MEMORY, Auto, smallest_of_fastest
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, code_of_call, positive_int, refuse_tracers

_DEADLINE = 20.0  # seconds for all candidates, after which no other is compiled
_WHY = Why("the program of a gradient", "choose a folder for all calls")


@api_boundary
@dataclass(frozen=True)
class Tuned(Kind):
    """Measure the kinds where a gradient is first traced, and take the fastest.

    `Tuned` compiles the gradient of the loop with each kind that fits in the memory budget of `Auto`, and runs each for
    some steps on made-up numbers. This takes seconds, once for a loop, its types, the device, and the versions of JAX
    and loopax. The choice is remembered by the process, and by a folder if you name one.

    Parameters
    ----------
    memory
        The bytes that the gradient of one loop may store, as in `Auto`.
    cache
        A folder for choices, which is made if it is not there. Another process that traces the same loop then measures
        nothing. None: the choice is remembered until the process ends.
    num_lanes
        The number of lanes of a `jax.vmap` outside of the gradient, as in `Auto`. `Tuned` then measures so many lanes
        together. None: it measures one.

    Raises
    ------
    TypeError
        `memory` or `num_lanes` is not an int, or is traced; or `cache` is no path.
    ValueError
        As in `Auto`.

    Warns
    -----
    UserWarning
        Nothing can be measured, and the folder has no choice for this loop: it communicates (`jax.lax.psum`), stands in
        a `shard_map`, is exported, is spread over a mesh, changes mutable arrays, or several processes run the program.
        `Auto` chooses then. Several processes take what the folder of the first one has. Or the folder cannot be
        written to.

    Notes
    -----
    What is measured is the loop as its gradient is traced, without its prints and callbacks. A `jax.vmap` outside of
    the gradient has no part in it, unless you give `num_lanes`: then lanes differ in the carry and in `xs`, and take
    the same number of steps. A step takes the same time for all numbers, except where these decide on branches or on
    inner loops; inner loops without a bound take 8 steps at most. `explain` shows the times.

    A program that has been traced keeps its choice. Two machines may choose differently, so results may differ by
    rounding.

    """

    memory: int | None = None
    cache: str | None = None
    num_lanes: int | None = None
    _chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.memory is not None:
            object.__setattr__(self, "memory", positive_int("Tuned(memory=...)", self.memory, "bytes", MEMORY))
        if self.num_lanes is not None:
            object.__setattr__(self, "num_lanes", positive_int("Tuned(num_lanes=...)", self.num_lanes, "lanes", LANES))
        refuse_tracers("Tuned(cache=...)", self.cache, "a folder", _WHY)
        if self.cache is not None:
            if not isinstance(self.cache, str | os.PathLike):
                raise TypeError(f"Tuned(cache=...): got {describe(self.cache)}, expected the path of a folder.")
            object.__setattr__(self, "cache", os.fspath(self.cache))

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return code_of_call("Tuned", memory=self.memory, cache=self.cache, num_lanes=self.num_lanes)

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        auto = Auto(self.memory, self.num_lanes)
        if not loop.sizes_are_known:
            _warn("sizes are not known when the loop is traced")
            return auto.plan(loop)
        candidates = auto._candidates(loop)
        if len(candidates) == 1 or loop.bound == 0:
            return auto.plan(loop)
        names = {repr(kind): kind for kind in candidates}
        key = _key(loop, names, self.num_lanes)
        found = _remembered(self.cache, key) if jax.process_count() == 1 else _of_first_process(self.cache, key)
        if found is not None and found.chosen in names:
            return names[found.chosen].plan(loop).because(f"{found.reason} (remembered)")
        assert loop._measuring is not None
        if why := loop._measuring.obstacle():
            _warn(why)
            return auto.plan(loop)
        begun = time.perf_counter()
        plans = {name: kind.plan(loop) for name, kind in names.items()}
        step = min(cost.time for cost in candidates.values())
        times = loop._measuring.times(list(plans.values()), step, _DEADLINE, self.num_lanes or 1)
        known = {name: ns for name, ns in zip(plans, times, strict=True) if ns is not None}
        if not known:
            _warn("the device runs none of the candidates")
            return auto.plan(loop)
        best = smallest_of_fastest({names[name]: ns for name, ns in known.items()}, candidates)
        listed = ", ".join(f"{name.replace('()', '')} {ns:.0f}" for name, ns in known.items())
        of_all = f" of all {self.num_lanes} lanes" if self.num_lanes else ""
        choice = _Choice(
            repr(best),
            f"measured in {time.perf_counter() - begun:.1f} s, nanoseconds for a step{of_all}: {listed}",
        )
        _remember(self.cache, key, choice)
        return plans[choice.chosen].because(choice.reason)


@dataclass(frozen=True)
class Asked(Kind):
    """The loops of a gradient that `Tuned()` would choose for, for whoever has measured them in another way."""

    _found: list[tuple[str, set[str]]] = field(default_factory=list, compare=False)

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        if loop.sizes_are_known:
            names = {repr(kind): kind for kind in Auto()._candidates(loop)}
            self._found.append((_key(loop, names), set(names)))
        return Auto().plan(loop)

    def remember(self, folder: str | os.PathLike[str], kind: Kind, reason: str) -> None:
        """Let `Tuned(cache=folder)` take this kind for these loops, where it is one of those that it chooses from."""
        for key, names in self._found:
            if repr(kind) in names:
                _remember(os.fspath(folder), key, _Choice(repr(kind), reason))


class _Choice(NamedTuple):
    """What has been found to be fastest."""

    chosen: str  # the code of a kind
    reason: str


def _warn(why: str) -> None:
    warnings.warn(
        f"Tuned(): {why}, so nothing is measured, and Auto() chooses. `loopax.compare(..., cache=FOLDER)` on one "
        "device fills the folder that Tuned(cache=FOLDER) reads.",
        UserWarning,
        stacklevel=2,
    )


# What is remembered, by the process and in a folder. An entry that cannot be read is measured again.

_process: dict[str, _Choice] = {}
_agreed: dict[str, _Choice | None] = {}  # by several processes


def _key(loop: LoopFacts, candidates: Iterable[str], num_lanes: int | None = None) -> str:
    """The loop, its types, the device and the versions as a name of a file."""
    device = jax.devices()[0]
    versions = jax.__version__, version("jaxlib"), version("loopax")
    facts = loop.bound, loop.is_fixed, loop.bound_is_loose, loop.share, num_lanes, *candidates
    assert loop._measuring is not None
    text = re.sub(r" at 0x[0-9a-f]+|<[^<>]*0x[0-9a-f]+[^<>]*>", "", loop._measuring.program())
    return sha256(repr((device.platform, device.device_kind, versions, facts, text)).encode()).hexdigest()[:32]


def _remembered(folder: str | None, key: str) -> _Choice | None:
    if key in _process or folder is None:
        found = _process.get(key)
        if found and folder is not None and not (Path(folder) / f"{key}.json").exists():
            _remember(folder, key, found)
        return found
    try:
        found = json.loads((Path(folder) / f"{key}.json").read_text(encoding="utf-8"))
        choice = _Choice(str(found["chosen"]), str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    _process[key] = choice
    return choice


def _of_first_process(folder: str | None, key: str) -> _Choice | None:
    """What the first of several processes remembers: all of them have to run the same program."""
    if key not in _agreed:
        found = _remembered(folder, key)
        told = told_by_first(f"loopax/tuned/{key}", json.dumps(found), _DEADLINE)
        _agreed[key] = _Choice(*json.loads(told)) if told and told != "null" else None
    return _agreed[key]


def _remember(folder: str | None, key: str, choice: _Choice) -> None:
    _process[key] = choice
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Renamed as a whole: another process never reads half of it.
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            json.dump(choice._asdict(), file)
        os.replace(name, Path(folder) / f"{key}.json")
    except OSError as error:
        warnings.warn(f"Tuned(cache={folder!r}): the choice is not kept: {error}", UserWarning, stacklevel=2)
