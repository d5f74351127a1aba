"""The constants from which costs are estimated, in a file that `python -m loopax calibrate` has written."""

import json
import os
from pathlib import Path
from typing import Any

import jax

from loopax._src.core.jaxpr import costs
from loopax._src.core.jaxpr.costs import Costs

VARIABLE = "LOOPAX_CALIBRATION"
_AGAIN = "Write it again: python -m loopax calibrate FILE."


def set_calibration(file: str | os.PathLike[str] | None) -> None:
    """Use what `python -m loopax calibrate FILE` has measured of a machine, in all that is traced from now on.

    `Auto()` chooses a kind and `lanes="auto"` a way to run lanes from estimates of what a step costs. Without a
    calibration these are for the CPU on which loopax was developed. Results do not depend on them, but for
    rounding.

    All programs that JAX has compiled are forgotten, and traced again when they are called next. The variable
    LOOPAX_CALIBRATION of the environment names a file that is used from the start. Processes that run one program
    together must use the same file.

    Parameters
    ----------
    file
        The file, or None: the constants that loopax brings.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file holds something else, or was written by another version with other constants.

    """
    costs.use(Costs() if file is None else read(file))
    jax.clear_caches()


def use_environment() -> None:
    """Use the file that the environment names."""
    if file := os.environ.get(VARIABLE):
        try:
            costs.use(read(file))
        except (OSError, ValueError) as error:
            error.add_note(f"The file is named by the variable {VARIABLE} of the environment.")
            raise


def read(file: str | os.PathLike[str]) -> Costs:
    """The constants in a file."""
    try:
        found = dict(json.loads(Path(file).read_text())["nanoseconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a calibration: it holds no nanoseconds of operations. {_AGAIN}") from error
    if set(found) != set(Costs._fields):
        names = f"Got {sorted(found)}, expected {sorted(Costs._fields)}."
        raise ValueError(f"{file} is a calibration of other operations. {names} {_AGAIN}")
    wrong = {name: value for name, value in found.items() if not _is_time(value)}
    if wrong:
        raise ValueError(f"{file} is not a calibration. Got {wrong}, expected positive numbers. {_AGAIN}")
    return Costs(**found)


def write(file: str | os.PathLike[str], constants: Costs, machine: str) -> None:
    """A file for `set_calibration`."""
    Path(file).write_text(json.dumps({"machine": machine, "nanoseconds": constants._asdict()}, indent=2) + "\n")


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


use_environment()
