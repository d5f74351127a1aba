"""Which of several parameters are for `make test`, where all of them are for `make test-slow` and it together."""

from typing import Any

import pytest

import loopax as lx
from tests.support.problem import KINDS


def each_kind(*fast: lx.Kind) -> list[Any]:
    """All kinds, of which all but these are marked slow."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
