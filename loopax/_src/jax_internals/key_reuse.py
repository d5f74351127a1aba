"""What JAX's check of PRNG keys (`jax_debug_key_reuse`) asks of primitives: which keys they consume, which they make.

There is no public way to say it. The check is a module of its own, which JAX imports when the check is first used.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import batching, mlir

own_primitives: list[Primitive] = []  # of which the check is told


def checks_keys() -> bool:
    """Whether keys are checked."""
    return jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]


def without_check(function: Any) -> Any:
    """A function whose program JAX does not check: it holds a step several times, to evaluate it again."""

    def unchecked(*arguments: Any, **params: Any) -> Any:
        if not checks_keys():
            return function(*arguments, **params)
        with jax.debug_key_reuse(False):
            return function(*arguments, **params)

    return unchecked


# It computes nothing: JAX finds the equation, whose name stands in errors, where it checks a program.
_uses_keys_p = Primitive("loop_using_keys")
_uses_keys_p.multiple_results = True
_uses_keys_p.def_impl(lambda *_: [])
_uses_keys_p.def_abstract_eval(lambda *_: [])
batching.primitive_batchers[_uses_keys_p] = lambda keys, _: (_uses_keys_p.bind(*keys), [])
mlir.register_lowering(_uses_keys_p, lambda *_: [])


def consume_keys(keys: Sequence[Any]) -> None:
    """Tell JAX that these keys are consumed here."""
    for key in keys:
        _uses_keys_p.bind(key)


def keys_of(closed: ClosedJaxpr, is_key: Sequence[bool]) -> tuple[list[bool], list[bool], dict[int, int]]:
    """Which inputs of a program are keys that it consumes, which results are new keys, and which are inputs.

    `is_key` says which inputs are the integers behind a key; results may be. In the answer, constants are the first
    inputs. Raises `KeyReuseError` where the program itself uses a key twice.
    """
    jaxpr, num_consts = _with_keys(closed, is_key)
    signature, num_inputs = _check().jaxpr_type_signature(jaxpr), len(jaxpr.invars)
    consumed = {sink.idx for sink in signature.sinks if np.any(sink.mask)}
    made = {source.idx for source in signature.sources}
    places = [*range(num_inputs, num_inputs + num_consts), *range(num_inputs)]  # JAX has constants last
    kept = {forward.out_idx: places.index(forward.in_idx) for forward in signature.forwards}
    return [i in consumed for i in places], [i in made for i in range(len(jaxpr.outvars))], kept


def _with_keys(closed: ClosedJaxpr, is_key: Sequence[bool]) -> tuple[Any, int]:
    """The open jaxpr with keys in the place of the integers behind them, and the number of constants."""
    jaxpr: Any = closed.jaxpr
    inputs = {v for v, marked in zip(jaxpr.invars, is_key, strict=True) if marked}
    wraps: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap" and eqn.invars[0] in inputs:
            wraps.setdefault(eqn.invars[0], eqn.outvars[0])
    keys = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "random_unwrap"} | wraps
    eqns = [eqn for eqn in jaxpr.eqns if eqn.outvars[:1] not in [[key] for key in wraps.values()]]
    return jaxpr.replace(
        invars=[wraps.get(v, v) for v in jaxpr.invars],
        outvars=[v if isinstance(v, Literal) else keys.get(v, v) for v in jaxpr.outvars],
        eqns=eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    ), len(jaxpr.constvars)


@lru_cache(maxsize=1)
def _check() -> Any:
    """The module of the check, told of loopax's primitives.

    They consume nothing: `consume_keys` says what loops consume, once for all that a derivative evaluates again.
    """
    check = import_module("jax.experimental.key_reuse._core")
    made = check.dynamic_key_reuse_signature(
        lambda eqn: check.KeyReuseSignature(*map(check.Source, range(len(eqn.outvars))))
    )
    check.key_reuse_signatures.update(dict.fromkeys(own_primitives, made))
    check.key_reuse_signatures[_uses_keys_p] = check.KeyReuseSignature(check.Sink(0))
    return check
