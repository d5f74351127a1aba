"""`cond` and `switch`: what a lane gets is what its own branch gives, in values, derivatives, errors and effects."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import loopax as lx
from tests.support.compiled import temporary
from tests.support.reference import assert_close

slow = pytest.mark.slow
COMPACT = lx.Compact(min_lanes=1)
LANES = ["lockstep", COMPACT]
each_lanes = pytest.mark.parametrize("lanes", LANES, ids=str)


def root_of(x: Any) -> Any:
    """Newton's method, which goes on for ever where there is no root."""
    step = lambda y: (y + x / y) / 2
    return lx.while_loop(lambda y: jnp.abs(y * y - x) > 1e-9, step, x + 1.0, kind=lx.Checkpointed(8))


# A function, and where it is defined: at its edge its derivative is infinite, beyond it is NaN or does not end.
EDGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sqrt": (lambda x: x > 0, jnp.sqrt),
    "log": (lambda x: x > 0, jnp.log),
    "division": (lambda x: x != 0, lambda x: 1 / x),
    "norm": (lambda x: x != 0, lambda x: jnp.linalg.norm(jnp.stack([x, 2 * x]))),
    "arccos": (lambda x: jnp.abs(x) < 1, jnp.arccos),
    "power": (lambda x: x > 0, lambda x: x**0.3),
    "logit": (lambda x: (x > 0) & (x < 1), jax.scipy.special.logit),
    "arctanh": (lambda x: jnp.abs(x) < 1, jnp.arctanh),
    "solve": (lambda x: x != 0, lambda x: jnp.linalg.solve(jnp.array([[x, 1.0], [0.0, x]]), jnp.ones(2)).sum()),
    "no convergence": (lambda x: x > 0, root_of),
}
STARTS = np.array([0.3, 0.0, -0.7, 0.9])
SLOW_EDGES = ["log", "division", "solve", "norm", "logit", "arctanh", "power", "arccos"]
each_edge = pytest.mark.parametrize("edge", [pytest.param(e, marks=slow) if e in SLOW_EDGES else e for e in EDGES])


def with_edge(edge: str, lanes: Any) -> Callable[..., Any]:
    """A function of x and of a weight that both branches share."""
    is_inside, f = EDGES[edge]

    def run(x: Any, w: Any) -> Any:
        return lx.cond(is_inside(x), lambda x: w * f(x) * x, lambda x: w * x**3, x, lanes=lanes)

    return run


def alone(edge: str, x: float) -> Callable[..., Any]:
    is_inside, f = EDGES[edge]
    return (lambda x, w: w * f(x) * x) if is_inside(x) else (lambda x, w: w * x**3)


@each_lanes
@each_edge
def test_derivatives_at_the_edge_of_a_domain(edge: str, lanes: Any) -> None:
    """Of each lane and of the whole batch, with respect to what lanes have and what they share."""
    run = with_edge(edge, lanes)

    @jax.jit
    def found(xs: Any) -> Any:
        batch = lambda xs, w: jax.vmap(run, (0, None))(xs, w).sum()
        return {
            "value": jax.vmap(run, (0, None))(xs, 1.5),
            "each": jax.vmap(jax.grad(run), (0, None))(xs, 1.5),
            "of batch": jax.grad(batch)(xs, 1.5),
            "weight": jax.grad(batch, 1)(xs, 1.5),
            "second": jax.vmap(jax.hessian(run), (0, None))(xs, 1.5),
            "second of batch": jax.grad(lambda xs: jax.grad(batch)(xs, 1.5).sum())(xs),
        }

    def expected(xs: Any) -> Any:
        each = [(alone(edge, x), x) for x in xs]
        first, second = ([d(f)(x, 1.5) for f, x in each] for d in (jax.grad, lambda f: jax.grad(jax.grad(f))))
        return {
            "value": [f(x, 1.5) for f, x in each],
            "each": first,
            "of batch": first,
            "weight": sum(jax.grad(f, 1)(x, 1.5) for f, x in each),
            "second": second,
            "second of batch": second,
        }

    outside = np.full(4, next(x for x in (-0.7, 0.0, 3.0) if not EDGES[edge][0](x)))
    for xs in (STARTS, outside):  # in the second batch no lane is inside
        got, wanted = found(xs), {name: jnp.asarray(rows) for name, rows in expected(xs).items()}
        assert_close(got, wanted)


# ---- the composition of transformations

OPERANDS = (np.array([0.4, -0.3]), np.array([[0.5, 0.1], [-0.2, 0.7]]))
XS = np.stack([OPERANDS[0], -OPERANDS[0], OPERANDS[0] * 2, OPERANDS[0] - 0.5])
NUMBERS = np.array([2, 0, 1, 5])
BRANCHES = [
    lambda x, w: jnp.tanh(w @ x),
    lambda x, w: lx.fori_loop(0, 2, lambda _, x: jnp.sin(w @ x) + x, x),
    lambda x, w: lax.scan(lambda x, _: (x * jnp.cos(x), None), x, None, length=3)[0],
]


def chosen(lanes: Any = "lockstep") -> Callable[..., Any]:
    return lambda i, x, w: (lx.switch(i, BRANCHES, x, w, lanes=lanes) ** 2).sum()


def one(i: int) -> Callable[..., Any]:
    return lambda x, w: (BRANCHES[min(i, 2)](x, w) ** 2).sum()


W = OPERANDS[1]
COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "value": lambda f: lambda i, x: f(i, x, W),
    "jvp": lambda f: lambda i, x: jax.jvp(lambda x: f(i, x, W), (x,), (jnp.ones_like(x),))[1],
    "grad": lambda f: lambda i, x: jax.grad(f, (1, 2))(i, x, W),
    "linearize": lambda f: lambda i, x: jax.linearize(lambda x: f(i, x, W), x)[1](jnp.ones_like(x)),
    "checkpoint": lambda f: lambda i, x: jax.grad(jax.checkpoint(f), (1, 2))(i, x, W),
    "forward over reverse": lambda f: lambda i, x: jax.jacfwd(jax.grad(f, 1), 1)(i, x, W),
    "reverse over forward": lambda f: lambda i, x: jax.jacrev(jax.jacfwd(f, 1), 1)(i, x, W),
    "reverse over reverse": lambda f: lambda i, x: jax.jacrev(jax.grad(f, 1), 1)(i, x, W),
    "forward over forward": lambda f: lambda i, x: jax.jacfwd(jax.jacfwd(f, 1), 1)(i, x, W),
    "in a loop": lambda f: (
        lambda i, x: jax.grad(lambda x: lx.fori_loop(0, 3, lambda _, x: x + 0.1 * jax.grad(f, 1)(i, x, W), x).sum())(x)
    ),
    "in a scan": lambda f: (
        lambda i, x: jax.grad(
            lambda x: lax.scan(lambda x, _: (x + 0.1 * f(i, x, W), None), x, None, length=2)[0].sum()
        )(x)
    ),
}
SLOW_ONES = [
    "forward over reverse",
    "reverse over forward",
    "forward over forward",
    "in a loop",
    "in a scan",
    "linearize",
    "checkpoint",
]
each_composition = pytest.mark.parametrize(
    "composition", [pytest.param(c, marks=slow) if c in SLOW_ONES else c for c in COMPOSITIONS]
)


def of_python(composition: str, i: int, x: Any) -> Any:
    return COMPOSITIONS[composition](lambda _, x, w: one(i)(x, w))(i, x)


@each_composition
def test_one_lane(composition: str) -> None:
    run = jax.jit(COMPOSITIONS[composition](chosen()))
    for i in (0, 1, 7, -2):
        assert_close(run(i, XS[0]), of_python(composition, min(max(i, 0), 2), XS[0]))


@each_lanes
@each_composition
def test_lanes(composition: str, lanes: Any) -> None:
    expected = [of_python(composition, i, x) for i, x in zip(NUMBERS, XS, strict=True)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *expected)
    run = COMPOSITIONS[composition](chosen(lanes))
    assert_close(jax.jit(jax.vmap(run))(NUMBERS, XS), stacked)
    same = jax.jit(jax.vmap(run, (None, 0)))(1, XS)  # one index for all
    assert_close(same, jax.tree.map(lambda *rows: jnp.stack(rows), *(of_python(composition, 1, x) for x in XS)))


@each_lanes
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=slow)])
def test_the_gradient_of_a_batch(lanes: Any, nested: bool) -> None:
    """With shared weights; of a batch of batches, too."""

    def total(x: Any, w: Any) -> Any:
        f = jax.vmap(chosen(lanes), (0, 0, None))
        if nested:
            return jax.vmap(f, (0, 0, None))(NUMBERS.reshape(2, 2), x.reshape(2, 2, 2), w).sum()
        return f(NUMBERS, x, w).sum()

    pairs = list(zip(NUMBERS, XS, strict=True))
    found = jax.jit(jax.grad(total, (0, 1)))(XS, W)
    assert_close(found[0], jnp.stack([jax.grad(one(i))(x, W) for i, x in pairs]))
    assert_close(found[1], sum(jax.grad(one(i), 1)(x, W) for i, x in pairs))


@pytest.mark.parametrize("lanes", [0, 1, 2, 33, 300])
def test_any_number_of_lanes_in_compact_batches(lanes: int) -> None:
    xs = jnp.linspace(-1.0, 1.0, lanes)
    f = lambda x: lx.cond(x > 0.2, jnp.sqrt, lambda x: x - 1.0, x, lanes=lx.Compact(min_lanes=4))
    assert_close(jax.jit(jax.vmap(f))(xs), jnp.where(xs > 0.2, jnp.sqrt(jnp.maximum(xs, 0.2)), xs - 1.0))
    if lanes:
        slopes = jnp.where(xs > 0.2, 0.5 / jnp.sqrt(jnp.maximum(xs, 0.2)), 1.0)
        assert_close(jax.jit(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(xs), slopes)


@slow
@each_lanes
def test_without_jit(lanes: Any) -> None:
    with jax.disable_jit():
        assert lx.cond(True, lambda x: x + 1, lambda x: x, 1.0) == 2.0
        found = jax.vmap(jax.grad(chosen(lanes), 1), (0, 0, None))(NUMBERS, XS, W)
    assert_close(found, jnp.stack([jax.grad(one(i))(x, W) for i, x in zip(NUMBERS, XS, strict=True)]))


# ---- what it costs


@pytest.mark.parametrize("size", [2, 6])
def test_compact_batches_evaluate_the_lanes_that_take_the_branch(size: int) -> None:
    batches: list[int] = []

    def counted(x: Any) -> Any:
        jax.debug.callback(lambda _: batches.append(1), x.sum() * 0)
        return x * 2

    taken = np.arange(24) % 12 < 5  # ten of 24
    lanes = lx.Compact(min_lanes=size)
    jax.jit(jax.vmap(lambda p, x: lx.cond(p, counted, lambda x: x, x, lanes=lanes)))(taken, np.ones((24, 1)))
    jax.effects_barrier()
    assert len(batches) == taken.sum()  # JAX calls back for each lane; none of the places left over do


def test_a_gradient_in_compact_batches_stores_nothing_of_the_branch() -> None:
    """The steps of a branch do not count."""

    def memory(steps: int) -> int:
        long = lambda x: lax.fori_loop(0, steps, lambda _, x: x + 1e-3, x)
        branch = lambda x: jnp.sin(lax.scan(lambda x, _: (jnp.sin(x), None), long(x), None, length=4)[0])
        f = lambda p, x: lx.cond(p, branch, lambda x: x, x, lanes=lx.Compact(min_lanes=8))
        total = lambda x: jax.vmap(f)(np.arange(512) % 64 == 0, x).sum()
        return temporary(jax.jit(jax.grad(total)).lower(np.ones((512, 16))).compile())

    one_lane_of_steps = 16 * 8 * 4
    assert memory(3) <= 8 * 512 * 16 * 6 + 8 * one_lane_of_steps * 8


def test_one_index_for_all_lanes_stays_one_conditional() -> None:
    f = jax.vmap(lambda p, x: lx.cond(p, jnp.sin, jnp.cos, x), (None, 0))
    text = jax.jit(f).lower(True, np.ones(8)).as_text()
    assert text.count("stablehlo.case") == 2
    assert "stablehlo.select" not in text


@pytest.mark.parametrize(
    ("branch", "is_selected"),
    [
        (lambda x: jnp.sin(x) * 2, True),
        (lambda x: W @ x, False),
        (lambda x: lax.cond(x[0] > 1, jnp.sin, jnp.cos, x), False),
        (lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=4)[0], False),
    ],
    ids=["elementwise", "product", "conditional", "scan"],
)
def test_lanes_compute_and_select_a_few_elementwise_operations(branch: Any, is_selected: bool) -> None:
    """Of both functions; any other one is a conditional of its own, which is not run where no lane takes it."""
    f = jax.vmap(lambda p, x: lx.cond(p, branch, lambda x: -x, x))
    text = jax.jit(f).lower(np.array([True, False]), np.ones((2, 2))).as_text()
    assert text.count("stablehlo.case") == (not is_selected)


def test_a_gradient_computes_nothing_of_a_branch_outside_of_it() -> None:
    """All of it depends on operands alone, which a loop takes for constants: it is not moved out of the branch."""
    steps = lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=4)[0]
    f = lambda p, x: lx.cond(p, steps, lambda x: x, x)
    for arguments in ((True, 1.0), (True, jnp.ones(3))):
        program = jax.make_jaxpr(lambda p, x: jax.vjp(lambda x: f(p, x), x)[1](x))(*arguments)
        assert "scan" not in [eqn.primitive.name for eqn in program.eqns]


# ---- pytrees, models, keys


def test_results_are_pytrees_of_any_kind() -> None:
    a = lambda x: {"x": x, "n": 1, "flag": True, "key": jax.random.key(1)}
    b = lambda x: {"x": x * 2, "n": 2, "flag": x > 0, "key": jax.random.key(2)}
    out = lx.cond(False, a, b, jnp.float32(3.0))
    assert out["x"].dtype == jnp.float32
    assert out["n"].weak_type
    assert bool(out["flag"])
    assert jax.random.key_data(out["key"])[1] == 2


def test_models_and_functions_among_the_operands() -> None:
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    f = lambda model, x, g: lx.cond(x[0] > 0, lambda m, x, g: g(m(x)), lambda m, x, g: x, model, x, g)
    x = jnp.array([1.0, 2.0], model.weight.dtype)
    found = eqx.filter_grad(lambda m: f(m, x, jnp.tanh).sum())(model)
    expected = eqx.filter_grad(lambda m: jnp.tanh(m(x)).sum())(model)
    assert_close(found.weight, expected.weight)


@pytest.mark.parametrize("taken", [True, False])
def test_nnx_objects_are_changed_in_the_branch_that_is_taken(taken: bool) -> None:
    counter = nnx.Variable(jnp.array(1.0))

    def up(counter: Any, x: Any) -> Any:
        counter[...] = counter[...] + x
        return counter[...]

    def down(counter: Any, x: Any) -> Any:
        counter[...] = counter[...] - x
        return counter[...]

    out = lx.cond(taken, up, down, counter, 0.25)
    assert out == counter[...] == (1.25 if taken else 0.75)


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lx.cond(True, lambda: (1, jnp.ones(3)), lambda: (2, jnp.ones(2))), TypeError, r"\[1\]: .*\[2\] and"),
        (lambda: lx.cond(True, lambda: {"a": 1}, lambda: {"b": 1}), TypeError, r"\['a'\].*missing"),
        (lambda: lx.cond(True, lambda: (1,), lambda: 1), TypeError, "the result itself: got"),
        (lambda: lx.cond(True, lambda: jnp.int32(1), lambda: 1.5), TypeError, "the result itself: .*int32"),
        (lambda: lx.switch(0, [jnp.sin, jnp.cos, lambda x: (x,)], 1.0), TypeError, r"branches\[2\] and branches\[0\]"),
        (lambda: lx.cond(jnp.ones(2), lambda: 1, lambda: 1), TypeError, r"got float64\[2\], expected one bool"),
        (lambda: lx.cond("yes", lambda: 1, lambda: 1), TypeError, "got str 'yes', expected one bool"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.cond(True, 3, lambda: 1), TypeError, "true_fun of cond: got int 3"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.switch(1.0, [lambda: 1]), TypeError, "got float 1.0, expected one integer"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.switch(0, []), ValueError, "got no branches"),
        (lambda: lx.switch(0, [3]), TypeError, r"branches\[0\] of switch: got int 3"),  # pyright: ignore[reportArgumentType]
        (lambda: lx.cond(True, jnp.sin, jnp.cos, 1.0, operand=2.0), TypeError, "by name and 1 by position"),
        (lambda: lx.cond(True, jnp.sin, jnp.cos, 1.0, lanes="free"), ValueError, "free lanes are for a loop"),
        (lambda: lx.cond(True, jnp.sin, jnp.cos, 1.0, lanes="eager"), ValueError, "Choose one of"),  # pyright: ignore[reportArgumentType]
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert re.search(message, str(raised.value)), str(raised.value)


@each_lanes
def test_collectives_under_predicates_of_each_lane(lanes: Any) -> None:
    f = lambda p, x: lx.cond(p, lambda x: lax.psum(x, "i"), lambda x: x, x, lanes=lanes)
    with pytest.raises(NotImplementedError, match="psum"):
        jax.vmap(f, axis_name="i")(np.array([True, False]), np.ones(2))
    assert_close(jax.vmap(f, (None, 0), axis_name="i")(True, np.ones(2)), jnp.full(2, 2.0))


def test_a_function_beside_another_one_than_before():
    """Which results a function computes depends on the other one: one that both hand on is not computed."""
    both = lambda x, y: (x, y)
    swapped = lambda x, y: (y, y)
    for other in (both, swapped, lambda x, y: (x, x)):
        assert lx.cond(True, both, other, 3.0, 5.0) == (3.0, 5.0)
        assert lx.cond(False, both, other, 3.0, 5.0) == other(3.0, 5.0)
