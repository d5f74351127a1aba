"""The compiled parts of the gradient of a long run: a chunk forwards, and its pullback in two parts.

What a pullback needs is recorded by one program and used by another, so that its memory is taken once for all chunks.
A state is the flat arrays of (carry, sum of ys). Arrays of inexact dtypes are differentiated.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.durable.chunk import replicated
from loopax._src.durable.gradient_problem import Given, Problem
from loopax._src.loops import scan, while_loop
from loopax._src.pytrees.leaves import Dynamic, Spec, pack

Arrays = Sequence[Array]


def numbers_of_inexact(arrays: Arrays) -> list[int]:
    """Which of these are differentiated."""
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]


def inexact(arrays: Arrays) -> list[Any]:
    """Those that are differentiated."""
    return [arrays[i] for i in numbers_of_inexact(arrays)]


def tree_of(spec: Spec, gradients: Sequence[Any]) -> Any:
    """The user's pytree with a gradient for each array that is differentiated, and None for all other leaves."""
    found = iter(gradients)
    has_one = [isinstance(leaf, Dynamic) and jnp.issubdtype(leaf.aval.dtype, jnp.inexact) for leaf in spec.leaves]
    return spec.treedef.unflatten([next(found) if has else None for has in has_one])


class Functions:
    """A chunk of at most so many steps, as functions that can be compiled."""

    def __init__(self, problem: Problem, capacity: int, kind: Any) -> None:
        """`kind` says what is stored within a chunk."""
        self._problem, self._capacity, self._kind = problem, capacity, kind
        self._pull: Any = None  # how `record` has found a pullback: its structure, and which of its leaves are given
        # Methods as attributes, for which JAX keeps what it has traced and compiled.
        self.forward, self.record, self.pull, self.value = self._forward, self._record, self._pulled, self._value

    def _forward(self, given: Given) -> tuple[list[Any], Any, Any]:
        """The state behind the chunk, the steps that it has taken, and whether there is another one."""
        question = self._problem.question
        if not question.is_open:
            return self._scan(given), given.most, jnp.ones((), bool)
        params = self._problem.params.unpack(given.params)
        start = jnp.zeros((), jnp.int32), self._problem.state.unpack(given.state)
        step = lambda at: (at[0] + 1, self._step(params, at[1], None))  # noqa: E731
        taken, last = while_loop(lambda at: (at[0] < given.most) & question.goes_on(params, at[1][0]), step, start)
        return pack(last)[0], taken, question.goes_on(params, last[0])

    def _record(self, given: Given, _: Arrays = ()) -> tuple[list[Any], list[Any]]:
        """The state behind the chunk, and what `pull` needs besides the same arguments.

        The last argument is what an earlier chunk has recorded: it gives its memory.
        """

        def of_inexact(*new: Any) -> tuple[list[Any], list[Any]]:
            last = self._scan(self._with(given, new), kind=self._kind)
            return inexact(last), last

        _, pull, last = jax.vjp(of_inexact, *self._inexact(given), has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        known = jax.tree.leaves(given)
        places = [next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves]
        self._pull = structure, places
        return last, [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]

    def _pulled(
        self, given: Given, recorded: Arrays, of_state: Arrays, of_params: Arrays
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The cotangents of the state before the chunk, of the parameters (added up), and of the rows."""
        jax.eval_shape(partial(self._record), given)  # anew: the last trace may be that of other settings
        structure, places = self._pull
        known, own = jax.tree.leaves(given), iter(recorded)
        pullback = structure.unflatten([next(own) if place is None else known[place] for place in places])
        more, before, of_rows = self._split(given, pullback(list(of_state)))
        return before, [a + b for a, b in zip(of_params, more, strict=True)], of_rows

    def _value(self, given: Given) -> tuple[Any, list[Any], list[Any]]:
        """The value at a state, and the cotangents of the state and of the parameters."""

        def of_inexact(*new: Any) -> Any:
            params, state, *_ = self._with(given, new)
            return self._problem.question.number(
                self._problem.params.unpack(params), *self._problem.state.unpack(state)
            )

        value, pull = jax.vjp(of_inexact, *self._inexact(given))
        of_params, of_state, _ = self._split(given, pull(jnp.ones_like(value)))
        return value, of_state, of_params

    def _inexact(self, given: Given) -> list[Any]:
        """What is differentiated: of parameters, of the state, of rows."""
        return [*inexact(given.params), *inexact(given.state), *inexact(given.rows[: self._problem.num_xs])]

    def _split(self, given: Given, found: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What belongs to parameters, to the state and to rows."""
        params = len(inexact(given.params))
        state = params + len(inexact(given.state))
        return list(found[:params]), list(found[params:state]), list(found[state:])

    def _with(self, given: Given, new: Sequence[Any]) -> Given:
        """The arguments, with others in the place of what is differentiated."""

        def put(arrays: Arrays, new: Sequence[Any]) -> list[Any]:
            found = dict(zip(numbers_of_inexact(arrays), new, strict=True))
            return [found.get(i, x) for i, x in enumerate(arrays)]

        params, state, xs = self._split(given, new)
        count = self._problem.num_xs
        rows = [*put(given.rows[:count], xs), *given.rows[count:]]
        return given._replace(params=put(given.params, params), state=put(given.state, state), rows=rows)

    def _step(self, params: Any, state: Any, x: Any) -> Any:
        carry, total = state
        carry, y = self._problem.question.step(params, carry, x)
        return carry, jax.tree.map(lambda total, y: total + y.astype(total.dtype), total, y)

    def _scan(self, given: Given, **options: Any) -> list[Any]:
        """The state behind so many steps."""
        params, xs = self._problem.params.unpack(given.params), self._problem.rows.unpack(given.rows)
        if self._problem.question.is_counted:
            xs = given.first + jnp.arange(self._capacity, dtype=jnp.int32)
        bound = {} if jax.tree.leaves(xs) else {"max_steps": self._capacity}
        step = lambda state, x: (self._step(params, state, x), None)  # noqa: E731
        start = self._problem.state.unpack(given.state)
        return pack(scan(step, start, xs, length=given.most, **bound, **options)[0])[0]


_interned = lru_cache(maxsize=8)(Functions)


def functions_of(problem: Problem, capacity: int, kind: Any) -> Functions:
    """Those of an earlier call of the same functions of the user, if they can be hashed."""
    try:
        hash((problem, kind))
    except TypeError:
        return Functions(problem, capacity, kind)
    return _interned(problem, capacity, kind)


def recorded_bytes(functions: Functions, given: Given) -> int:
    """Of what the pullback of a chunk needs besides what the chunk is given."""
    return num_bytes(jax.eval_shape(functions.record, given)[1])


class Programs:
    """The functions of a chunk, compiled for what it is given: types and shardings."""

    def __init__(self, functions: Functions, given: Given) -> None:
        """Nothing is run."""
        of_state, of_params = inexact(given.state), inexact(given.params)
        recorded = jax.eval_shape(functions.record, given)[1]
        where = replicated([*given.params, *given.state])
        everywhere = where if jax.process_count() > 1 else None
        state_at, of_state_at, of_params_at = ([x.sharding for x in xs] for xs in (given.state, of_state, of_params))

        def compiled(function: Any, out: Any, *arguments: Any, **options: Any) -> Any:
            at = {} if where is None else {"out_shardings": out}
            return jax.jit(function, **at, **options).lower(*arguments).compile()

        value = jax.eval_shape(functions.value, given)[0]
        self.no_value = jnp.zeros(value.shape, value.dtype, device=where)
        self.value = compiled(functions.value, (where, of_state_at, of_params_at), given)
        self._forward = compiled(functions.forward, (state_at, everywhere, everywhere), given)
        record = partial(compiled, functions.record, (state_at, None), given)
        if where is not None:  # how XLA spreads what is recorded
            recorded = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
                for x, at in zip(recorded, record().output_shardings[1], strict=True)
            ]
            record = partial(compiled, functions.record, (state_at, [x.sharding for x in recorded]), given)
        self._room: list[Any] = list(filter(_has_zeros, recorded))
        self._record = record(self._room, donate_argnums=1, keep_unused=True)
        out = of_state_at, of_params_at, everywhere
        arguments = given, recorded, of_state, of_params
        self._pull = compiled(functions.pull, out, *arguments, donate_argnums=(2, 3))
        self.memory = _bytes(self._record, "output") + max(_bytes(x, "temp") for x in (self._record, self._pull))

    def forward(self, given: Given) -> tuple[list[Array], Array, Array]:
        """As of `Functions`."""
        return self._forward(given)

    def record(self, given: Given) -> tuple[list[Array], list[Array]]:
        """As of `Functions`. What has been recorded is good until the next call."""
        self._room = [x if isinstance(x, Array) else jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in self._room]
        last, recorded = self._record(given, self._room)
        self._room = list(filter(_has_zeros, recorded))
        return last, recorded

    def pull(
        self, given: Given, recorded: list[Array], of_state: list[Array], of_params: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """As of `Functions`; the cotangents are used up."""
        return self._pull(given, recorded, of_state, of_params)


def _has_zeros(x: Any) -> bool:
    """Whether this is an array of numbers, and not of PRNG keys."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _bytes(program: Any, what: str) -> int:
    """Those that a compiled program takes on each device for its temporary arrays, or for its output."""
    analysis = program.memory_analysis()
    return 0 if analysis is None else getattr(analysis, f"{what}_size_in_bytes")


def device_bytes(arrays: Arrays) -> int:
    """The bytes of these on each device."""
    return num_bytes(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays)
