"""Rules of primitives for `jax.experimental.sparse.sparsify`, which takes half a second to import."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.extend.core import Primitive

# (operands, some of which are sparse, parameters) -> results
SparseRule = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]
_waiting: dict[Primitive, SparseRule] = {}


def register_sparse(primitive: Primitive, rule: SparseRule) -> None:
    """Tell `sparsify` what a primitive does with sparse matrices among its operands."""
    _waiting[primitive] = rule


def know_sparse() -> None:
    """Register the rules with JAX, if whoever wants them has imported its module. The tables have no public name."""
    module = sys.modules.get("jax.experimental.sparse.transform")
    while module is not None and _waiting:
        primitive, rule = _waiting.popitem()
        for table in (module.sparse_rules_bcoo, module.sparse_rules_bcsr):
            table[primitive] = partial(_called_by_jax, module, rule)


def _called_by_jax(module: Any, rule: SparseRule, env: Any, *values: Any, **params: Any) -> Any:
    """The rule as JAX calls it: with references to buffers for arrays."""
    return module.arrays_to_spvalues(env, list(rule(module.spvalues_to_arrays(env, list(values)), params)))


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse matrix."""
    return isinstance(x, sys.modules["jax.experimental.sparse"].JAXSparse)


def on_sparse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays for sparse matrices, too."""
    return sys.modules["jax.experimental.sparse"].sparsify(function)
