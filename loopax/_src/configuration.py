"""`configure`: what loopax chooses by, for a program or for a part of it."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from loopax._src import settings
from loopax._src.jax_internals import api_boundary, for_all_threads
from loopax._src.pytrees.static import Why, positive_int
from loopax._src.settings import CALIBRATIONS, OF_PLATFORM, Calibration, Costs

VARIABLE = "LOOPAX_CALIBRATION"
_AGAIN = "Write it again: python -m loopax calibrate FILE."
_MEMORY = Why("what a gradient stores", "give the most bytes that a gradient may take")
_AS_IT_IS: Any = object()


class configure:  # noqa: N801 - called as a function
    """Set how much memory gradients may take, and what operations cost, for a program or for a `with` block.

    ::

        lx.configure(memory=2**30)  # from here on

        with lx.configure(memory=2**30):  # in this block
            gradient = jax.grad(loss)(params)

    `Auto()` chooses the fastest kind whose carries fit in `memory`. `Auto()` and `lanes="auto"` choose by the estimated
    time of a step. Results do not depend on the settings, up to rounding.

    Parameters
    ----------
    memory
        The bytes that the gradient of one loop of kind `Auto()` may store. The default is 256 MiB on every device.
        `Auto(memory=...)` says it for one loop.
    calibration
        What operations cost. `"cpu"`: as fitted on two cores of a server. `"h100"`, `"tpu-v5e"`: estimates from what
        the makers publish. Or the path of a file that `python -m loopax calibrate FILE` has written on your machine.
        None: that of the device for which a program is traced, which is `jax.default_device` or else the default
        backend; a GPU counts as an H100. The environment variable LOOPAX_CALIBRATION gives one that is used from the
        start.

    Raises
    ------
    TypeError
        `memory` is not an int, or is traced.
    ValueError
        `memory` is less than 1. Or the file is not a calibration, or another version of loopax wrote it with other
        constants.
    FileNotFoundError
        The file does not exist.

    Notes
    -----
    An argument that is not given stays as it is.

    The settings are a part of the key of each trace: under other settings, JAX traces and compiles a function again.
    Under settings that it has seen before, it finds what it compiled then. Processes that run one program together must
    use the same settings.

    A call sets the settings for all threads. A `with` block sets them for its own thread, and puts back what was set
    before at its end.

    """

    @api_boundary
    def __init__(self, *, memory: int = _AS_IT_IS, calibration: str | os.PathLike[str] | None = _AS_IT_IS) -> None:
        self._before, self._settings = for_all_threads(settings.context()).get_global(), settings.context().value
        if memory is not _AS_IT_IS:
            self._settings = self._settings._replace(
                memory=positive_int("configure(memory=...)", memory, "bytes", _MEMORY)
            )
        if calibration is not _AS_IT_IS:
            self._settings = self._settings._replace(calibration=None if calibration is None else named(calibration))
        for_all_threads(settings.context()).set_global(self._settings)

    def __enter__(self) -> None:
        """Set for this thread alone, until the end of the block."""
        for_all_threads(settings.context()).set_global(self._before)
        self._context = settings.context()(self._settings)
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back what was set before."""
        self._context.__exit__(kind, error, trace)


def use_environment() -> None:
    """Use what the environment names."""
    if name := os.environ.get(VARIABLE):
        try:
            settings.default = settings.default._replace(calibration=named(name))
        except (OSError, ValueError) as error:
            error.add_note(f"The file is named by the variable {VARIABLE} of the environment.")
            raise


def named(calibration: str | os.PathLike[str]) -> Calibration:
    """One that comes with loopax, or is read from a file."""
    return CALIBRATIONS.get(str(calibration)) or read(calibration)


def read(file: str | os.PathLike[str]) -> Calibration:
    """What a file says."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        found, of_platform = dict(content["nanoseconds"]), OF_PLATFORM[content["platform"]]
    except FileNotFoundError as error:
        error.add_note(f"Calibrations that come with loopax: {', '.join(CALIBRATIONS)}.")
        raise
    except (ValueError, KeyError, TypeError) as error:
        what = "it holds no nanoseconds of operations on a platform"
        raise ValueError(f"{file} is not a calibration: {what}. {_AGAIN}") from error
    if set(found) != set(Costs._fields):
        names = f"Got {sorted(found)}, expected {sorted(Costs._fields)}."
        raise ValueError(f"{file} is a calibration of other operations. {names} {_AGAIN}")
    is_number = {name: isinstance(x, int | float) and not isinstance(x, bool) for name, x in found.items()}
    wrong = {name: x for name, x in found.items() if not (is_number[name] and 0 < x < float("inf"))}
    if wrong:
        raise ValueError(f"{file} is not a calibration. Got {wrong}, expected positive numbers. {_AGAIN}")
    return of_platform._replace(costs=Costs(**found))


def write(file: str | os.PathLike[str], constants: Costs, machine: str) -> None:
    """A file for `configure`."""
    content = {"machine": machine, "platform": settings.platform(), "nanoseconds": constants._asdict()}
    Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


use_environment()
