"""The compiled part of a durable loop: from the arrays of a carry to the same some steps on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from loopax._src.core.jaxpr.util import MOST_STEPS, num_bytes, split_list
from loopax._src.frontend.extent import Extent
from loopax._src.frontend.options import Options
from loopax._src.frontend.run import UserLoop
from loopax._src.frontend.run_time_checks import settle
from loopax._src.frontend.steps import Call, always
from loopax._src.frontend.trace import FirstCondition, Step, strongly_typed
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, of_weak_type, open_constants, strong
from loopax._src.nnx.functional import Changes, freeze, roots, take_back, thaw_numbered
from loopax._src.pytrees.leaves import Dynamic, Spec, pack
from loopax._src.pytrees.match_carry import CarryMismatchError, match_carry
from loopax._src.pytrees.static import Called

CHUNK_BYTES = 32 << 20  # of rows of a compiled chunk of steps
MOST_ROWS = 1 << 16  # of outputs in a chunk
EPOCH = MOST_STEPS + 1  # steps that have keys of one stream


class RowPlan(NamedTuple):
    """Which rows of outputs belong to which steps of a scan."""

    capacity: int
    first: int  # the row of the first step
    direction: int  # 1, or -1: from the row of a step to that of the next

    def of_step(self, steps: int) -> int:
        """The row of the step that comes after so many."""
        return self.first + self.direction * steps

    def taken(self, steps: int, some: int) -> tuple[int, int]:
        """The rows of some steps that come after so many, from and to."""
        low = self.of_step(steps if self.direction > 0 else steps + some - 1)
        return low, low + some


@dataclass(frozen=True)
class Job:
    """What is to be run: the arguments of a loop, understood."""

    options: Options
    where: str  # the user's function in error messages
    called: Called  # this one, first of the user's functions
    call: Call  # of a step
    place: Callable[[int], Any]  # the number, the index or the row of a step that comes after so many
    init: Any
    total: int | None  # steps at most
    cut: bool = False  # `max_steps` makes them fewer
    stops: bool = False  # `call` says whether to go on
    condition: FirstCondition | None = None  # whether to take the first step
    unroll: int = 1
    rows: RowPlan | None = None
    settings: dict[str, str] = field(default_factory=dict)  # what else makes it another program
    arrays: dict[str, Any] = field(default_factory=dict)  # known by name among what the chunk closes over

    @property
    def step(self) -> Step:
        return Step(self.call, self.where, self.called, self.options.key_spec, own=(self.call,))

    def start(self, steps: int) -> list[Any]:
        """What a step is handed that comes after so many: its place, and the data of a key for keys of steps, if any.

        After each 2**31 steps there is another key: keys are folded with 32 bits.
        """
        options, place = self.options, self.place(steps)
        if options.key_data is None or steps < EPOCH:
            return [place, *options.extras]
        key, impl = options.key_data, options.key_impl
        key = key if impl is None else jax.random.wrap_key_data(key, impl=impl)
        key = jax.random.fold_in(jax.random.fold_in(key, 2**32 - 1), steps // EPOCH)
        return [place, key if impl is None else jax.random.key_data(key)]


@dataclass(frozen=True)
class TracedChunk:
    """A chunk for one number of rows of outputs."""

    # (*carry, *start, most) -> (*carry, *ys, num_steps, goes_on, *broken), where `start` is what else the loop hands to
    # its steps. Rows of `ys` that there were not are zero; `goes_on` is False where a condition has ended the loop.
    # `broken`: whether the next step breaks, and the numbers of a message that says so.
    closed: ClosedJaxpr
    init: Any  # the first carry, frozen, with the types that it has in the loop
    arrays: list[jax.Array]  # of it
    spec: Spec
    y_spec: Spec
    changes: Changes  # what the body does to NNX objects
    carry_avals: list[Any]  # of what the body returns, with weak types
    broken: Any  # the message (`frontend/finite.py`); None: nothing is looked at


def trace(job: Job, start: Sequence[Any], rows: int | None) -> TracedChunk:
    """Trace a chunk for so many rows of outputs, from promoted leaves where the body's result asks for it.

    Without outputs there are no rows (None), and a chunk may take any number of steps.
    """
    init, where = freeze(job.init), job.where
    options = replace(job.options, progress=None, throw=True)
    while True:
        arrays, spec = pack(init)
        found: dict[str, Any] = {}

        def flat(
            *operands: Any, init: Any = init, spec: Spec = spec, found: dict[str, Any] = found, first: Any = arrays
        ) -> list[Any]:
            arrays, start, (most,) = split_list(operands, [len(spec.avals), len(operands) - len(spec.avals) - 1])
            given = spec.unpack([of_weak_type(x, aval) for x, aval in zip(arrays, spec.avals, strict=True)])
            carry, objects = thaw_numbered(given)
            bound = MOST_STEPS if rows is None else rows  # without one, a condition alone would stop the loop
            extent = Extent(0, most, bound, fixed=False, capacity=rows, unroll=job.unroll)
            condition = always if job.stops else None
            done = UserLoop(job.step, options, extent, start, carry, goes_on=condition, begun=first).run()
            goes_on = jnp.ones((), bool) if done.goes_on is None else done.goes_on
            carry, ys, *numbers = settle((done.carry, done.ys, done.num_steps, goes_on), done.checks)
            check = done.broken and done.broken.check(f"loopax.{options.name}", done.arrays)
            found["broken"], broken = (check.message, [check.failed, *check.amounts]) if check else (None, [])
            carry, found["changes"] = take_back(where, given, objects, done.hand_over(carry))
            if roots(ys):
                raise TypeError(
                    f"{where} returns NNX objects as outputs, and outputs go to disk as arrays. Return what they hold "
                    "instead, `variable[...]` or `nnx.to_pure_dict(nnx.state(module))`."
                )
            arrays, found["y_spec"] = pack(ys)
            carry = match_carry(where, init, spec, carry)
            found["carry_avals"] = list(map(jax.typeof, carry))
            return [*map(strongly_typed, carry), *map(strongly_typed, arrays), *numbers, *broken]

        try:
            most = jax.ShapeDtypeStruct((), jnp.int32)
            closed = jax.make_jaxpr(flat)(*map(strong, spec.avals), *map(jax.typeof, start), most)
            return TracedChunk(closed, init, arrays, spec, **found)
        except CarryMismatchError as mismatch:
            init = mismatch.restart(init)


def rows_of_a_chunk(traced: TracedChunk, unroll: int) -> int:
    """How many rows of outputs fit into a chunk's memory: whole iterations of the compiled loop, one at least."""
    rows = min(CHUNK_BYTES // max(num_bytes(traced.y_spec.rows().avals), 1), MOST_ROWS)
    return max(rows - rows % unroll, unroll)


class CompiledChunk:
    def __init__(self, traced: TracedChunk, start: Sequence[Any], rows: int) -> None:
        """Compile; `rows` of outputs are the most steps that it may take, where there are outputs.

        The carry keeps its sharding, so that one program takes every chunk. `first` are the arrays of the first carry,
        placed on devices; they may be used up.
        """
        self.traced, self.rows = traced, rows
        opened, self._closed_over = open_constants(traced.closed)
        self.first = placed(traced.arrays, self._closed_over)
        num_consts, self._sizes = len(self._closed_over), [len(self.first), len(traced.y_spec.avals)]
        shardings = [x.sharding for x in self.first]
        whole = replicated(self.first) if jax.process_count() > 1 else None  # each process has all rows then
        others = [whole] * (len(traced.closed.out_avals) - len(shardings))
        function = jax.jit(
            jaxpr_as_fun(opened),
            donate_argnums=range(num_consts, num_consts + len(self.first)),
            out_shardings=[*shardings, *others] if replicated(self.first) else None,
        )
        self._compiled = function.lower(*self._closed_over, *self.first, *start, np.int32(0)).compile()

    def run(self, arrays: Sequence[Any], start: Sequence[Any], most: int) -> tuple[list[Any], ...]:
        """The arrays some steps on, which use up those given, rows of outputs, and the numbers of `TracedChunk`."""
        out = self._compiled(*self._closed_over, *arrays, *start, np.int32(most))
        return tuple(split_list(out, self._sizes))


def placed(arrays: Sequence[jax.Array], beside: Sequence[Any] = ()) -> list[jax.Array]:
    """Copies of the arrays; where some, or those beside them, are spread over a mesh, the others are on all of it.

    Where some are on a device that the user has chosen, all are there: arrays that are read from disk cannot be moved
    by JAX, as those can be whose device nobody has chosen.
    """
    copies = [jnp.array(x, x.dtype, copy=True) for x in arrays]  # of strong types
    others = [x for x in beside if isinstance(x, jax.Array)]
    chosen = [x.sharding for x in [*arrays, *others] if x.committed]
    where = replicated([*arrays, *others]) or next(iter(chosen), None)
    if where is None:
        return copies
    return [x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, where) for x in copies]


def replicated(arrays: Sequence[jax.Array]) -> NamedSharding | None:
    """On all devices of the mesh over which some of these are spread."""
    meshes = [x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


def row_types(spec: Spec) -> list[tuple[tuple[int, ...], Any, Any]]:
    """Of each array of outputs: the shape and dtype of a row, and the implementation of PRNG keys."""
    leaves = [leaf for leaf in spec.leaves if isinstance(leaf, Dynamic)]
    return [(leaf.aval.shape[1:], leaf.aval.dtype, leaf.key_impl) for leaf in leaves]
