"""What loopax's own primitives say of themselves to who asks about a program: registered by each."""

from collections.abc import Callable, Sequence
from typing import Any

from loopax._src.jax_internals import Primitive

# What an equation computes, where that is not all of its results.
computed: dict[Primitive, Callable[[Any], Sequence[Any]]] = {}
# Of loops: the limit on their steps, and whether it is loose: perhaps far above the steps that are taken.
step_limits: dict[Primitive, Callable[[Any], tuple[int | None, bool]]] = {}
# Linear in all real operands together.
jointly_linear: set[Primitive] = set()
