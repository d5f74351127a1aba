"""Small programs that are the evidence for the cells of `docs/comparison.md`.

A program takes the name of a row, and returns the word that the cell must have.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.support.compiled import temporary_of

YES, NO, WRONG, DOES_NOT_ARISE, UNCHECKED = "yes", "no", "wrong", "\N{EN DASH}", "unchecked"

# What the peers say where they cannot do what a program asks. Any other error is one of the program itself.
REFUSALS = re.compile(
    "Reverse-mode differentiation does not work for lax.while_loop"
    "|can't apply forward-mode autodiff \\(jvp\\) to a custom_vjp function"
    "|Differentiation rule for 'custom_lin' not implemented"
    "|Unexpected tangent. `\\*args` and `\\*\\*kwargs` to `filter_custom_vjp` cannot be autodifferentiated"
    "|kind='bounded' requires `max_steps`"
    "|max_steps must be a non-negative integer"
    "|Abstract tracer value encountered where concrete value is expected"
    "|unhashable type: '\\w+Tracer'"
    "|must have equal (?:output )?types,? but they differ"
    "|Closure-converted function called with different dynamic arguments"
    "|not a valid JAX (?:array )?type"
    "|Cannot interpret value of type .* as an abstract array"
    "|Detected a JAX tracer being written into this State"
)

SCAN = " scan"
MASKED = "jax.lax masked"


def peer(module: str) -> Any:
    """A library. Importing brainstate warns, and switches 64 bits off; gradsolve switches them on."""
    before = jax.config.values["jax_enable_x64"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = importlib.import_module(module)
    jax.config.update("jax_enable_x64", before)
    return library


def brainstate() -> Any:
    return peer("brainstate")


def _masked(goes_on: Any, body: Any, init: Any, bound: int | None) -> Any:
    """As it is written by hand."""

    def step(carry: Any, _: None) -> tuple[Any, None]:
        active = goes_on(carry)
        return jax.tree.map(lambda new, old: jnp.where(active, new, old), body(carry), carry), None

    return lax.scan(step, init, None, bound)[0]


def _equinox(kind: Any, goes_on: Any, body: Any, init: Any, bound: int | None, **options: Any) -> Any:
    if kind == "checkpointed" and bound is None:
        options.setdefault("checkpoints", 4)
    return eqxi.while_loop(goes_on, body, init, max_steps=bound, kind=kind, **options)


def _of_brainstate(name: str, *args: Any, **options: Any) -> Any:
    return getattr(brainstate().transform, name)(*args, **options)


# Each takes (condition, body, first carry, bound).
WHILE_LOOPS: dict[str, Callable[..., Any]] = {
    "loopax": lambda *loop_of, **options: lx.while_loop(*loop_of[:3], max_steps=loop_of[3], **options),
    "jax.lax": lambda *loop_of: lax.while_loop(*loop_of[:3]),
    MASKED: _masked,
    "Flax NNX": lambda *loop_of: peer("flax.nnx").while_loop(*loop_of[:3]),
    "Equinox lax": partial(_equinox, "lax"),
    "Equinox checkpointed": partial(_equinox, "checkpointed"),
    "Equinox bounded": partial(_equinox, "bounded"),
    "brainstate": lambda *loop_of: _of_brainstate("while_loop", *loop_of[:3]),
    "brainstate bounded": lambda *loop_of: _of_brainstate("bounded_while_loop", *loop_of[:3], max_steps=loop_of[3]),
}


def _equinox_scan(f: Any, init: Any, xs: Any, length: Any, **options: Any) -> Any:
    return eqxi.scan(f, init, jnp.zeros(length) if xs is None else xs, length, kind="checkpointed", **options)


SCANS: dict[str, Callable[..., Any]] = {
    "loopax scan": lx.scan,
    "jax.lax scan": lax.scan,
    "Flax NNX scan": lambda f, init, xs, length: peer("flax.nnx").scan(f, length=length)(init, xs),
    "Equinox checkpointed scan": _equinox_scan,
    "brainstate scan": partial(_of_brainstate, "scan"),
    "brainstate checkpointed scan": partial(_of_brainstate, "checkpointed_scan"),
}

FORI_LOOPS: dict[str, Callable[..., Any]] = {
    "loopax fori_loop": lx.fori_loop,
    "jax.lax fori_loop": lax.fori_loop,
    "Flax NNX fori_loop": lambda *args: peer("flax.nnx").fori_loop(*args),
}


# What they take, for those that have no argument for something. One that gets a new argument may have learnt it.
NNX_SCAN = "f length reverse unroll _split_transpose in_axes out_axes transform_metadata graph graph_updates"
EQUINOX_WHILE = "cond_fun body_fun init_val max_steps buffers kind checkpoints base"
ARGUMENTS = {
    "jax.lax scan": ("jax.lax", "scan", "f init xs length reverse unroll _split_transpose"),
    "Flax NNX scan": ("flax.nnx", "scan", NNX_SCAN),
    "Flax NNX": ("flax.nnx", "while_loop", "cond_fun body_fun init_val graph graph_updates"),
    "jax.lax": ("jax.lax", "while_loop", "cond_fun body_fun init_val"),
    "Equinox lax": ("equinox.internal", "while_loop", EQUINOX_WHILE),
    "Equinox checkpointed scan": ("equinox.internal", "scan", "f init xs length buffers kind checkpoints"),
    "brainstate bounded": ("brainstate", "bounded_while_loop", "cond_fun body_fun init_val max_steps base"),
    "brainstate scan": ("brainstate", "scan", "f init xs length reverse unroll pbar"),
    "brainstate checkpointed scan": ("brainstate", "checkpointed_scan", "f init xs length base pbar"),
}
ARGUMENTS["Equinox checkpointed"] = ARGUMENTS["Equinox bounded"] = ARGUMENTS["Equinox lax"]


def has_no_argument(row: str) -> str:
    """`no`, if the function has those arguments that were there when the page was written."""
    module, name, arguments = ARGUMENTS[row]
    library = peer(module)
    function = getattr(library.transform if module == "brainstate" else library, name)
    new = inspect.signature(function).parameters.keys() ^ set(arguments.split())
    assert not new, f"{module}, {name} has other arguments ({new}): can it do now what docs/comparison.md denies?"
    return NO


def works(program: Callable[[], Any], expected: Any, rtol: float = 1e-6) -> str:
    """Whether a program gives a result or refuses."""
    try:
        found = program()
    except Exception as error:
        if REFUSALS.search(str(error)) is None:
            raise
        return NO
    return YES if np.allclose(found, expected, rtol=rtol, atol=1e-12) else WRONG


def power(row: str, bound: int | None) -> Callable[[Any], Any]:
    """A loop that raises its argument, 2, to the fourth power, in four steps."""

    def step(carry: Any) -> Any:
        return carry[0] * carry[1], carry[1]

    def by_scan(x: Any) -> Any:
        return SCANS[row](lambda carry, _: (step(carry), None), (x * 0 + 1, x), None, 4)[0][0]

    def by_while(x: Any) -> Any:
        return WHILE_LOOPS[row](lambda carry: carry[0] < 10.0, step, (x * 0 + 1, x), bound)[0]

    return by_scan if row.endswith(SCAN) else by_while


def tangent(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


MODES: dict[str, Callable[[Any], Any]] = {
    "reverse": jax.grad,
    "forward": tangent,
    "rev/rev": lambda f: jax.grad(jax.grad(f)),
    "fwd/rev": lambda f: tangent(jax.grad(f)),
    "rev/fwd": lambda f: jax.grad(tangent(f)),
}


def derivative(mode: str, row: str, bound: int | None = 8) -> str:
    """Whether a loop has one, and the right one: of x⁴ at 2."""
    expected = 32.0 if mode in {"reverse", "forward"} else 48.0
    return works(lambda: jax.jit(MODES[mode](power(row, bound)))(jnp.asarray(2.0)), expected)


def has_gradient(row: str) -> bool:
    return derivative("reverse", row) == YES


UNITS, STEPS = 64, 256


def carries(row: str, **options: Any) -> float:
    """The memory of the gradient of many steps, in carries."""

    def by_scan(x: Array) -> Array:
        return SCANS[row](lambda x, _: (jnp.sin(x), None), x, None, STEPS, **options)[0].sum()

    def by_while(x: Array) -> Array:
        body = lambda carry: (jnp.sin(carry[0]), carry[1] + 1)
        init = (x, jnp.zeros((), int))
        return WHILE_LOOPS[row](lambda carry: carry[1] < STEPS, body, init, STEPS, **options)[0].sum()

    x = jnp.ones(UNITS)
    return temporary_of(jax.grad(by_scan if row.endswith(SCAN) else by_while), x) / x.nbytes


def with_checkpoints(row: str, count: int) -> dict[str, Any]:
    return {"kind": lx.Checkpointed(count)} if row == "loopax" else {"checkpoints": count}


def choice(row: str) -> str:
    if row != "loopax" and "checkpoints" not in ARGUMENTS[row][2].split():
        return has_no_argument(row)
    if row == "Equinox bounded":  # its function has the argument, for another kind
        same = carries(row, **with_checkpoints(row, 4)) == carries(row, **with_checkpoints(row, 32))
        return NO if same else YES
    few, many = (carries(row, **with_checkpoints(row, count)) for count in (4, 32))
    return YES if few < 16 < many else NO


def fewer(row: str) -> str:
    options = {"kind": lx.Checkpointed()} if row == "loopax" else {}
    return YES if carries(row, **options) < STEPS / 2 else NO


ROWS = np.arange(1.0, 6.0)


def after(row: str) -> Callable[[Any, Any], Any]:
    """A loop of a given length: each step takes the sine, and a scan multiplies it by its row."""

    def by_scan(x: Any, n: Any) -> Any:
        step = lambda x, factor: (jnp.sin(x) * factor, None)
        return SCANS[row](step, x, jnp.asarray(ROWS), n)[0]

    return by_scan if row.endswith(SCAN) else lambda x, n: FORI_LOOPS[row](0, n, lambda _, x: jnp.sin(x), x)


def expected_after(row: str, x: Any, n: int) -> Any:
    for factor in ROWS[:n]:
        x = jnp.sin(x) * (factor if row.endswith(SCAN) else 1.0)
    return x


def values_of_length(row: str) -> str:
    return works(lambda: jax.jit(after(row))(0.7, 3), expected_after(row, 0.7, 3))


def gradient_of_length(row: str) -> str:
    if values_of_length(row) == NO:
        return DOES_NOT_ARISE
    return works(lambda: jax.jit(jax.grad(after(row)))(0.7, 3), jax.grad(lambda x: expected_after(row, x, 3))(0.7))


def lanes_of_length(row: str) -> str:
    program = lambda: jax.jit(jax.vmap(after(row)))(jnp.full(2, 0.7), jnp.array([2, 4]))
    return works(program, [expected_after(row, 0.7, n) for n in (2, 4)])


def roots(row: str) -> Callable[[Any], Any]:
    """The page's example: the sum of the roots of x, x - 1 and so on, down to 1."""
    body = lambda carry: (carry[0] - 1.0, carry[1] + jnp.sqrt(carry[0]))
    goes_on = lambda carry: carry[0] >= 1.0
    return lambda x: WHILE_LOOPS[row](goes_on, body, (x, jnp.zeros(())), 8)[1]


def no_nan(row: str) -> str:
    if not has_gradient(row):
        return DOES_NOT_ARISE
    found = jax.jit(jax.vmap(jax.grad(roots(row))))(jnp.array([1.0, 5.0]))
    expected = np.array([0.5, 0.5 * np.sum(1 / np.sqrt(np.arange(1.0, 6.0)))])
    is_nan = np.isnan(found)
    assert np.allclose(found[~is_nan], expected[~is_nan])
    return NO if is_nan.any() else YES


class Tally:
    """Counts evaluations, and the lanes of each."""

    def __init__(self) -> None:
        self.calls = self.lane_steps = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.lane_steps += np.size(x)
        return np.zeros_like(x)

    def count(self, x: Array) -> Array:
        return x + jax.pure_callback(self, jax.ShapeDtypeStruct((), x.dtype), x, vmap_method="expand_dims")


def inner(row: str) -> str:
    """Two lanes: one has an outer step of ten inner ones, the other ten outer steps of one."""
    tally = Tally()
    loop = WHILE_LOOPS[row]

    def lane(outer_steps: Array, inner_steps: Array) -> Array:
        def inner_body(carry: Any) -> Any:
            return carry[0] + 1, tally.count(carry[1])

        def outer_body(carry: Any) -> Any:
            init = (jnp.zeros_like(inner_steps), carry[1])
            return carry[0] + 1, loop(lambda carry: carry[0] < inner_steps, inner_body, init, 10)[1]

        init = (jnp.zeros_like(outer_steps), jnp.zeros(()))
        return loop(lambda carry: carry[0] < outer_steps, outer_body, init, 10)[1]

    jax.block_until_ready(jax.jit(jax.vmap(lane))(jnp.array([1, 10]), jnp.array([10, 1])))
    # In the first outer step, the lanes take 10 inner steps together. In the other nine, there is one to be taken.
    assert tally.calls in {10 + 9, 10 * 10}
    return YES if tally.calls == 10 + 9 else NO


def leave(row: str) -> str:
    """Fifteen lanes of one step, and one of sixteen."""
    tally = Tally()
    counts = jnp.array([1] * 15 + [16])
    options = {"lanes": lx.Compact(shrink=2, min_lanes=1)} if row == "loopax" else {}

    def lane(n: Array) -> Array:
        body = lambda carry: (carry[0] + 1, tally.count(carry[1]))
        init = (jnp.zeros_like(n), jnp.zeros(()))
        return WHILE_LOOPS[row](lambda carry: carry[0] < n, body, init, 16, **options)[1]

    jax.block_until_ready(jax.jit(jax.vmap(lane))(counts))
    return NO if tally.lane_steps == 16 * 16 else YES


def equinox_model(row: str) -> str:
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))

    def program() -> Array:
        body = lambda carry: (carry[0], carry[0](carry[1]), carry[2] + 1)
        init = (mlp, jnp.ones(2), jnp.zeros((), int))
        return WHILE_LOOPS[row](lambda carry: carry[2] < 2, body, init, 8)[1]

    return works(program, mlp(mlp(jnp.ones(2))))


def nnx_model(row: str) -> str:
    nnx = peer("flax.nnx")

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros((), int))

    def body(counter: Counter) -> Counter:
        counter.calls[...] += 1
        return counter

    counter = Counter()
    result = WHILE_LOOPS[row](lambda counter: counter.calls[...] < 3, body, counter, 8)
    assert result.calls[...] == 3
    return YES if result is counter and counter.calls[...] == 3 else NO


def state(row: str) -> str:
    total = brainstate().State(jnp.zeros(()))

    def body(i: Array) -> Array:
        total.value = total.value + 1.0
        return i + 1

    def program() -> Array:
        WHILE_LOOPS[row](lambda i: i < 3, body, jnp.zeros((), int), 8)
        return total.value

    return works(program, 3.0)


WEIGHTS, LANES = jnp.eye(32), 8


def apply(weights: Array, x: Array) -> Array:
    return jnp.tanh(weights @ x)


def with_weights(row: str) -> Callable[..., Array]:
    """Steps of a layer whose weights are in the carry."""

    def by_scan(weights: Array, x: Array, _: Array) -> Array:
        step = lambda carry, _: ((carry[0], apply(*carry)), None)
        return SCANS[row](step, (weights, x), None, 64)[0][1]

    def by_while(weights: Array, x: Array, n: Array) -> Array:
        body = lambda carry: (carry[0], apply(*carry[:2]), carry[2] + 1)
        options = {"kind": lx.Checkpointed()} if row == "loopax" else {}
        return WHILE_LOOPS[row](lambda carry: carry[2] < n, body, (weights, x, jnp.zeros_like(n)), 64, **options)[1]

    return by_scan if row.endswith(SCAN) else by_while


def stored_once(row: str) -> str:
    if not has_gradient(row):
        return DOES_NOT_ARISE
    gradient = jax.grad(lambda *args: with_weights(row)(*args).sum())
    # A few copies are those that a program works on: the weights, their cotangent, a sum.
    return YES if temporary_of(gradient, WEIGHTS, jnp.ones(32), jnp.array(60)) < 8 * WEIGHTS.nbytes else NO


def shared(row: str) -> str:
    batch = jax.vmap(with_weights(row), (None, 0, 0))
    bytes_of_batch = temporary_of(batch, WEIGHTS, jnp.ones((LANES, 32)), jnp.arange(LANES))
    return YES if bytes_of_batch < LANES * WEIGHTS.nbytes else NO


def over_devices(of: Callable[[Any], Any], row: str) -> str:
    if of is jax.grad and not has_gradient(row):
        return DOES_NOT_ARISE
    x = jnp.array([2.0, 3.0, 4.0, 1.5, 2.0, 3.0, 4.0, 5.0])
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")

    def word(check_vma: bool) -> str:
        lanes = jax.vmap(of(power(row, 8)))
        program = jax.shard_map(lanes, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return works(lambda: jax.jit(program)(x), jax.vmap(of(power("loopax", 8)))(x))

    checked = word(check_vma=True)
    return checked if checked == YES else {YES: UNCHECKED}.get(word(check_vma=False), NO)


def runge_kutta(a: Any) -> Any:
    """One unit of time of y' = -a y in four steps, in a loop that ends by a condition."""

    def step(carry: Any) -> Any:
        t, y = carry
        k1 = -a * y
        k2 = -a * (y + k1 / 8)
        k3 = -a * (y + k2 / 8)
        k4 = -a * (y + k3 / 4)
        return t + 0.25, y + (k1 + 2 * k2 + 2 * k3 + k4) / 24

    return lx.while_loop(lambda carry: carry[0] < 1.0, step, (jnp.zeros(()), jnp.ones(())))[1]


def solution(adjoint: str, a: Any, max_steps: int | None = 64, **options: Any) -> Any:
    diffrax = peer("diffrax")
    name = adjoint.replace(" ", "")
    name = name if name == "ForwardMode" else f"{name}Adjoint"
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, a: -a * y),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.25,
        y0=jnp.ones(()),
        args=a,
        max_steps=max_steps,
        adjoint=getattr(diffrax, name)(),
        **options,
    )


class Decay:
    """The equation, with what gradsolve asks for."""

    name, dim, t0, t1, is_stiff = "decay", 1, 0.0, 1.0, False

    def f_jax(self, t: Any, y: Any, a: Any) -> Any:
        return -a * y


def replayed(recorded_at: float) -> Callable[[Any], Any]:
    """The solution of gradsolve, in the steps that it takes for one a."""
    replay = peer("gradsolve").grad_closure(Decay(), np.ones((1, 1)), np.full((1, 1), recorded_at))
    return lambda a: replay(a.reshape(1, 1))[0, 0]


def decay(row: str, **options: Any) -> Callable[[Any], Any]:
    if row == "loopax":
        return runge_kutta
    if row == "gradsolve":
        return replayed(0.7)
    return lambda a: solution(row.removeprefix("Diffrax "), a, **options).ys[0]


def of_decay(mode: str, row: str) -> str:
    """Derivatives of exp(-a)."""
    sign = -1.0 if mode in {"reverse", "forward"} else 1.0
    return works(lambda: jax.jit(MODES[mode](decay(row)))(jnp.asarray(0.7)), sign * np.exp(-0.7), rtol=1e-3)


def optimistix_solution(adjoint: str, a: Any, max_steps: int = 64, **options: Any) -> Any:
    optimistix = peer("optimistix")
    return optimistix.fixed_point(
        lambda x, a: jnp.cos(a * x),
        optimistix.FixedPointIteration(rtol=1e-10, atol=1e-10),
        jnp.ones(()),
        a,
        adjoint=getattr(optimistix, f"{adjoint.replace(' ', '')}Adjoint")(),
        max_steps=max_steps,
        **options,
    )


def fixed_point(row: str, **options: Any) -> Callable[[Any], Any]:
    if not row.startswith("loopax"):
        return lambda a: optimistix_solution(row.removeprefix("optimistix "), a, **options).value
    implicit = row == "loopax Implicit"
    derivative = lx.Implicit(fixed_point=lambda carry: carry[0]) if implicit else None

    def by_loopax(a: Any) -> Any:
        body = lambda carry: (jnp.cos(a * carry[0]), jnp.abs(jnp.cos(a * carry[0]) - carry[0]))
        init = (jnp.ones(()), jnp.ones(()))
        return lx.while_loop(lambda carry: carry[1] > 1e-10, body, init, max_steps=64, derivative=derivative)[0]

    return by_loopax


def of_fixed_point(mode: str, row: str) -> str:
    """Derivatives of x = cos(a x), against those of Newton's method on x - cos(a x), unrolled."""

    def newton(a: Any) -> Any:
        x = jnp.asarray(0.8)
        for _ in range(6):
            x = x - (x - jnp.cos(a * x)) / (1 + a * jnp.sin(a * x))
        return x

    a = jnp.asarray(0.7)
    return works(lambda: jax.jit(MODES[mode](fixed_point(row)))(a), MODES[mode](newton)(a), rtol=1e-4)


def to_100(row: str, **options: Any) -> Any:
    return WHILE_LOOPS[row](lambda x: x < 100, lambda x: x + 1, jnp.zeros((), int), 10, **options)


def raises(program: Callable[[], Any], message: str) -> str:
    try:
        program()
    except RuntimeError as error:
        if message not in str(error):
            raise
        return YES
    return NO


def error_at_bound(row: str) -> str:
    if row == "Diffrax":
        return raises(lambda: decay("Diffrax Direct", max_steps=2)(0.7), "maximum number of solver steps")
    if row == "optimistix":
        return raises(lambda: fixed_point("optimistix Implicit", max_steps=2)(0.7), "maximum number of")
    found = raises(lambda: to_100(row), "max_steps=10 stopped a loop")
    assert found == YES or to_100(row) == 10
    return found


def flag_at_bound(row: str) -> str:
    if row == "loopax":
        result, info = to_100(row, throw=False, info=True)
        return YES if result == 10 and info.limit_reached else NO
    if row == "Diffrax":
        results = peer("diffrax").RESULTS
        return YES if solution("Direct", 0.7, max_steps=2, throw=False).result == results.max_steps_reached else NO
    if row == "optimistix":
        results = peer("optimistix").RESULTS
        found = optimistix_solution("Implicit", 0.7, max_steps=2, throw=False).result
        return YES if found == results.nonlinear_max_steps_reached else NO
    return has_no_argument(row)
