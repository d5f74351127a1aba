"""Run-time checks: flags in the state of loops, raised once, after the outermost loop.

A callback inside a loop's body costs about ten times what a flag in its carry does. So a check in the
body of a loop is handed to that loop, which carries it along, and so on outward; after the outermost loop
it is raised. A check that is made under another transformation inside the body (a `jit` or `vmap` there)
cannot be handed over, and is raised on the spot.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from threading import local
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, PartitionSpec

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.types import nan_if
from loopax._src.frontend.raising import Failure, Line, calls, of_user, raise_if, with_amount
from loopax._src.jax_internals import Primitive
from loopax._src.pytrees.leaves import LoopInfo, RowByRow


@dataclass(frozen=True)
class Check:
    """`message` is an error where `failed` (bool[], or one for each item) is True.

    Where the check is raised at once, AMOUNT in it becomes the number `amount`, and the error says where in a batch it
    failed first. Where a loop hands it on, neither is known. `stack` are the lines from which it comes; None: those
    that lead to where it is raised.
    """

    failed: Any
    message: str
    amount: Any = None
    stack: tuple[Line, ...] | None = None

    @classmethod
    def of(cls, call: str, failed: Any, problem: str, amount: Any = None) -> "Check":
        """What may be wrong with a call, such as `loopax.scan`, that the user makes now."""
        line = next(of_user(jaxi.user_lines()), None)
        return cls(failed, f"{call if line is None else f'{call} at {line}'}: {problem}", amount)

    @property
    def text(self) -> str:
        """The message without the number."""
        return with_amount(self.message, None)


class KindCheck:
    """`LoopCall.checked` of a loop that the user calls now: an error names this call, wherever a derivative is taken.

    Programs keep it: those of calls from the same lines are the same.
    """

    def __init__(self, call: str, throw: bool) -> None:
        """Look at the lines only where they are needed, for that takes time."""
        self._call, self._throw, self._lines = call, throw, jaxi.user_lines()

    def __call__(self, results: Any, failed: Any, message: str, amount: Any, *, throw: bool | None = None) -> Any:
        """See `LoopCall`."""
        if self._throw if throw is None else throw:
            _, _, stack = self._key
            place = f" at {stack[0]}" if stack else ""
            return settle(results, [Check(failed, f"{self._call}{place}: {message}", amount, stack)])
        return jax.tree.map(lambda x: nan_if(failed, x), results)

    @cached_property
    def _key(self) -> tuple[str, bool, tuple[Line, ...]]:
        return self._call, self._throw, calls(self._lines)

    def __eq__(self, other: object) -> bool:
        """Whether the calls came from the same lines."""
        return isinstance(other, KindCheck) and self._key == other._key

    def __hash__(self) -> int:
        """Of the lines."""
        return hash(self._key)


# What the bodies of outer loops have been handed while they are traced: for each, the trace, the checks, and the
# numbers of the loops that it calls.
_active = local()


@contextmanager
def collecting() -> Iterator[tuple[list[Check], list[LoopInfo]]]:
    """Take the checks of loops in a body that is being traced, and their numbers."""
    stack: list[tuple[Any, list[Check], list[LoopInfo]]] = _active.__dict__.setdefault("stack", [])
    stack.append((jaxi.trace_state(), [], []))
    try:
        yield stack[-1][1:]
    finally:
        stack.pop()


@jaxi.varying_as_needed
def settle(results: Any, checks: Sequence[Check], mesh: Mesh | None = None, info: LoopInfo | None = None) -> Any:
    """Hand checks and `info` to the loop whose body is traced, or raise where they fail, on all devices of the mesh."""
    # Outside of `jit`, it is known now that most do not fail.
    checks = [x for x in checks if isinstance(x.failed, Tracer) or np.any(np.asarray(x.failed))]
    stack = _active.__dict__.get("stack", [])
    if stack and stack[-1][0] == jaxi.trace_state():
        stack[-1][1].extend(checks)
        stack[-1][2].extend([] if info is None else [info])
        return results
    for check in checks:
        failed = _raised(check, mesh or jax.sharding.get_abstract_mesh())
        if isinstance(failed, Tracer) or failed:
            results = _invalid_if(failed, results)
    return results


def _raised(check: Check, mesh: Any) -> Any:
    """False, or an error."""
    stack = calls(jaxi.user_lines()) if check.stack is None else check.stack
    if not isinstance(check.failed, Tracer):
        failed = jnp.asarray(np.asarray(check.failed))  # on one device
        return raise_if(failed, check.message, stack, check.amount)
    kinds = {AxisType.Manual} if mesh.size <= 1 else set(mesh.axis_types)
    if kinds <= {AxisType.Manual}:
        return raise_if(check.failed, check.message, stack, check.amount)
    if AxisType.Explicit in kinds:
        return on_each_device_p.bind(check.failed, what=Failure(check.text, stack), mesh=mesh)
    return _on_each_device(check.failed, what=Failure(check.text, stack), mesh=mesh)


def _on_each_device(failed: Any, *, what: Failure, mesh: Any) -> Any:
    """Raise on all devices of a mesh over which JAX decides on shardings.

    It would call back from one device, and all others would wait for that one for ever.
    """
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, axis_type in axes if axis_type != AxisType.Manual}
    raised = partial(raise_if, message=what.message, stack=what.stack)
    specs = PartitionSpec()
    return jax.shard_map(raised, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=names, check_vma=False)(failed)


# `_on_each_device`, outside of all `jax.vmap`s: JAX does not map a `shard_map` over an axis that it takes itself.
on_each_device_p = Primitive("on_each_device")
jaxi.register(
    on_each_device_p,
    meaning=_on_each_device,
    params=["what", "mesh"],
    abstract_eval=lambda failed, **_: core.ShapedArray((), failed.dtype),
    batch_without_axis=lambda operands, _, **params: (on_each_device_p.bind(jnp.any(operands[0]), **params), None),
)


def _invalid_if(failed: Any, results: Any) -> Any:
    """Make every array of the results, and its derivatives, depend on a check.

    `equinox.error_if` lets tangents pass unchecked, so that a gradient whose value nobody uses would
    not raise, and it does not take arrays that vary over the axes of a `shard_map`. So a constant is checked,
    which then selects the results.
    """
    # Rows are seen through what stands beside them, which is enough.
    nodes = jax.tree.leaves(results, is_leaf=lambda node: isinstance(node, RowByRow))
    rows = {id(leaf) for node in nodes if isinstance(node, RowByRow) for leaf in jax.tree.leaves(node._rows)}
    select = partial(_selected, failed)
    return jax.tree.map(
        lambda x: jaxi.on_device(select, x) if isinstance(x, jax.Array) and id(x) not in rows else x, results
    )


def _selected(failed: Any, array: jax.Array) -> jax.Array:
    """The array, or what stands for an invalid one (under `EQX_ON_ERROR=nan`, which does not raise)."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _selected(failed, jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    is_weak = array.weak_type
    if jnp.issubdtype(array.dtype, jnp.inexact):
        selected = nan_if(failed, array)
    elif not jaxi.is_number(array.dtype):
        selected = jnp.where(failed, jaxi.zero(array.dtype), array)
    else:
        invalid = jnp.full_like(array, True if array.dtype == jnp.bool_ else jnp.iinfo(array.dtype).max)
        selected = jnp.where(failed, invalid, array)
    return jaxi.to_weak(selected) if is_weak else selected
