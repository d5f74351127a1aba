"""Optional packages: imported where they are used, with an error that says how to install a missing one."""

import importlib
import importlib.util
from typing import Any


def optional(module: str, extra: str, what: str) -> Any:
    """A module that only `what` needs, and that the extra of loopax installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module}, which cannot be imported. Install it: `pip install loopax[{extra}]`."
        ) from error


def is_installed(module: str) -> bool:
    """Whether a package is there, without importing it."""
    return importlib.util.find_spec(module) is not None
