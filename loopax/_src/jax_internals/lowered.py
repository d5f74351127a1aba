"""Programs as XLA is handed them."""

import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.mlir import ir

from loopax._src.jax_internals.jaxprs import open_constants

_CALL = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')  # function, file and line, as MLIR writes them
_NO_OPERATIONS = ("stablehlo.constant", "stablehlo.return", "func.", "builtin.")


def calls_of_operations(closed: ClosedJaxpr) -> Iterator[list[tuple[str, int, str]]]:
    """Of each operation of a program: file, line and function of the calls that led to it, innermost first.

    JAX hands XLA a module of MLIR, and has no public way to the lines of its operations.
    """
    opened, _ = open_constants(closed)
    module: Any = jax.jit(jaxpr_as_fun(opened)).lower(*opened.in_avals).compiler_ir("stablehlo")
    locations: list[str] = []

    def visit(operation: Any) -> Any:
        if not operation.name.startswith(_NO_OPERATIONS):
            locations.append(str(operation.location))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return ([(file, int(line), name) for name, file, line in _CALL.findall(location)] for location in locations)
