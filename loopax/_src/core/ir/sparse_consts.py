"""Sparse matrices that the body of a loop closes over, under `jax.experimental.sparse.sparsify`.

The arrays of which a matrix consists become constants in its place. Carries and rows stay dense.
"""

from collections.abc import Sequence
from typing import Any

import jax

from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.util import split_list, trace
from loopax._src.jax_internals import ClosedJaxpr, is_sparse, jaxpr_as_fun, on_sparse
from loopax._src.messages import SPARSE_CARRY, SPARSE_IN_COMPACT_LANES


def refuse_sparse(_: Sequence[Any], __: dict[str, Any]) -> Sequence[Any]:
    """What holds loops in another form takes no sparse matrix."""
    raise NotImplementedError(SPARSE_IN_COMPACT_LANES)


def _dense(values: Sequence[Any]) -> list[Any]:
    if any(map(is_sparse, values)):
        raise NotImplementedError(SPARSE_CARRY)
    return list(values)


def loop_of_sparse(operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Operands are `low, high, *consts, *carry, *xs`."""
    loop = Loop(**params)
    limits, consts, others = split_list(operands, [2, loop.num_consts])
    parts, bodies = _on_parts(consts, [loop.body, loop.inverse])
    loop = loop._replace(body=bodies[0], inverse=bodies[1], num_consts=len(parts))
    return loop_p.bind(*_dense(limits), *parts, *_dense(others), **loop._asdict())


def sweep_of_sparse(operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`."""
    sweep = ReverseSweep(**params)
    limits, consts, others = split_list(operands, [3, sweep.num_consts])
    parts, bodies = _on_parts(consts, [sweep.step, sweep.inverse])
    sweep = sweep._replace(step=bodies[0], inverse=bodies[1], num_consts=len(parts))
    return reverse_sweep_p.bind(*_dense(limits), *parts, *_dense(others), **sweep._asdict())


def _on_parts(consts: Sequence[Any], bodies: Sequence[ClosedJaxpr | None]) -> tuple[list[Any], list[Any]]:
    """The arrays of which constants consist, and bodies `(row, *consts, *others)` that take them in their place."""
    parts, treedef = jax.tree.flatten(list(consts))

    def taking_parts(body: ClosedJaxpr) -> ClosedJaxpr:
        function = on_sparse(jaxpr_as_fun(body))

        def on_parts(row: Any, *inputs: Any) -> list[Any]:
            own, others = split_list(inputs, [len(parts)])
            return _dense(function(row, *treedef.unflatten(own), *others))

        row, *avals = body.in_avals
        return trace(on_parts, [row, *map(jax.typeof, parts), *avals[len(consts) :]])

    return parts, [body and taking_parts(body) for body in bodies]
