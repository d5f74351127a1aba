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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, PartitionSpec

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.types import nan_if
from loopax._src.core.jaxpr.util import split_list
from loopax._src.frontend.raising import Failure, Line, Message, calls, of_user, raise_if, with_amounts
from loopax._src.jax_internals import Primitive
from loopax._src.pytrees.leaves import LoopInfo, RowByRow


@dataclass(frozen=True)
class Check:
    """`message` is an error where `failed` (bool[], or one for each item) is True.

    The `amounts` are numbers in it, of the time when it failed first, also where a loop hands the check on. The error
    says where in a batch it failed first. `stack` are the lines from which it comes; None: those that lead to where it
    is raised.
    """

    failed: Any
    message: Message
    amounts: Sequence[Any] = ()
    stack: tuple[Line, ...] | None = None

    @classmethod
    def of(cls, call: str, failed: Any, problem: str, *amounts: Any) -> "Check":
        """What may be wrong with a call, such as `loopax.scan`, that the user makes now."""
        return cls(failed, f"{at_line(call)}: {problem}", amounts)

    @property
    def text(self) -> str:
        """The message without the numbers."""
        return with_amounts(self.message)


def at_line(call: str) -> str:
    """What the user calls now, with the line: `loopax.scan at solver.py:31 (solve)`."""
    line = next(of_user(jaxi.user_lines()), None)
    return call if line is None else f"{call} at {line}"


class Flags(NamedTuple):
    """Checks in the state of a loop: of each its message, and of how many arrays it is, whether it failed first."""

    messages: tuple[Message, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, checks: Sequence[Check], row: Any) -> tuple["Flags", list[Any]]:
        """Those of a step, and their arrays. A message of numbers is told the row of the step as well; None: not."""
        found: dict[Any, list[Any]] = {}  # checks with the same message, from as many loops around, are one
        for check in checks:
            amounts = [*check.amounts, *([] if isinstance(check.message, str) or row is None else [row])]
            new = [jnp.any(check.failed), *(map(lax.stop_gradient, map(jnp.asarray, amounts)))]
            key = check.message, len(new)
            found[key] = _first_of(found[key], new) if key in found else new
        flags = cls(tuple(message for message, _ in found), tuple(size for _, size in found))
        return flags, [x for arrays in found.values() for x in arrays]

    def after(self, old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """The arrays after a step, from those before and its own."""
        pairs = zip(split_list(old, self.sizes), split_list(new, self.sizes), strict=True)
        return [x for old, new in pairs if old for x in _first_of(old, new)]

    def checks(self, arrays: Sequence[Any]) -> list[Check]:
        """The checks after the loop."""
        *groups, _ = split_list(arrays, self.sizes)
        return [Check(failed, message, rest) for message, (failed, *rest) in zip(self.messages, groups, strict=True)]


def _first_of(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """A check that failed before, or one that fails now."""
    return [old[0] | new[0], *(jnp.where(old[0], *pair) for pair in zip(old[1:], new[1:], strict=True))]


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
            return settle(results, [Check(failed, f"{self.where}: {message}", [amount], self.stack)])
        return jax.tree.map(lambda x: nan_if(failed, x), results)

    @property
    def stack(self) -> tuple[Line, ...]:
        """The lines of the call."""
        return self._key[2]

    @property
    def where(self) -> str:
        """The call, with its line."""
        return f"{self._call} at {self.stack[0]}" if self.stack else self._call

    @cached_property
    def _key(self) -> tuple[str, bool, tuple[Line, ...]]:
        return self._call, self._throw, calls(self._lines)

    def __eq__(self, other: object) -> bool:
        """Whether the calls came from the same lines."""
        return isinstance(other, KindCheck) and type(other) is type(self) and self._facts == other._facts

    def __hash__(self) -> int:
        """Of the lines."""
        return hash(self._facts)

    @property
    def _facts(self) -> Any:
        return self._key


class Collected(NamedTuple):
    """What the body of an outer loop has been handed while it is traced."""

    trace: Any
    checks: list[Check]
    infos: list[LoopInfo]  # the numbers of the loops that it calls
    watched: list[bool]  # not empty where one looks at its cotangents, under whatever transformation


_active = local()  # has a stack of these


@contextmanager
def collecting() -> Iterator[Collected]:
    """Take the checks of loops in a body that is being traced, and their numbers."""
    stack: list[Collected] = _active.__dict__.setdefault("stack", [])
    stack.append(Collected(jaxi.trace_state(), [], [], []))
    try:
        yield stack[-1]
    finally:
        stack.pop()


def note_watched() -> None:
    """Let the loop whose body is traced look at its cotangents, too: it is the one that can say in which step."""
    if stack := _active.__dict__.get("stack", []):
        stack[-1].watched.append(True)


@jaxi.varying_as_needed
def settle(results: Any, checks: Sequence[Check], mesh: Mesh | None = None, info: LoopInfo | None = None) -> Any:
    """Hand checks and `info` to the loop whose body is traced, or raise where they fail, on all devices of the mesh."""
    # Outside of `jit`, it is known now that most do not fail.
    checks = [x for x in checks if isinstance(x.failed, Tracer) or np.any(np.asarray(x.failed))]
    stack: list[Collected] = _active.__dict__.get("stack", [])
    if stack and stack[-1].trace == jaxi.trace_state():
        stack[-1].checks.extend(checks)
        stack[-1].infos.extend([] if info is None else [info])
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
        return raise_if(failed, check.message, stack, check.amounts)
    kinds = {AxisType.Manual} if mesh.size <= 1 else set(mesh.axis_types)
    if kinds <= {AxisType.Manual}:
        return raise_if(check.failed, check.message, stack, check.amounts)
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
