"""A program as a function of JAX: with loopax's loops, with those of `jax.lax`, or unrolled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopax as lx
from tests.fuzz.operations import OPERATIONS, Layer, Values
from tests.fuzz.program import KINDS, LANES, ROWS, Program
from tests.fuzz.transformations import AROUND, DERIVATIVES, TRANSFORMATIONS, Function

MOST_INNER_STEPS = 8
MOST_ROWS = 17  # of a buffer: four operations of a body append in four steps


class Given(NamedTuple):
    """What a loop is given."""

    start: Values
    xs: Any
    step: Callable[[Values, Any], Values]
    steps: Any  # how many, if nothing stops it


Run = Callable[[Program, Given], Any]


def function(program: Program, loops: Any) -> Callable[[Any, Any], Any]:
    """`f(t, n)`, transformed as the program says. Weights, start and rows depend on `t`."""
    random = np.random.RandomState(program.seed)
    fixed = {name: random.uniform(-1, 1, shape) for name, shape in SHAPES.items()}
    along = {name: random.uniform(-0.5, 0.5, (*shape, 2)) for name, shape in SHAPES.items()}

    def given(t: Any, n: Any) -> Any:
        number = {name: fixed[name] + along[name] @ t for name in SHAPES}
        start: Values = {"v": number["v"], "s": number["s"], "n": jnp.int32(program.seed % 3)}
        start |= {name: LEAVES[name](number, program.seed, loops) for name in program.leaves}
        closed_over = {name: start.pop(name) for name in loops.CLOSED_OVER if name in start}
        steps = jnp.clip(n, 0, ROWS) if program.steps is None else program.steps

        def step(values: Values, x: Any) -> Values:
            values = values | closed_over
            for name in program.body:
                values = OPERATIONS[name](values, x, number["w"], loops)
            return {name: value for name, value in values.items() if name not in closed_over}

        found = loops.run(program, Given(start, number["xs"], step, steps))
        return found | {"last": loops.plain(found["last"] | closed_over)}

    f: Function = given
    for name in program.transformations:
        f = TRANSFORMATIONS[name](f) if name in TRANSFORMATIONS else AROUND[name](f, loops)
    return f


SHAPES = {"v": (3,), "s": (), "w": (3, 3), "xs": (ROWS,), "re": (2,), "im": (2,), "weight": (3, 3)}


# A leaf of the carry from numbers, a seed, and the class of loops.
LEAVES: dict[str, Callable[[Any, int, Any], Any]] = {
    "z": lambda number, seed, loops: lax.complex(number["re"], number["im"]),
    "f": lambda number, seed, loops: number["re"].astype(jnp.float32),
    "k": lambda number, seed, loops: jax.random.key(seed),
    "m": lambda number, seed, loops: Layer(number["weight"], 0.7),
    "b": lambda number, seed, loops: loops.append(loops.buffer(), number["s"], jnp.bool_(True)),
    "h": lambda number, seed, loops: loops.history(0.7 * number["v"]),
    "r": lambda number, seed, loops: loops.mutable(number["re"]),
}


def row(values: Values, x: Any) -> Any:
    """What a step of a scan gives beside the carry."""
    return {"vx": values["v"] * x, "n": values["n"]}


def stops(values: Values) -> Any:
    """Whether a scan stops behind these values."""
    return values["s"] > 0.4


def results(values: Values, ys: Any, num_steps: Any, limit_reached: Any) -> Any:
    """What is compared; a key by the integers behind it."""
    if "k" in values:
        values = values | {"k": jax.random.key_data(values["k"])}
    return {"last": values, "ys": ys, "num_steps": num_steps, "limit": limit_reached}


def where(flag: Any, new: Any, old: Any) -> Any:
    """The leaves of one of two pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def where_floats(flag: Any, tree: Any) -> Any:
    """The pytree, with ones in the place of its numbers where the flag is False."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, 1) if is_float(leaf) else leaf, tree)


class WithLoopax:
    """The loops, branches, buffers and histories of loopax, and mutable arrays."""

    CLOSED_OVER = ("r",)  # leaves that the step closes over, and the loop does not carry
    BRANCHES: Any = "lockstep"  # how lanes take branches
    mutable = staticmethod(jax.new_ref)

    @staticmethod
    def buffer() -> Any:
        return lx.Buffer(MOST_ROWS, like=jnp.zeros(()))

    @staticmethod
    def append(buffer: Any, row: Any, when: Any) -> Any:
        return buffer.append(row, when=when)

    @staticmethod
    def newest(buffer: Any) -> Any:
        return buffer[-1]

    @staticmethod
    def history(rows: Any) -> Any:
        return lx.History(3, rows)

    @staticmethod
    def push(history: Any, row: Any) -> Any:
        return history.push(row)

    @staticmethod
    def rows(history: Any) -> Any:
        return history.rows

    @staticmethod
    def write(reference: Any, i: Any, f: Any) -> Any:
        reference[i] = f(reference[i])
        return reference

    @classmethod
    def write_if(cls, flag: Any, reference: Any, i: Any, f: Any) -> Any:
        def write() -> None:
            cls.write(reference, i, f)

        cls.cond(flag, write, lambda: None)
        return reference

    @classmethod
    def cond(cls, flag: Any, true: Any, false: Any, *operands: Any) -> Any:
        return lx.cond(flag, true, false, *operands, lanes=cls.BRANCHES)

    @classmethod
    def switch(cls, index: Any, branches: Any, *operands: Any) -> Any:
        return lx.switch(index, branches, *operands, lanes=cls.BRANCHES)

    @staticmethod
    def with_compact_branches() -> Any:
        return WithCompactBranches

    @staticmethod
    def plain(values: Values) -> Values:
        """Arrays in the place of what holds them."""
        read = {"b": lambda b: (b.rows, b.count), "h": lambda h: h.rows, "r": jax.freeze}
        return {name: read[name](value) if name in read else value for name, value in values.items()}

    @staticmethod
    def inner(n: Any, f: Any, v: Any) -> Any:
        return lx.fori_loop(0, n, lambda _, v: f(v), v, max_steps=2)

    @staticmethod
    def inner_while(cond: Any, f: Any, s: Any) -> Any:
        return lx.while_loop(cond, f, s, max_steps=MOST_INNER_STEPS, throw=False)

    @staticmethod
    def run(program: Program, given: Given) -> Any:
        start, xs, step, steps = given
        options: dict[str, Any] = {
            "kind": KINDS[program.kind],
            "lanes": LANES[program.lanes],
            "max_steps": program.max_steps,
            "throw": False,
            "info": True,
        }
        ys = None
        if program.loop == "scan":
            stop = (lambda c, _: stops(c)) if program.stop else None
            f = lambda c, x: (new := step(c, x), row(new, x))
            (last, ys), info = lx.scan(f, start, xs, steps, program.reverse, program.unroll, stop=stop, **options)
        elif program.loop == "fori":
            unroll = program.unroll if program.steps is not None else None
            last, info = lx.fori_loop(0, steps, lambda i, c: step(c, xs[i % ROWS]), start, unroll=unroll, **options)
        else:
            goes_on = lambda c: (c[0] < steps) & ~(program.stop & stops(c[1]))
            body = lambda c: (c[0] + 1, step(c[1], xs[c[0] % ROWS]))
            (_, last), info = lx.while_loop(goes_on, body, (jnp.int32(0), start), **options)
        return results(last, ys, info.num_steps, info.limit_reached)


class WithCompactBranches(WithLoopax):
    """Branches are evaluated for two lanes at a time."""

    BRANCHES = lx.Compact(min_lanes=2)


class Unrolled:
    """Python loops, whose steps do nothing behind the last one. Buffers, histories and mutable arrays are arrays."""

    CLOSED_OVER = ()
    mutable = staticmethod(jnp.asarray)

    @staticmethod
    def buffer() -> Any:
        return jnp.zeros(MOST_ROWS), jnp.int32(0)

    @staticmethod
    def append(buffer: Any, row: Any, when: Any) -> Any:
        rows, count = buffer
        return jnp.where(when, rows.at[count].set(row), rows), count + when.astype(jnp.int32)

    @staticmethod
    def newest(buffer: Any) -> Any:
        rows, count = buffer
        return rows[count - 1]

    @staticmethod
    def history(rows: Any) -> Any:
        return rows

    @staticmethod
    def push(history: Any, row: Any) -> Any:
        return jnp.concatenate([history[1:], row[None]])

    @staticmethod
    def rows(history: Any) -> Any:
        return history

    @staticmethod
    def write(array: Any, i: Any, f: Any) -> Any:
        return array.at[i].set(f(array[i]))

    @classmethod
    def write_if(cls, flag: Any, array: Any, i: Any, f: Any) -> Any:
        return jnp.where(flag, cls.write(array, i, f), array)

    @classmethod
    def cond(cls, flag: Any, true: Any, false: Any, *operands: Any) -> Any:
        return cls.switch(jnp.where(flag, 0, 1), [true, false], *operands)

    @classmethod
    def switch(cls, index: Any, branches: Any, *operands: Any) -> Any:
        """All of them; one that is not taken computes with ones, which are in every domain."""
        index = jnp.clip(index, 0, len(branches) - 1)
        result = branches[0](*where_floats(index == 0, operands))
        for i, branch in enumerate(branches[1:], 1):
            result = where(index == i, branch(*where_floats(index == i, operands)), result)
        return result

    @classmethod
    def with_compact_branches(cls) -> Any:
        return cls

    @staticmethod
    def plain(values: Values) -> Values:
        return values

    @staticmethod
    def inner(n: Any, f: Any, v: Any) -> Any:
        for i in range(2):
            v = jnp.where(i < n, f(v), v)
        return v

    @staticmethod
    def inner_while(cond: Any, f: Any, s: Any) -> Any:
        for _ in range(MOST_INNER_STEPS):
            s = jnp.where(cond(s), f(s), s)
        return s

    @staticmethod
    def run(program: Program, given: Given) -> Any:
        c, xs, step, steps = given
        most = ROWS if program.max_steps is None else min(ROWS, program.max_steps)
        stops_before, stops_after = program.stop & (program.loop == "while"), program.stop & (program.loop == "scan")
        goes_on, num_steps = jnp.bool_(True), jnp.int32(0)
        ys = jax.tree.map(lambda y: jnp.zeros((ROWS, *y.shape), y.dtype), row(c, xs[0]))
        for k in range(most):
            active = goes_on & (k < steps) & ~(stops_before & stops(c))
            i = jnp.clip(steps - 1 - k, 0) if program.reverse else k
            new = step(c, xs[i])
            written = jax.tree.map(lambda rows, y, i=i: rows.at[i].set(y), ys, row(new, xs[i]))
            ys, c = where(active, written, ys), where(active, new, c)
            num_steps = jnp.where(active, k + 1, num_steps)
            goes_on = active & ~(stops_after & stops(c))
        limit = jnp.asarray(steps > most) & goes_on & ~(stops_before & stops(c))
        return results(c, ys if program.loop == "scan" else None, num_steps, limit)


class WithLax(Unrolled):
    """The loops of `jax.lax`, for programs that have a `lax.scan` of the same meaning."""

    @staticmethod
    def inner(n: Any, f: Any, v: Any) -> Any:
        return lax.scan(lambda v, i: (jnp.where(i < n, f(v), v), None), v, jnp.arange(2, dtype=jnp.int32))[0]

    @staticmethod
    def inner_while(cond: Any, f: Any, s: Any) -> Any:
        return lax.scan(lambda s, _: (jnp.where(cond(s), f(s), s), None), s, None, MOST_INNER_STEPS)[0]

    @staticmethod
    def can(program: Program) -> bool:
        """A static number of steps, which nothing stops.

        JAX's own scan loses a custom rule in second derivatives: what is known is computed without it.
        """
        most = ROWS if program.max_steps is None else program.max_steps
        fixed = program.steps is not None and not program.stop and program.steps <= most
        derivatives = sum(name in DERIVATIVES for name in program.transformations)
        return fixed and not (derivatives > 1 and {"custom_jvp", "custom_vjp"} & set(program.body))

    @staticmethod
    def run(program: Program, given: Given) -> Any:
        start, xs, step, steps = given
        f = lambda c, x: (new := step(c, x), row(new, x))
        last, ys = lax.scan(f, start, xs[:steps], reverse=program.reverse)
        ys = jax.tree.map(lambda y: jnp.pad(y, [(0, ROWS - steps), *[(0, 0)] * (y.ndim - 1)]), ys)
        return results(last, ys if program.loop == "scan" else None, jnp.int32(steps), jnp.bool_(False))


T, N = np.array([0.4, -0.9]), np.int32(3)


def difference(program: Program) -> str | None:
    """What loopax has wrong; None: nothing."""
    got = jax.jit(function(program, WithLoopax))(T, N)
    for loops in (Unrolled, WithLax):
        if loops is WithLax and not WithLax.can(program):
            continue
        expected = jax.jit(function(program, loops))(T, N)
        if problem := _difference(got, expected, 1e-8 if "f" not in program.leaves else 1e-3):
            return f"against {loops.__name__}: {problem}"
    return None


def _difference(got: Any, expected: Any, tolerance: float) -> str | None:
    (leaves, structure), (others, other) = (jax.tree_util.tree_flatten_with_path(tree) for tree in (got, expected))
    if structure != other:
        return f"structure {structure}, expected {other}"
    for (path, a), (_, b) in zip(leaves, others, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        where = jax.tree_util.keystr(path)
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{where}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
        if not np.all(np.isfinite(b)):
            return f"{where}: the reference is not finite"
        scale = np.max(np.abs(b), initial=1.0)
        if not np.all(np.abs(a - b) <= tolerance * scale if a.dtype.kind in "fc" else a == b):
            return f"{where}: {a}, expected {b}"
    return None
