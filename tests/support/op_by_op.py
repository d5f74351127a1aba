"""Programs that are run operation by operation, without a compiler."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


def op_by_op(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced, and evaluated under `jax.disable_jit`: lowerings of loops run as Python."""

    def run(*args: Any) -> Any:
        closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
        with jax.disable_jit():
            results = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(like), results)

    return run
