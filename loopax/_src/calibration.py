"""The constants from which costs are estimated, in a file that `python -m loopax calibrate` has written."""

import json
import os
from pathlib import Path

import jax

from loopax._src.core.jaxpr import cost as costs
from loopax._src.core.jaxpr.cost import Costs
from loopax._src.jax_internals import api_boundary

VARIABLE = "LOOPAX_CALIBRATION"
_AGAIN = "Write it again: python -m loopax calibrate FILE."


@api_boundary
def set_calibration(file: str | os.PathLike[str] | None) -> None:
    """Use the times of operations that `python -m loopax calibrate FILE` measured on a machine.

    `Auto()` and `lanes="auto"` choose by the estimated time of a step. Without a calibration, the estimates are for the
    CPU on which loopax was developed. Results do not depend on the calibration, up to rounding.

    Parameters
    ----------
    file
        The path of the file. None: use the constants that come with loopax.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file is not a calibration, or another version of loopax wrote it with other constants.

    Notes
    -----
    The calibration applies to everything that is traced after the call. The call clears JAX's caches, so each function
    is traced and compiled again when it is called next.

    The environment variable LOOPAX_CALIBRATION names a file that is used from the start. Processes that run one program
    together must use the same file.

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
    is_number = {name: isinstance(x, int | float) and not isinstance(x, bool) for name, x in found.items()}
    wrong = {name: x for name, x in found.items() if not (is_number[name] and 0 < x < float("inf"))}
    if wrong:
        raise ValueError(f"{file} is not a calibration. Got {wrong}, expected positive numbers. {_AGAIN}")
    return Costs(**found)


def write(file: str | os.PathLike[str], constants: Costs, machine: str) -> None:
    """A file for `set_calibration`."""
    Path(file).write_text(json.dumps({"machine": machine, "nanoseconds": constants._asdict()}, indent=2) + "\n")


use_environment()
