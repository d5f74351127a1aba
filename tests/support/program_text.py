"""Read compiled programs: what they copy."""

from typing import Any

import jax


def copies_of(shape: str, function: Any, *arguments: Any) -> list[str]:
    """Copies of an array of this shape in the compiled program, where no loop is within: in single steps.

    Where a block of steps begins, XLA of JAX 0.12 makes one, which weighs little beside the steps of the block.
    """
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    steps = [part for part in text.split("\n}\n") if " while(" not in part]
    return [line for part in steps for line in part.splitlines() if shape in line and " copy(" in line]
