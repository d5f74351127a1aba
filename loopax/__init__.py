"""Loops for JAX whose number of steps is known only at run time: differentiable in every mode, safe in every batch."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loopax._version import __version__ as __version__

if TYPE_CHECKING:
    from loopax._src.public import *  # noqa: F403

    __all__: list[str]
else:

    def __getattr__(name: str) -> Any:
        """Import all that is public when the first of it is used: `python -m loopax --help` does without it."""
        if name == "__all__" or not name.startswith("_"):
            if find_spec(f"loopax.{name}"):
                return import_module(f"loopax.{name}")  # `loopax.schedule`, say
            public = vars(import_module("loopax._src.public"))
            names = sorted(each for each in public if not each.startswith("_"))
            globals().update({each: public[each] for each in names}, __all__=names)
            if name in (*names, "__all__"):
                return globals()[name]
        raise AttributeError(f"module 'loopax' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The public names, also before the first of them is used."""
        return sorted({*globals(), *__getattr__("__all__")})

    # Equinox and Pallas give JAX more settings when they are imported. In the midst of a trace, the program that is
    # traced would have none of them, and would be compiled again when it is called next.
    if "jax" in sys.modules:
        __getattr__("__all__")
