"""Parameters of which some are in `make test`, and the others in `make test-slow`."""

from typing import Any

import pytest

import loopax as lx
from tests.support.problem import KINDS


def each_kind(*fast: lx.Kind) -> list[Any]:
    """All kinds, of which all but these are marked slow."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
