"""The loops and branches of a program: those of loopax, those of `jax.lax` that loopax rewrites, or unrolled ones."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import loopax as lx
from loopax._src.core.jaxpr.cost import StepCost
from tests.fuzz.program import BROKEN, KINDS, LANES, POLICIES, ROWS, Program
from tests.fuzz.transformations import BATCHES, DERIVATIVES

MOST_INNER_STEPS = 8
MOST_ROWS = 37  # of a buffer: nine operations of a body append in four steps

Values = dict[str, Any]
Operation = Callable[[Values, Any, Any, Any], Values]  # (carry, row, weights, loops) -> carry
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Given(NamedTuple):
    """What a loop is given."""

    start: Values
    xs: Values
    step: Callable[[Values, Values], Values]
    steps: Any  # how many, if nothing stops it
    key: Any  # None: none
    breaks: Any  # the number of the step that breaks, if the program has one


def row(values: Values, loops: Any) -> Any:
    """What a step of a scan gives beside the carry."""
    ys = {"vx": values["v"] * values["x"], "n": values["n"]}
    if "d" in values:
        ys["d"] = values["d"] * values["x64"]
    if "x on host" in values:
        ys["on host"] = loops.to_host(lax.stop_gradient(values["v"]))
    return ys


def stops(values: Values) -> Any:
    """Whether a loop stops behind these values."""
    return values["s"] > 0.4


def results(values: Values, ys: Any, num_steps: Any, limit_reached: Any, broken: Any = None) -> Any:
    """What is compared; a key by the integers behind it. `broken`: which step broke, and in which leaf."""
    keys = {name: jax.random.key_data(values[name]) for name in ("k", "g") if name in values}
    return {"last": values | keys, "ys": ys, "num_steps": num_steps, "limit": limit_reached, "broken": broken}


def place_of_v(values: Values) -> int:
    """The number of the leaf that breaks among all."""
    return [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(values)].index("v")


def where(flag: Any, new: Any, old: Any) -> Any:
    """The leaves of one of two pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def where_floats(flag: Any, tree: Any) -> Any:
    """The pytree, with ones in the place of its numbers where the flag is False."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, jnp.exp(leaf - leaf)) if is_float(leaf) else leaf, tree)


def lanes_of(program: Program) -> Any:
    """Of half of the programs, a batch of compact lanes has fewer places than lanes (`few_places`)."""
    is_refilled = program.lanes == "compact" and program.seed % 2
    return lx.Compact(min_lanes=1) if is_refilled else LANES[program.lanes]


def few_places() -> AbstractContextManager[Any]:
    """Batches of few lanes, too, have stages that are refilled, if how fast they shrink is not given."""
    return patch.object(StepCost, "places", lambda self, moved, lanes: max(lanes // 4, 1) if lanes > 1 else 0)


def stored(program: Program) -> dict[str, Any]:
    """The kind and derivative; a little memory has room for one carry at least, of all lanes and with its tangents."""
    if program.kind != "little memory" or "a" not in program.features:
        choice = KINDS[program.kind]
        return {"derivative": choice[0], "kind": choice[1]} if isinstance(choice, tuple) else {"kind": choice}
    larger = sum(name in BATCHES | DERIVATIVES for name in program.transformations)
    return {"kind": replace(KINDS[program.kind], memory=4096 * 3**larger)}


class Calls:
    """What callbacks were called with: numbers in their order, by operation and lane."""

    def __init__(self) -> None:
        """None yet."""
        self.numbers: dict[tuple[str, int], list[float]] = defaultdict(list)

    def __call__(self, name: str, number: Any, lane: Any, happens: Any = True) -> None:
        """Note one, unless the lane has finished or takes another branch."""
        if happens:
            self.numbers[name, int(lane)].append(float(number))


class Loops:
    """What all three have: effects, which happen where `who` says."""

    CLOSED_OVER: tuple[str, ...] = ()  # leaves that the step closes over, and the loop does not carry

    def __init__(self) -> None:
        """Nothing was called yet."""
        self.calls = Calls()

    def who(self, c: Values) -> tuple[Any, ...]:
        """The lane, and where it is known, whether its effects happen: operands of effects."""
        return (c["lane"],)

    def say(self, name: str, number: Any, who: tuple[Any, ...], ordered: bool = False) -> None:
        """An effect without a result."""
        jax.debug.callback(partial(self.calls, name), number, *who, ordered=ordered)

    def tell(self, name: str, number: Any, who: tuple[Any, ...]) -> None:
        """The same, by another primitive, which has no derivative."""
        io_callback(partial(self.calls, name), None, lax.stop_gradient(number), *who)

    def ask(self, name: str, number: Any, who: tuple[Any, ...]) -> Any:
        """An effect with a result."""

        def answer(number: Any, *who: Any) -> Any:
            self.calls(name, number, *who)
            return np.cos(number)

        shape = jax.ShapeDtypeStruct((), number.dtype)
        return io_callback(answer, shape, lax.stop_gradient(number), *who)

    def prepared(self, program: Program, f: Any) -> Any:
        """The function before its transformations."""
        return f

    def around(self) -> Any:
        """The branches in which the whole function is."""
        return self


class WithLoopax(Loops):
    """The loops, branches, buffers and histories of loopax, and mutable arrays."""

    CLOSED_OVER = ("r",)
    BRANCHES: Any = "lockstep"  # how lanes take branches
    mutable = staticmethod(jax.new_ref)

    def to_host(self, x: Any) -> Any:
        return jax.device_put(x, HOST)

    def to_device(self, x: Any) -> Any:
        return jax.device_put(x, DEVICE)

    def buffer(self) -> Any:
        return lx.Buffer(MOST_ROWS, like=jnp.zeros(()))

    def append(self, buffer: Any, row: Any, when: Any) -> Any:
        return buffer.append(row, when=when)

    def newest(self, buffer: Any) -> Any:
        return buffer[-1]

    def history(self, rows: Any) -> Any:
        return lx.History(3, rows)

    def push(self, history: Any, row: Any) -> Any:
        return history.push(row)

    def rows(self, history: Any) -> Any:
        return history.rows

    def write(self, reference: Any, i: Any, f: Any) -> Any:
        reference[i] = f(reference[i])
        return reference

    def write_if(self, flag: Any, reference: Any, i: Any, f: Any) -> Any:
        def write() -> None:
            self.write(reference, i, f)

        self.cond(flag, write, lambda: None)
        return reference

    def cond(self, flag: Any, true: Any, false: Any, *operands: Any) -> Any:
        return lx.cond(flag, true, false, *operands, lanes=self.BRANCHES)

    def switch(self, index: Any, branches: Any, *operands: Any) -> Any:
        return lx.switch(index, branches, *operands, lanes=self.BRANCHES)

    def with_compact_branches(self) -> Any:
        """Branches are evaluated for two lanes at a time."""
        loops = WithLoopax()
        loops.BRANCHES, loops.calls = lx.Compact(min_lanes=2), self.calls
        return loops

    def plain(self, values: Values) -> Values:
        """Arrays in the place of what holds them."""
        read = {"b": lambda b: (b.rows, b.count), "h": lambda h: h.rows, "r": jax.freeze}
        return {name: read[name](value) if name in read else value for name, value in values.items()}

    def inner(self, n: Any, f: Any, v: Any) -> Any:
        return lx.fori_loop(0, n, lambda _, v: f(v), v, max_steps=2)

    def inner_while(self, cond: Any, f: Any, s: Any) -> Any:
        return lx.while_loop(cond, f, s, max_steps=MOST_INNER_STEPS, throw=False)

    def inner_scan(self, f: Any, init: Any, xs: Any) -> Any:
        return lx.scan(f, init, xs)

    def run(self, program: Program, given: Given) -> Any:
        start, xs, step, steps, key, breaks = given
        if program.finite in BROKEN:
            plain = step

            def step(c: Values, x: Values, /) -> Values:
                new, number = plain(c, {name: value for name, value in x.items() if name != "number"}), x["number"]
                is_it = (number == breaks) & (jnp.arange(3) == 1)
                return new | {"v": jnp.where(is_it, BROKEN[program.finite], new["v"])}

        if program.policy:
            step = POLICIES[program.policy](step)
        options: dict[str, Any] = {
            **stored(program),
            "lanes": lanes_of(program),
            "max_steps": program.max_steps,
            "key": key,
            "throw": False,
            "info": True,
        }
        numbered = program.finite in BROKEN
        if program.finite:
            options["finite"] = "nan" if program.finite == "nan" and program.seed % 2 else True
        with_key = lambda x, key: x if key is None else x | {"key": key}
        place = lambda i, key: with_key(at(xs, i % ROWS) | ({"number": i} if numbered else {}), key)
        ys, first_leaf = None, 0
        if program.loop == "scan":
            stop = (lambda c, _: stops(c)) if program.stop else None
            f = lambda c, x, key=None: (new := step(c, with_key(x, key)), row(new | x, self))
            if numbered:
                number = jnp.arange(ROWS, dtype=jnp.int32)
                xs = xs | {"number": steps - 1 - number if program.reverse else number}
            (last, ys), info = lx.scan(f, start, xs, steps, program.reverse, program.unroll, stop=stop, **options)
        elif program.loop == "fori":
            unroll = program.unroll if program.steps is not None else None
            f = lambda i, c, key=None: step(c, place(i, key))
            last, info = lx.fori_loop(0, steps, f, start, unroll=unroll, **options)
        else:
            goes_on = lambda c: (c[0] < steps) & ~(program.stop & stops(c[1]))
            f = lambda c, key=None: (c[0] + 1, step(c[1], place(c[0], key)))
            (_, last), info = lx.while_loop(goes_on, f, (jnp.int32(0), start), **options)
            first_leaf = 1
        assert isinstance(info, lx.LoopInfo)
        assert isinstance(last, dict)
        broken = None
        if program.finite:
            assert info.broken is not None
            is_v = ~info.broken | (info.broken_leaf == first_leaf + place_of_v(last))
            broken = info.broken_step, is_v
        return results(last, self.on_device(ys), info.num_steps, info.limit_reached, broken)

    def on_device(self, ys: Any) -> Any:
        """With the rows in host memory, which JAX differentiates there alone."""
        return ys | {"on host": self.to_device(ys["on host"])} if ys and "on host" in ys else ys


class Rewritten(WithLoopax):
    """The loops and branches of `jax.lax`, for `lx.rewrite_loops`."""

    def cond(self, flag: Any, true: Any, false: Any, *operands: Any) -> Any:
        return lax.cond(flag, true, false, *operands)

    def switch(self, index: Any, branches: Any, *operands: Any) -> Any:
        return lax.switch(index, branches, *operands)

    def with_compact_branches(self) -> Any:
        return self

    def inner(self, n: Any, f: Any, v: Any) -> Any:
        return lax.fori_loop(0, n, lambda _, v: f(v), v)

    def inner_while(self, cond: Any, f: Any, s: Any) -> Any:
        goes_on = lambda c: (c[0] < MOST_INNER_STEPS) & cond(c[1])
        return lax.while_loop(goes_on, lambda c: (c[0] + 1, f(c[1])), (jnp.int32(0), s))[1]

    def inner_scan(self, f: Any, init: Any, xs: Any) -> Any:
        return lax.scan(f, init, xs)

    def run(self, program: Program, given: Given) -> Any:
        start, xs, step, steps, *_ = given
        if program.policy:
            step = POLICIES[program.policy](step)
        place = lambda i: at(xs, i % ROWS)
        ys, taken = None, steps
        if program.loop == "scan":
            xs = jax.tree.map(lambda rows: rows[:steps], xs)
            f = lambda c, x: (new := step(c, x), row(new | x, self))
            last, ys = lax.scan(f, start, xs, reverse=program.reverse)
            padded = lambda y: jnp.concatenate([y, *[y[:1] - y[:1]] * (ROWS - steps)])
            ys = jax.tree.map(padded, self.on_device(ys))
        elif program.loop == "fori":
            last = lax.fori_loop(0, steps, lambda i, c: step(c, place(i)), start)
        else:
            goes_on = lambda c: (c[0] < steps) & ~(program.stop & stops(c[1]))
            taken, last = lax.while_loop(goes_on, lambda c: (c[0] + 1, step(c[1], place(c[0]))), (jnp.int32(0), start))
        broken = (jnp.int32(-1), jnp.bool_(True)) if program.finite else None
        return results(last, ys, jnp.asarray(taken, jnp.int32), jnp.bool_(False), broken)

    def prepared(self, program: Program, f: Any) -> Any:
        options: Any = {**stored(program), "lanes": lanes_of(program), "max_steps": program.max_steps}
        return lx.rewrite_loops(f, scans=True, conds=True, finite=True if program.finite else None, **options)

    def around(self) -> Any:
        """Not rewritten: those of loopax."""
        return WithLoopax()


class Unrolled(Loops):
    """Python loops, whose steps do nothing behind the last one. Buffers, histories and mutable arrays are arrays.

    One step is compiled, and called for each: unrolled steps would take long to compile.
    """

    mutable = staticmethod(jnp.asarray)

    def __init__(self) -> None:
        """All that happens, happens."""
        super().__init__()
        self.active: Any = jnp.bool_(True)

    @contextmanager
    def only(self, active: Any) -> Iterator[None]:
        """Effects happen where it is True alone."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def who(self, c: Values) -> tuple[Any, ...]:
        return (c["lane"], self.active)

    def to_host(self, x: Any) -> Any:
        return x

    to_device = to_host

    def buffer(self) -> Any:
        return jnp.zeros(MOST_ROWS), jnp.int32(0)

    def append(self, buffer: Any, row: Any, when: Any) -> Any:
        rows, count = buffer
        return jnp.where(when, rows.at[count].set(row), rows), count + when.astype(jnp.int32)

    def newest(self, buffer: Any) -> Any:
        rows, count = buffer
        return rows[count - 1]

    def history(self, rows: Any) -> Any:
        return rows

    def push(self, history: Any, row: Any) -> Any:
        return jnp.concatenate([history[1:], row[None]])

    def rows(self, history: Any) -> Any:
        return history

    def write(self, array: Any, i: Any, f: Any) -> Any:
        return array.at[i].set(f(array[i]))

    def write_if(self, flag: Any, array: Any, i: Any, f: Any) -> Any:
        return jnp.where(flag, self.write(array, i, f), array)

    def cond(self, flag: Any, true: Any, false: Any, *operands: Any) -> Any:
        return self.switch(jnp.where(flag, 0, 1), [true, false], *operands)

    def switch(self, index: Any, branches: Any, *operands: Any) -> Any:
        """All of them; one that is not taken computes with ones, which are in every domain."""
        index, result = jnp.clip(index, 0, len(branches) - 1), None
        for i, branch in enumerate(branches):
            with self.only(self.active & (index == i)):
                of_branch = branch(*where_floats(index == i, operands))
            result = of_branch if i == 0 else where(index == i, of_branch, result)
        return result

    def with_compact_branches(self) -> Any:
        return self

    def plain(self, values: Values) -> Values:
        return values

    def inner(self, n: Any, f: Any, v: Any) -> Any:
        for i in range(2):
            with self.only(self.active & (i < n)):
                v = where(i < n, f(v), v)
        return v

    def inner_while(self, cond: Any, f: Any, s: Any) -> Any:
        for _ in range(MOST_INNER_STEPS):
            goes_on = cond(s)
            with self.only(self.active & goes_on):
                s = where(goes_on, f(s), s)
        return s

    def inner_scan(self, f: Any, init: Any, xs: Any) -> Any:
        ys = []
        for x in xs:
            init, y = f(init, x)
            ys.append(y)
        return init, jax.tree.map(lambda *rows: jnp.stack(rows), *ys)

    def run(self, program: Program, given: Given) -> Any:
        if program.kind != "last two":
            return self._run(program, given, jnp.int32(0))
        with self.only(jnp.bool_(False)):
            num_steps = self._run(program, given, jnp.int32(0))["num_steps"]
        return self._run(program, given, num_steps - 2)

    def _run(self, program: Program, given: Given, first: Any) -> Any:
        """What steps before the first return is constant."""
        c, xs, step, steps, key, breaks = given
        most = ROWS if program.max_steps is None else min(ROWS, program.max_steps)
        stops_before, stops_after = program.stop & (program.loop == "while"), program.stop & (program.loop == "scan")
        goes_on, num_steps, outside = jnp.bool_(True), jnp.int32(0), self.active
        broken_step = jnp.int32(-1)
        ys = jax.tree.map(lambda y: jnp.stack([y - y] * ROWS), row(c | at(xs, 0), self))

        changes: Any = None

        @jax.jit
        def masked(active: Any, happens: Any, i: Any, place: Any, c: Any, ys: Any) -> Any:
            nonlocal changes
            x = at(xs, place)
            with self.only(happens):
                new = step(c, x if key is None else x | {"key": jax.random.fold_in(key, i)})
            changes = jax.tree.map(lambda after, before: after is not before, new, c)
            # Reading makes another version of a buffer, and a history is one.
            others = ["v"] if program.finite in BROKEN else []  # which the step of a loop may break
            changes |= {name: jax.tree.map(lambda _: True, c[name]) for name in [*"bh", *others] if name in c}
            here = jnp.arange(ROWS, dtype=jnp.int32) == i
            written = jax.tree.map(
                lambda rows, y: jnp.where(here.reshape(-1, *[1] * y.ndim), y, rows), ys, row(new | x, self)
            )
            return where(active, new, c), where(active, written, ys)

        def cut(is_cut: Any, tree: Any, changes: Any) -> Any:
            """As a constant, but for a leaf that steps return as it came: it is one that they close over."""
            constant = lambda leaf, changes: jnp.where(is_cut & changes, lax.stop_gradient(leaf), leaf)
            return jax.tree.map(constant, tree, changes)

        for k in range(most):
            active = begun = goes_on & (k < steps) & ~(stops_before & stops(c))
            if program.finite in BROKEN:  # a step that breaks has its effects, and no others
                broken_step = jnp.where(begun & (k == breaks), k, broken_step)
                active = begun & (k != breaks)
            i = jnp.clip(steps - 1 - k, 0) if program.reverse else k
            i = jnp.asarray(i, jnp.int32)
            # The condition of a `while_loop` counts in the carry, which a lane that has finished keeps.
            place = jnp.where(active, i, num_steps) % ROWS if program.loop == "while" else i
            if program.kind == "windows of two" and k % 2 == 0 and k > 0:
                c = cut(active, c, changes)
            c, ys = masked(active, begun & outside, i, place, c, ys)
            if program.kind == "last two":
                c, ys = cut(k < first, c, changes), where(k < first, lax.stop_gradient(ys), ys)
            num_steps = jnp.where(active, k + 1, num_steps)
            goes_on = active & ~(stops_after & stops(c))
        limit = jnp.asarray(steps > most) & goes_on & ~(stops_before & stops(c))
        broken = (broken_step, jnp.bool_(True)) if program.finite else None
        return results(c, ys if program.loop == "scan" else None, num_steps, limit, broken)


def at(xs: Values, i: Any) -> Values:
    """The rows at a place. One of 64 bits is a sum: in 32-bit mode JAX transposes no choice of such a row."""
    is_it = jnp.arange(ROWS, dtype=jnp.int32) == i
    one = lambda rows: lax.reduce_sum(jnp.where(is_it, rows, rows - rows), [0])
    return {name: one(rows) if name == "x64" else rows[i] for name, rows in xs.items()}
