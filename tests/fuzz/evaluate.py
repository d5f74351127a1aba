"""A program as a function of JAX, and how it differs from the unrolled one."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fuzz.catalogue import OPERATIONS, WITH_CHECKPOINTS
from tests.fuzz.loops import Given, Loops, Rewritten, Unrolled, Values, WithLoopax, few_places
from tests.fuzz.operations import Layer
from tests.fuzz.program import BROKEN, ROWS, Program
from tests.fuzz.transformations import AROUND, DERIVATIVES, TRANSFORMATIONS, Function

SHAPES = {"v": (3,), "s": (), "w": (3, 3), "xs": (ROWS,), "re": (2,), "im": (2,), "weight": (3, 3)}
CARRIED = "zfdkgmbhrat"  # features that are leaves
IMPLEMENTATIONS = ("rbg", "unsafe_rbg", "threefry2x32")  # of keys


def function(program: Program, loops: Any) -> Function:
    """`f(t, n)`, transformed as the program says. Weights, start and rows depend on `t`."""
    random = np.random.RandomState(program.seed)
    fixed = {name: random.uniform(-1, 1, shape) for name, shape in SHAPES.items()}
    along = {name: random.uniform(-0.5, 0.5, (*shape, 2)) for name, shape in SHAPES.items()}

    def given(t: Any, n: Any) -> Any:
        number: Values = {name: fixed[name] + along[name] @ t.astype(float) for name in SHAPES}
        number |= {"t": t, "lane": n + (0 * t[0]).astype(jnp.int32)}  # which a batch of either of them maps
        start: Values = {"v": number["v"], "s": number["s"], "n": jnp.int32(program.seed % 3)}
        start |= {name: LEAVES[name](number, program.seed, loops) for name in program.features if name in CARRIED}
        closed_over = {name: start.pop(name) for name in loops.CLOSED_OVER if name in start}
        lane = {"lane": number["lane"]}
        steps = jnp.clip(n, 0, ROWS) if program.steps is None else program.steps

        def step(values: Values, x: Values) -> Values:
            values = values | closed_over | lane | x
            for name in program.body:
                values = OPERATIONS[name](values, x["x"], number["w"], loops)
            return {name: value for name, value in values.items() if name in start}

        key = key_of(IMPLEMENTATIONS[program.seed % 3], program.seed, number) if "y" in program.features else None
        breaks = (program.seed // 7 + number["lane"]) % (ROWS + 1)
        found = loops.run(program, Given(start, rows_of(program, number, loops), step, steps, key, breaks))
        return found | {"last": loops.plain(found["last"] | closed_over)}

    f: Function = loops.prepared(program, given)
    for name in program.transformations:
        f = TRANSFORMATIONS[name](f) if name in TRANSFORMATIONS else AROUND[name](f, loops.around())
    return f


def rows_of(program: Program, number: Values, loops: Any) -> Values:
    """What a loop reads row by row."""
    xs = {"x": number["xs"]}
    if "d" in program.features:
        xs["x64"] = jnp.concatenate([jnp.sin(number["t"]), -jnp.cos(number["t"])])
    if "p" in program.features:
        rows = lax.stop_gradient(number["weight"])[jnp.array([0, 1, 2, 0])]
        # A loop without rows takes them by their number, which JAX refuses in host memory.
        xs["x on host"] = loops.to_host(rows) if program.loop == "scan" else rows
    return xs


def key_of(implementation: str, seed: int, number: Values) -> Any:
    """Of its own for each lane: what `rbg` draws depends on whether keys are batched."""
    return jax.random.fold_in(jax.random.key(seed, impl=implementation), number["lane"])


# A leaf of the carry from numbers, a seed, and the loops.
LEAVES: dict[str, Callable[[Any, int, Any], Any]] = {
    "z": lambda number, seed, loops: lax.complex(number["re"], number["im"]),
    "f": lambda number, seed, loops: number["re"].astype(jnp.float32),
    "d": lambda number, seed, loops: number["t"],
    "k": lambda number, seed, loops: jax.random.key(seed),
    "g": lambda number, seed, loops: key_of(IMPLEMENTATIONS[seed % 2], seed, number),
    "m": lambda number, seed, loops: Layer(number["weight"], 0.7),
    "b": lambda number, seed, loops: loops.append(loops.buffer(), number["s"], jnp.bool_(True)),
    "h": lambda number, seed, loops: loops.history(0.7 * number["v"]),
    "r": lambda number, seed, loops: loops.mutable(number["re"]),
    "a": lambda number, seed, loops: jnp.outer(jnp.linspace(-1.0, 1.0, 40), number["v"]).reshape(-1),
    "t": lambda number, seed, loops: number["s"] > 0.0,
}


N = np.int32(3)
# XLA as our tests set it (`conftest.py`) may write a fused expression as often as it is used. An unrolled loop can take
# hours to compile then. XLA has no such setting from jaxlib 0.12 on.
NEW_FUSION = {"xla_cpu_use_fusion_emitters": True} if version("jaxlib").startswith("0.10.") else None


def problem(program: Program) -> str | None:
    """What loopax has wrong, an error included; None: nothing."""
    try:
        return difference(program)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"


def difference(program: Program) -> str | None:
    """What loopax has wrong; None: nothing."""
    t = jnp.array([0.4, -0.9])
    if "d" not in program.features:
        return _difference(program, t)
    with jax.enable_x64(False), warnings.catch_warnings():
        # JAX's own, of its functions in 32-bit mode: what is truncated here has another dtype than the reference.
        warnings.filterwarnings("ignore", "Explicitly requested dtype")
        return _difference(program, t)


def _difference(program: Program, t: Any) -> str | None:
    loops, unrolled = Rewritten() if program.rewritten else WithLoopax(), Unrolled()
    with few_places():
        got = jax.block_until_ready(jax.jit(function(program, loops))(t, N))
    plain = [name for name in program.transformations if name not in ("jit", "checkpoint")]
    reference = function(replace(program, transformations=tuple(plain)), unrolled)
    expected = jax.jit(reference, compiler_options=NEW_FUSION)(t, N)
    jax.effects_barrier()
    rough = {"f", "d"} & set(program.features)
    return _of_results(got, expected, 1e-3 if rough else 1e-8) or _of_calls(program, loops, unrolled)


def _of_results(got: Any, expected: Any, tolerance: float) -> str | None:
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
        if not (_close(a, b, tolerance) if a.dtype.kind in "fc" else np.array_equal(a, b)):
            return f"{where}: {a}, expected {b}"
    return None


def _close(a: Any, b: Any, tolerance: float) -> bool:
    return bool(np.all(np.abs(a - b) <= tolerance * np.max(np.abs(b), initial=1.0)))


def _of_calls(program: Program, got: Loops, expected: Loops) -> str | None:
    """Each as often; where a derivative recomputes what is in `jax.checkpoint`, once at least, as in JAX."""
    recomputed = {*program.body, *program.transformations} & {*WITH_CHECKPOINTS, "checkpoint"} or program.policy
    found = recomputed and DERIVATIVES & set(program.transformations)
    for who in {*got.calls.numbers, *expected.calls.numbers}:
        if program.finite in BROKEN and "backward_rule" in who[0]:
            continue  # a step that breaks is not differentiated, and the Python loop does not know that
        a, b = (np.asarray(loops.calls.numbers.get(who, [])) for loops in (got, expected))
        # A loop that breaks runs twice, and only a callback knows its results.
        is_asked_twice = program.finite in BROKEN and "ask" in who[0]
        if not (_same_set(a, b) if found or is_asked_twice else _same_calls(a, b, in_order="in_order" in who[0])):
            return f"calls of {who}: {a.tolist()}, expected {b.tolist()}"
    return None


ROUGHLY = 1e-5  # of numbers that callbacks get


def _same_calls(a: Any, b: Any, in_order: bool) -> bool:
    if not in_order:
        a, b = np.sort(a), np.sort(b)
    return a.shape == b.shape and _close(a, b, ROUGHLY)


def _same_set(a: Any, b: Any) -> bool:
    return all(any(_close(x, y, ROUGHLY) for y in ys) for xs, ys in ((a, b), (b, a)) for x in xs)
